// How much to ask the device for. Small requests have segments of their own, which start small and grow with what is there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "policy.hpp"

namespace asyncmem::scheduler {

constexpr uint64_t refused = 0;  // of `segment`: the limit forbids it

class Growth {
public:
    explicit Growth(const Policy& policy) : policy_(policy) {}

    // Which arena a request of this size grows: 0 for small ones, 1 for others.
    uint32_t arena(uint64_t nbytes) const { return nbytes < policy_.small_limit && !policy_.direct ? 0 : 1; }

    // How large the next segment should be so that `need` bytes fit in one piece; `left` is what the limit leaves, `most`
    // what it should not exceed, unless the need does.
    uint64_t segment(uint64_t need, uint32_t arena, uint64_t in_arena, uint64_t left, uint64_t most) const {
        uint64_t unit = policy_.granularity, rounded = up(need), usual = up(usual_size(arena, in_arena));
        usual = std::min(usual, most - most % unit);
        uint64_t wish = policy_.direct ? rounded : std::max(rounded, usual);
        if (wish <= left) return wish;
        uint64_t whole = left - left % unit;
        if (rounded <= whole) return policy_.direct ? rounded : whole;
        return need <= left ? left : refused;  // the rest of an odd limit: the device rounds it up by itself
    }

private:
    uint64_t up(uint64_t nbytes) const {
        return (nbytes + policy_.granularity - 1) / policy_.granularity * policy_.granularity;
    }
    uint64_t usual_size(uint32_t arena, uint64_t in_arena) const {
        if (arena) return policy_.segment_size;
        return std::min(policy_.segment_size, std::max(2 * policy_.small_limit, in_arena / 2));
    }

    const Policy& policy_;
};

}  // namespace asyncmem::scheduler
