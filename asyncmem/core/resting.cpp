// Resting: blocks that come and go in turn are neither joined nor cut, but moved in their borders.
#include "heap.hpp"

#include <algorithm>

namespace asyncmem {

// Have a freed block rest before the hole that it belongs to, where it is easily told which requests that one serves.
bool Heap::lay_down(BlockId block) {
    const Node& node = nodes_[block];
    const Arena& arena = arenas_[node.arena];
    bool others = resting_.count && (resting_.stream != node.stream || resting_.arena != node.arena);
    if (arena.space || others || resting_.full()) return false;
    Front front{block, arena.index(2 + size_t{node.stream}), node.granules + nodes_[node.after].granules};
    uint32_t looked = 0;
    for (FreeIndex* index : {front.index, arena.index(0)}) {
        if (!index) continue;
        if (!index->few()) return false;
        looked += static_cast<uint32_t>(index->count());
        index->each([&](BlockId other) {
            uint64_t size = nodes_[other].granules;
            if (size <= front.whole && other != node.after) front.rival = std::max(front.rival, size);
        });
    }
    resting_.add(front);
    resting_.stream = node.stream;
    resting_.arena = node.arena;
    resting_.looked = looked;
    return true;
}

// Serve a request by a block at rest, whose border to the hole behind it moves; 0 where no such hole is for it.
BlockId Heap::slide(uint64_t granules, const Ask& ask, Outcome& outcome) {
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(granules << shift_);
    if (ask.stream != resting_.stream || arena != resting_.arena) return 0;
    uint32_t at = resting_.front_for(granules);
    if (at == Resting::none) return 0;
    const Front& front = resting_[at];
    Node& node = nodes_[front.block];
    Node& hole = nodes_[node.after];
    node.granules = granules;
    hole.address = node.address + (granules << shift_);
    hole.granules = front.whole - granules;
    node.epoch = hole.epoch = std::max(hole.epoch, node.epoch);
    front.index->resize(nodes_, hole, node.after);
    resting_.out = front.block;
    resting_.out_fronts = true;
    ++total_.merges;
    ++total_.splits;
    outcome.level = 3;
    outcome.touched += resting_.looked;
    total_.touched = std::max<uint64_t>(total_.touched, outcome.touched);
    return front.block;
}

// Before a search: holes are as large as they are with what rests before them, and wait for as much.
void Heap::tell_index() {
    for (const Front& front : resting_.fronts()) {
        const Node& node = nodes_[front.block];
        Node& hole = nodes_[node.after];
        hole.epoch = std::max(hole.epoch, node.epoch);
        index_resize(node.after, node.address, front.whole);
    }
}

// Before blocks are cut, joined or looked at: none rests, and nobody relies any longer on what lies where.
[[gnu::noinline]] void Heap::rouse_all() {
    for (const Front& front : resting_.fronts())
        if (front.block != resting_.out) sink(front.block, front.whole);
    resting_.count = 0;
    resting_.out = 0;
}

}  // namespace asyncmem
