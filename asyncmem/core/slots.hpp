// Things by number, where a number that was given back is used again.
#pragma once

#include <cstdint>
#include <vector>

namespace asyncmem {

template <class T>
class Slots {
public:
    // The first `count` are in use from the start.
    explicit Slots(uint32_t count = 0) : all_(count) {}

    // A number whose thing is to be filled in, of whatever it was before.
    uint32_t acquire() {
        if (reuse_.empty()) {
            all_.emplace_back();
            return size() - 1;
        }
        uint32_t at = reuse_.back();
        reuse_.pop_back();
        return at;
    }
    void release(uint32_t at) { reuse_.push_back(at); }

    T& operator[](uint32_t at) { return all_[at]; }
    const T& operator[](uint32_t at) const { return all_[at]; }
    uint32_t size() const { return static_cast<uint32_t>(all_.size()); }
    uint32_t used() const { return size() - static_cast<uint32_t>(reuse_.size()); }
    auto begin() { return all_.begin(); }
    auto end() { return all_.end(); }
    auto begin() const { return all_.begin(); }
    auto end() const { return all_.end(); }

private:
    std::vector<T> all_;
    std::vector<uint32_t> reuse_;
};

}  // namespace asyncmem
