// The recorded fences of one stream. Knows neither a driver nor Python: what a fence is only its user knows.
//
// Not safe for threads by itself: its user holds the interpreter's lock, and releases it only around driver calls. What
// such a call is about must be held by a `Fence::users` of its own, because others may take it out of its lane meanwhile.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace asyncmem {

struct Fence {
    void* made = nullptr;  // the driver's, or a Python object
    uint64_t epoch = 0;    // the highest epoch that it covers
    uint32_t users = 0;    // its lane, and each caller that asks it or waits for it just now
    bool native = false;   // `made` is the driver's
};

// One stream: how its driver calls are made, and its fences in the order of their epochs.
//
// A fence is recorded after its epoch was closed, so one that is done finishes all epochs up to its own, whatever the
// order in which several threads got through to the driver.
class Lane {
public:
    uint64_t handle = 0;     // the driver's number
    bool native = false;     // the device's fence calls may be used
    bool lasting = true;     // a reference keeps the stream alive; else only its caller vouches for it, while it calls
    bool everywhere = false;  // no stream at all but every stream of the device
    bool owed = false;       // a fence could not be recorded
    uint32_t unfenced = 0;   // frees whose fence waits for more of them
    uint64_t unfenced_bytes = 0;

    bool empty() const { return fences_.empty(); }
    size_t size() const { return fences_.size(); }
    Fence* at(size_t i) const { return fences_[i]; }
    bool crowded() const { return fences_.size() >= look_at_; }
    void looked() { look_at_ = fences_.size() + window; }

    // Keep a fence, unless there is one already that covers all that this one does.
    bool push(Fence* fence) {
        if (!fences_.empty() && fences_.back()->epoch >= fence->epoch) return false;
        fences_.push_back(fence);
        ++fence->users;
        return true;
    }

    // The oldest fence that covers an epoch, or null.
    Fence* covering(uint64_t epoch) const {
        auto found = std::ranges::lower_bound(fences_, epoch, {}, &Fence::epoch);
        return found == fences_.end() ? nullptr : *found;
    }

    // Remove all fences up to an epoch; those with no user left go to `dropped`.
    size_t pop(uint64_t epoch, std::vector<Fence*>& dropped) {
        size_t popped = 0;
        for (; !fences_.empty() && fences_.front()->epoch <= epoch; ++popped) {
            if (--fences_.front()->users == 0) dropped.push_back(fences_.front());
            fences_.pop_front();
        }
        return popped;
    }

private:
    // A lane that is not polled would keep all its fences; it is looked at each time that so many have come.
    static constexpr size_t window = 256;
    std::deque<Fence*> fences_;
    size_t look_at_ = window;
};

// Fences that died are used again: making one costs a third of what the driver charges for recording it.
class FencePool {
public:
    Fence* take() {
        if (spare_.empty()) {
            all_.push_back(std::make_unique<Fence>());
            spare_.reserve(all_.size());  // so that put() never allocates
            return all_.back().get();
        }
        Fence* fence = spare_.back();
        spare_.pop_back();
        return fence;
    }
    void put(Fence* fence) {
        *fence = Fence{};
        spare_.push_back(fence);
    }

private:
    std::vector<std::unique_ptr<Fence>> all_;
    std::vector<Fence*> spare_;
};

}  // namespace asyncmem
