// Blocks that rest: large ones that are placed and freed in turn, each before the hole that it is cut from.
#pragma once

#include <cstdint>
#include <span>

#include "index.hpp"
#include "node.hpp"

namespace asyncmem {

// A block before its hole. At rest its bytes are the hole's, and only its node lies there still: the next request that is
// for this hole moves the border between the two, which is all that joining them and cutting the hole anew would come to.
struct Front {
    BlockId block = 0;
    FreeIndex* index = nullptr;  // of the hole
    uint64_t whole = 0;          // granules of both
    uint64_t rival = 0;          // of the next smaller hole, or another as large: what fits there is not for this one
};

// The fronts of one stream in one arena. They are valid for as long as nothing is cut or joined but one block at a time,
// which is given back before another is taken: then the holes, as they are while all rest, stay the same.
class Resting {
public:
    static constexpr uint32_t most = 8, none = UINT32_MAX;

    std::span<Front> fronts() { return {fronts_, count}; }
    bool full() const { return count == most; }
    void add(const Front& front) { fronts_[count++] = front; }

    // The front whose hole is the smallest in which so much fits, or `none`.
    uint32_t front_for(uint64_t granules) const {
        uint32_t found = none;
        for (uint32_t at = 0; at < count; ++at)
            found = granules > fronts_[at].rival && granules < fronts_[at].whole ? at : found;
        return found;
    }
    const Front& operator[](uint32_t at) const { return fronts_[at]; }

    uint32_t count = 0;
    uint32_t stream = 0, arena = 0;
    uint32_t looked = 0;      // holes among which a search would choose
    BlockId out = 0;          // the one block that does not rest: it is taken
    bool out_fronts = false;  // and whether it is one of the fronts

private:
    Front fronts_[most];
};

}  // namespace asyncmem
