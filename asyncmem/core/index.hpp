// The free index, one for each (arena, stream key): a handful of free blocks side by side, or, where there are more,
// segregated lists with bitmaps over them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>

#include "few.hpp"
#include "node.hpp"

namespace asyncmem {

// Class of a size: exact below 64 granules, then 32 classes for each power of two (steps of 1.6 to 3.1 %).
inline uint32_t class_of(uint64_t granules) {
    uint32_t step = 58 - static_cast<uint32_t>(std::countl_zero(granules | 32));  // a class has 2**step sizes
    return step * 32 + static_cast<uint32_t>(granules >> step);
}

// A candidate is seen without touching its node. Blocks of one class differ by less than 2**32 granules,
// so the low half of the size orders them.
struct Candidate {
    uint64_t address;
    uint32_t low;
    BlockId node;
};

// Newest last; removal moves the last into the gap. Most classes hold few blocks, so the first three lie in the list itself:
// one cache line is all that adding, finding and removing one of those takes.
class alignas(64) CandidateList {
public:
    CandidateList() = default;
    CandidateList(const CandidateList&) = delete;
    CandidateList& operator=(const CandidateList&) = delete;
    ~CandidateList() {
        if (first_ != few_) delete[] first_;
    }

    const Candidate* begin() const { return first_; }
    const Candidate* end() const { return first_ + size_; }
    const Candidate& operator[](size_t at) const { return first_[at]; }
    uint32_t size() const { return size_; }
    bool empty() const { return size_ == 0; }

    void add(uint64_t address, uint32_t low, BlockId node) {
        if (size_ == room_) [[unlikely]] grow();
        first_[size_++] = {address, low, node};
    }

    // The node that lies in the gap from now on: the last, which may be the one that goes.
    BlockId remove(uint32_t at) {
        const Candidate& last = first_[--size_];
        BlockId moved = last.node;
        first_[at] = last;
        return moved;
    }

private:
    void grow() {
        Candidate* more = new Candidate[2 * room_];
        std::copy(first_, first_ + size_, more);
        if (first_ != few_) delete[] first_;
        first_ = more;
        room_ *= 2;
    }

    static constexpr uint32_t few = 3;
    Candidate* first_ = few_;
    uint32_t size_ = 0, room_ = few;
    Candidate few_[few];
};
static_assert(sizeof(CandidateList) == 64);

class FreeIndex {
public:
    static constexpr uint32_t none = UINT32_MAX;

    void add(NodeTable& nodes, Node& node, BlockId id) {
        if (few_ && places_.full()) [[unlikely]] spread(nodes);
        ++count_;
        if (few_) {
            places_.add(node, id);
        } else {
            list(node, id);
        }
    }

    void remove(NodeTable& nodes, const Node& node) {
        --count_;
        if (few_) {
            places_.remove(node);
        } else {
            unlist(nodes, node);
            if (count_ == Few::most / 2) [[unlikely]] gather(nodes);
        }
    }

    // A block here has grown or shrunk.
    void resize(NodeTable& nodes, Node& node, BlockId id) {
        if (few_) {
            places_.resize(node);
        } else {
            remove(nodes, node);
            add(nodes, node, id);
        }
    }

    // The blocks, as long as they are few; else none.
    const Few* few() const { return few_ ? &places_ : nullptr; }

    // The first class at or above `cls` that holds a block, or `none`; for many.
    uint32_t next(uint32_t cls) const {
        uint32_t row = cls >> 5;
        uint32_t filled = filled_[row] >> (cls & 31);
        if (filled) return cls + static_cast<uint32_t>(std::countr_zero(filled));
        uint64_t above = row + 1 < row_count ? summary_ >> (row + 1) : 0;
        if (!above) return none;
        row += 1 + static_cast<uint32_t>(std::countr_zero(above));
        return (row << 5) + static_cast<uint32_t>(std::countr_zero(filled_[row]));
    }

    const CandidateList& at(uint32_t cls) const { return rows_[cls >> 5][cls & 31]; }
    size_t count() const { return count_; }

    bool holds(const Node& node, BlockId id) const {
        if (few_) return places_.holds(node, id);
        uint32_t cls = class_of(node.granules);
        if (node.link != cls || !rows_[cls >> 5] || node.slot >= at(cls).size()) return false;
        const Candidate& c = at(cls)[node.slot];
        return c.node == id && c.address == node.address && c.low == static_cast<uint32_t>(node.granules);
    }

    // All blocks, the smaller classes first where there are many.
    template <typename Look>
    void each(Look&& look) const {
        if (few_) return places_.each(look);
        for (uint32_t cls = next(0); cls != none; cls = next(cls + 1))
            for (const Candidate& c : at(cls)) look(c.node);
    }

    // Those among which the largest is: all, or where there are many the highest class.
    template <typename Look>
    void each_large(Look&& look) const {
        if (few_) return places_.each(look);
        uint32_t row = 63 - static_cast<uint32_t>(std::countl_zero(summary_));
        for (const Candidate& c : at((row << 5) + 31 - static_cast<uint32_t>(std::countl_zero(filled_[row])))) look(c.node);
    }

private:
    void list(Node& node, BlockId id) {
        uint32_t cls = class_of(node.granules), row = cls >> 5;
        if (!rows_[row]) [[unlikely]] rows_[row] = std::make_unique<CandidateList[]>(32);
        CandidateList& list = rows_[row][cls & 31];
        node.slot = list.size();
        node.link = cls;
        list.add(node.address, static_cast<uint32_t>(node.granules), id);
        filled_[row] |= 1u << (cls & 31);
        summary_ |= uint64_t{1} << row;
    }

    // Without a branch: which candidate is the last, or the only one, is nothing that a processor could foresee.
    void unlist(NodeTable& nodes, const Node& node) {
        uint32_t cls = node.link, slot = node.slot, row = cls >> 5;
        CandidateList& list = rows_[row][cls & 31];
        nodes[list.remove(slot)].slot = slot;
        filled_[row] &= ~(uint32_t{list.empty()} << (cls & 31));
        summary_ &= ~(uint64_t{!filled_[row]} << row);
    }

    // From places to lists, where the lowest block counts as the oldest, and back.
    [[gnu::noinline]] void spread(NodeTable& nodes) {
        BlockId all[Few::most], *end = all;
        places_.each([&](BlockId id) { *end++ = id; });
        std::sort(all, end, [&](BlockId a, BlockId b) { return nodes[a].address < nodes[b].address; });
        places_ = Few{};
        few_ = false;
        for (BlockId id : all) list(nodes[id], id);
    }

    [[gnu::noinline]] void gather(NodeTable& nodes) {
        few_ = true;
        for (uint32_t cls = next(0); cls != none; cls = next(cls)) {
            BlockId id = at(cls)[0].node;
            unlist(nodes, nodes[id]);
            places_.add(nodes[id], id);
        }
    }

    static constexpr uint32_t row_count = 35;  // sizes up to 2**38 granules

    size_t count_ = 0;
    bool few_ = true;
    Few places_;
    uint64_t summary_ = 0;  // rows in which a class holds a block
    uint32_t filled_[row_count] = {};
    std::unique_ptr<CandidateList[]> rows_[row_count];  // of 32 classes each
};

}  // namespace asyncmem
