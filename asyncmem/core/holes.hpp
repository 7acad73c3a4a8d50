// The free blocks of a space that have a whole page in them, found by any page of theirs.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "node.hpp"

namespace asyncmem {

// Each is filed under its first whole page. Bitmaps of two levels find the next one filed at or below a page.
class Holes {
public:
    void add(uint64_t page, BlockId block) {
        if (page >= first_.size()) grow(page);
        first_[page] = block;
        filed_[page >> 6] |= bit(page);
        some_[page >> 12] |= bit(page >> 6);
    }

    void remove(uint64_t page) {
        if (!(filed_[page >> 6] &= ~bit(page))) some_[page >> 12] &= ~bit(page >> 6);
    }

    // The block filed at `page` or next below it, or 0.
    BlockId below(uint64_t page) const {
        if (page >= first_.size()) page = first_.size() - 1;
        if (page == UINT64_MAX) return 0;
        if (uint64_t found = upto(filed_[page >> 6], page)) return first_[(page & ~uint64_t{63}) + top(found)];
        uint64_t word = page >> 6, row = word >> 6;
        uint64_t found = some_[row] & (bit(word) - 1);
        while (!found && row) found = some_[--row];
        if (!found) return 0;
        word = (row << 6) + top(found);
        return first_[(word << 6) + top(filed_[word])];
    }

private:
    static uint64_t bit(uint64_t at) { return uint64_t{1} << (at & 63); }
    static uint64_t upto(uint64_t word, uint64_t at) { return word & (bit(at) | (bit(at) - 1)); }
    static uint64_t top(uint64_t word) { return 63 - static_cast<uint64_t>(std::countl_zero(word)); }

    void grow(uint64_t page) {
        first_.resize((page + 1) * 5 / 4);
        filed_.resize((first_.size() >> 6) + 1);
        some_.resize((filed_.size() >> 6) + 1);
    }

    std::vector<BlockId> first_;
    std::vector<uint64_t> filed_, some_;
};

}  // namespace asyncmem
