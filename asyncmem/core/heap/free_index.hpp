// The free index, one for each (arena, stream key): a handful of free blocks side by side, or, where there are more,
// segregated lists with bitmaps over them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "node.hpp"

namespace asyncmem {

// The free blocks of an index while they are few: one look at all of them finds the best, and none has to be sorted in.
//
// Each block has a place, which it keeps while it grows and shrinks. Nothing here branches on sizes: which of a handful of
// holes serves a request of a random size is nothing that a processor could foresee.
class SmallIndex {
public:
    static constexpr uint32_t most = 32;

    bool full() const { return !~used_; }
    bool holds(const Node& node, BlockId id) const {
        return node.slot < most && nodes_[node.slot] == id && keys_[node.slot] == node.granules * most + node.slot;
    }

    void add(Node& node, BlockId id) {
        node.slot = static_cast<uint32_t>(std::countr_one(used_));
        used_ |= 1u << node.slot;
        nodes_[node.slot] = id;
        resize(node);
    }

    void remove(const Node& node) {
        used_ &= ~(1u << node.slot);
        keys_[node.slot] = lows_[node.slot] = 0;
    }

    void resize(const Node& node) {
        keys_[node.slot] = node.granules * most + node.slot;
        lows_[node.slot] = static_cast<uint32_t>(node.granules);
    }

    // The smallest that is large enough, of several of that size the lowest.
    BlockId best(uint64_t granules, const NodeTable& nodes) const {
        if (used_ < 1u << 8) return best_of<8>(granules, nodes);
        return used_ < 1u << 16 ? best_of<16>(granules, nodes) : best_of<most>(granules, nodes);
    }

    template <typename Look>
    void each(Look&& look) const {
        for (uint32_t left = used_; left; left &= left - 1) look(nodes_[std::countr_zero(left)]);
    }

private:
    template <uint32_t count>
    BlockId best_of(uint64_t granules, const NodeTable& nodes) const {
        uint64_t key = least<count>(keys_, granules * most) + granules * most;
        if (key < granules * most) return 0;
        uint32_t alike = 0, low = static_cast<uint32_t>(key / most);
        for (uint32_t at = 0; at < count; ++at) alike += lows_[at] == low;
        return alike == 1 ? nodes_[key % most] : lowest(key / most, nodes);
    }

    // The least of some keys above `floor`, and by how much; what lies below it wraps around, as an empty place does.
    template <uint32_t count>
    [[gnu::always_inline]] static uint64_t least(const uint64_t* keys, uint64_t floor) {
        if constexpr (count == 1) {
            return *keys - floor;
        } else {
            return std::min(least<count / 2>(keys, floor), least<count / 2>(keys + count / 2, floor));
        }
    }

    [[gnu::noinline]] BlockId lowest(uint64_t granules, const NodeTable& nodes) const {
        BlockId lowest = 0;
        each([&](BlockId id) {
            if (nodes[id].granules == granules && (!lowest || nodes[id].address < nodes[lowest].address)) lowest = id;
        });
        return lowest;
    }

    uint32_t used_ = 0;         // places, a bit each
    uint64_t keys_[most] = {};  // granules, and the place in the lowest bits; 0: empty
    uint32_t lows_[most] = {};  // the low half of the granules, of which a processor compares several at once
    BlockId nodes_[most] = {};
};

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

// Newest last; removal moves the last into the gap.
using CandidateList = std::vector<Candidate>;

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
            if (count_ == SmallIndex::most / 2) [[unlikely]] gather(nodes);
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
    const SmallIndex* few() const { return few_ ? &places_ : nullptr; }

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

    // All blocks, the smaller classes first where there are many; of those, at least what has so many granules.
    template <typename Look>
    void each(Look&& look, uint64_t granules = 0) const {
        if (few_) return places_.each(look);
        for (uint32_t cls = next(class_of(granules)); cls != none; cls = next(cls + 1))
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
        node.slot = static_cast<uint32_t>(list.size());
        node.link = cls;
        list.push_back({node.address, static_cast<uint32_t>(node.granules), id});
        filled_[row] |= 1u << (cls & 31);
        summary_ |= uint64_t{1} << row;
    }

    // Without a branch: which candidate is the last, or the only one, is nothing that a processor could foresee.
    void unlist(NodeTable& nodes, const Node& node) {
        uint32_t cls = node.link, slot = node.slot, row = cls >> 5;
        CandidateList& list = rows_[row][cls & 31];
        nodes[list.back().node].slot = slot;  // which may be the one that goes
        list[slot] = list.back();
        list.pop_back();
        filled_[row] &= ~(uint32_t{list.empty()} << (cls & 31));
        summary_ &= ~(uint64_t{!filled_[row]} << row);
    }

    // From places to lists, where the lowest block counts as the oldest, and back.
    [[gnu::noinline]] void spread(NodeTable& nodes) {
        BlockId all[SmallIndex::most], *end = all;
        places_.each([&](BlockId id) { *end++ = id; });
        std::sort(all, end, [&](BlockId a, BlockId b) { return nodes[a].address < nodes[b].address; });
        places_ = SmallIndex{};
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
    SmallIndex places_;
    uint64_t summary_ = 0;  // rows in which a class holds a block
    uint32_t filled_[row_count] = {};
    std::unique_ptr<CandidateList[]> rows_[row_count];  // of 32 classes each
};

// A freed block that is not joined yet with the hole behind it. Its bytes are the hole's, and only its node lies there
// still: the next request that is for this hole moves the border between the two, which is all that joining them and
// cutting the hole anew would come to. Or a hole by itself that is in no index yet, and serves a request of its size.
struct DeferredBlock {
    BlockId block = 0;
    FreeIndex* index = nullptr;  // of the hole; none for a block that is all of it
    uint64_t whole = 0;          // granules of both
    uint64_t rival = 0;          // of the next smaller hole, or another as large: what fits there is not for this one
};

// Those of one stream in one arena, or a single one that is all of its hole. They are valid for as long as nothing is cut or joined but one block at a time, which
// is given back before another is taken: then the holes, as they are while all are deferred, stay the same.
class Deferred {
public:
    static constexpr uint32_t most = 8, none = UINT32_MAX;

    std::span<DeferredBlock> blocks() { return {blocks_, count}; }
    bool full() const { return count == most || lone(); }
    bool lone() const { return count && !blocks_[0].index; }
    void add(const DeferredBlock& one) { blocks_[count++] = one; }

    // The one whose hole is the smallest in which so much fits, or `none`.
    uint32_t block_for(uint64_t granules) const {
        if (lone()) return granules == blocks_[0].whole ? 0 : none;
        uint32_t found = none;
        for (uint32_t at = 0; at < count; ++at)
            found = granules > blocks_[at].rival && granules < blocks_[at].whole ? at : found;
        return found;
    }
    const DeferredBlock& operator[](uint32_t at) const { return blocks_[at]; }

    uint32_t count = 0;
    uint32_t stream = 0, arena = 0;
    uint32_t looked = 0;      // holes among which a search would choose
    BlockId out = 0;          // the one block of them, or beside them, that is taken
    bool out_deferred = false;  // and whether it is one of them

private:
    DeferredBlock blocks_[most];
};

}  // namespace asyncmem
