// The free blocks of an index while they are few: one look at all of them finds the best, and none has to be sorted in.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "node.hpp"

namespace asyncmem {

// Each block has a place, which it keeps while it grows and shrinks. Nothing here branches on sizes: which of a handful of
// holes serves a request of a random size is nothing that a processor could foresee.
class Few {
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

}  // namespace asyncmem
