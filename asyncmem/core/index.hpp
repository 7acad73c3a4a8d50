// The free index: segregated lists of free blocks with bitmaps over them, one for each (arena, stream key).
#pragma once

#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "node.hpp"

namespace asyncmem {

// Class of a size: exact up to 64 granules, then 32 classes for each power of two (steps of 1.6 to 3.1 %).
inline uint32_t class_of(uint64_t granules) {
    if (granules <= 64) return static_cast<uint32_t>(granules - 1);
    uint32_t octave = 63 - static_cast<uint32_t>(std::countl_zero(granules));
    return 64 + (octave - 6) * 32 + static_cast<uint32_t>((granules >> (octave - 5)) & 31);
}

// A candidate is seen without touching its node. Blocks of one class differ by less than 2**32 granules,
// so the low half of the size orders them.
struct Candidate {
    uint64_t address;
    uint32_t low;
    BlockId node;
};

using CandidateList = std::vector<Candidate>;  // newest last; removal moves the last into the gap

class FreeIndex {
public:
    static constexpr uint32_t none = UINT32_MAX;

    void add(NodeTable& nodes, BlockId id) {
        Node& node = nodes[id];
        uint32_t cls = class_of(node.granules);
        auto& row = rows_[cls >> 5];
        if (!row) row = std::make_unique<Row>();
        CandidateList& list = row->lists[cls & 31];
        node.slot = static_cast<uint32_t>(list.size());
        node.link = cls;
        list.push_back({node.address, static_cast<uint32_t>(node.granules), id});
        row->filled |= 1u << (cls & 31);
        summary_ |= uint64_t{1} << (cls >> 5);
        ++count_;
    }

    void remove(NodeTable& nodes, BlockId id) {
        const Node& node = nodes[id];
        uint32_t cls = node.link;
        CandidateList& list = rows_[cls >> 5]->lists[cls & 31];
        if (node.slot + 1 != list.size()) {
            list[node.slot] = list.back();
            nodes[list.back().node].slot = node.slot;
        }
        list.pop_back();
        --count_;
        if (list.empty()) mark_empty(cls);
    }

    // The first class at or above `cls` that holds a block, or `none`.
    uint32_t next(uint32_t cls) const {
        uint32_t row = cls >> 5;
        if (summary_ >> row & 1) {
            uint32_t filled = rows_[row]->filled >> (cls & 31);
            if (filled) return cls + static_cast<uint32_t>(std::countr_zero(filled));
        }
        uint64_t above = row + 1 < row_count ? summary_ >> (row + 1) : 0;
        if (!above) return none;
        row += 1 + static_cast<uint32_t>(std::countr_zero(above));
        return (row << 5) + static_cast<uint32_t>(std::countr_zero(rows_[row]->filled));
    }

    // The highest class that holds a block, or `none`.
    uint32_t top() const {
        if (!summary_) return none;
        uint32_t row = 63 - static_cast<uint32_t>(std::countl_zero(summary_));
        return (row << 5) + 31 - static_cast<uint32_t>(std::countl_zero(rows_[row]->filled));
    }

    const CandidateList& at(uint32_t cls) const { return rows_[cls >> 5]->lists[cls & 31]; }
    size_t count() const { return count_; }

private:
    static constexpr uint32_t row_count = 35;  // sizes up to 2**38 granules
    struct Row {
        uint32_t filled = 0;
        CandidateList lists[32];
    };

    void mark_empty(uint32_t cls) {
        Row& row = *rows_[cls >> 5];
        row.filled &= ~(1u << (cls & 31));
        if (!row.filled) summary_ &= ~(uint64_t{1} << (cls >> 5));
    }

    std::unique_ptr<Row> rows_[row_count];
    uint64_t summary_ = 0;
    size_t count_ = 0;
};

}  // namespace asyncmem
