// The model of a GPU that is late: each fence is done a fixed time after it was recorded. Times are in microseconds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <vector>

#include "heap.hpp"

namespace asyncmem::replay {

class Timeline {
public:
    Timeline(Heap& heap, uint32_t streams, double lag) : heap_(heap), lag_(lag), dirty_(streams, 0) {}

    // Something was freed there that no fence covers yet.
    void touch(uint32_t stream) { dirty_[stream] = 1; }

    // Record a fence on each stream that has been touched, and answer how many.
    uint64_t record(double now) {
        uint64_t recorded = 0;
        for (uint32_t stream = 0; stream < dirty_.size(); ++stream) {
            if (!dirty_[stream]) continue;
            record(stream, now);
            ++recorded;
        }
        return recorded;
    }

    // Record one on this stream.
    void record(uint32_t stream, double now) {
        uint64_t epoch = heap_.close_epoch(stream);
        heap_.publish(stream, epoch);
        fences_.push_back({now + lag_, {stream, epoch}});
        dirty_[stream] = 0;
    }

    // Tell the heap which fences are done by now, and answer how many.
    uint64_t observe(double now) {
        uint64_t done = 0;
        for (; !fences_.empty() && fences_.front().done <= now; ++done) {
            heap_.mark_done(fences_.front().entry.stream, fences_.front().entry.epoch);
            fences_.pop_front();
        }
        return done;
    }

    // Whether nothing happens until something is freed.
    bool idle() const { return fences_.empty() && std::find(dirty_.begin(), dirty_.end(), 1) == dirty_.end(); }

    // When all of these uses are done, if all of them are recorded.
    double end(const Entries& entries) const {
        double latest = 0;
        for (const Entry& entry : entries)
            for (const Fence& fence : fences_)
                if (fence.entry.stream == entry.stream && fence.entry.epoch >= entry.epoch) {
                    latest = std::max(latest, fence.done);
                    break;
                }
        return latest;
    }

private:
    struct Fence {
        double done;
        Entry entry;
    };

    Heap& heap_;
    double lag_;
    std::vector<uint8_t> dirty_;
    std::deque<Fence> fences_;  // they end in the order in which they were recorded
};

}  // namespace asyncmem::replay
