// Deferred: blocks that come and go in turn are neither joined nor cut, but moved in their borders.
#include "heap.hpp"

#include <algorithm>

namespace asyncmem {

// Put off joining a freed block with the hole behind it, or making a hole of it, where it is easily told which requests it
// serves then.
bool Heap::defer(BlockId block, bool sinks) {
    const Node& node = nodes_[block];
    const Arena& arena = arenas_[node.arena];
    bool others = deferred_.count && (!sinks || deferred_.stream != node.stream || deferred_.arena != node.arena);
    const Node& hole = nodes_[sinks ? node.after : 0];
    if (hole.bare || others || deferred_.full()) return false;
    FreeIndex* own = arena.index(2 + size_t{node.stream});
    DeferredBlock put_off{block, sinks ? own : nullptr, node.granules + (sinks ? hole.granules : 0)};
    uint32_t looked = !sinks;
    for (FreeIndex* index : {own, arena.index(0)}) {
        if (!index) continue;
        if (!index->few()) return false;
        looked += static_cast<uint32_t>(index->count());
        index->each([&](BlockId other) {
            uint64_t size = nodes_[other].granules;
            if (size <= put_off.whole && !(sinks && other == node.after)) put_off.rival = std::max(put_off.rival, size);
        });
    }
    if (!sinks && put_off.rival == put_off.whole) return false;  // the lower one serves
    deferred_.add(put_off);
    deferred_.stream = node.stream;
    deferred_.arena = node.arena;
    deferred_.looked = looked;
    return true;
}

// Serve a request by a block that is not joined yet, whose border to the hole behind it moves; 0 where none is for it.
BlockId Heap::take_deferred(uint64_t granules, const Ask& ask, Outcome& outcome) {
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(granules << shift_);
    if (ask.stream != deferred_.stream || arena != deferred_.arena) return 0;
    uint32_t at = deferred_.block_for(granules);
    if (at == Deferred::none) return 0;
    const DeferredBlock& one = deferred_[at];
    if (one.index) {
        Node& node = nodes_[one.block];
        Node& hole = nodes_[node.after];
        node.granules = granules;
        hole.address = node.address + (granules << shift_);
        hole.granules = one.whole - granules;
        node.epoch = hole.epoch = std::max(hole.epoch, node.epoch);
        one.index->resize(nodes_, hole, node.after);
        ++total_.merges;
        ++total_.splits;
    }
    deferred_.out = one.block;
    deferred_.out_deferred = true;
    outcome.level = 3;
    outcome.touched += deferred_.looked;
    total_.touched = std::max<uint64_t>(total_.touched, outcome.touched);
    return one.block;
}

// Before a search: holes are as large as they are with the deferred block before them, and wait for as much.
void Heap::sync_index() {
    for (const DeferredBlock& one : deferred_.blocks()) {
        const Node& node = nodes_[one.block];
        Node& hole = nodes_[node.after];
        hole.epoch = std::max(hole.epoch, node.epoch);
        move_hole(node.after, node.address, one.whole);
    }
}

// Before blocks are cut, joined or looked at: join what was put off, so that no code relies on what lies where.
[[gnu::noinline]] void Heap::coalesce_all() {
    for (const DeferredBlock& one : deferred_.blocks()) {
        if (one.block == deferred_.out) continue;
        if (!one.index) {
            index_add(one.block);
            continue;
        }
        uint64_t address = nodes_[one.block].address;
        BlockId hole = nodes_[one.block].after;
        join_hole(one.block);
        move_hole(hole, address, one.whole);
    }
    deferred_.count = 0;
    deferred_.out = 0;
}

// Cut just these bytes out of the free blocks of a lease that they lie in; 0 where not all of them are free and eligible.
BlockId Heap::place_at(const Segment& range, uint64_t address, Search& search) {
    coalesce();
    uint64_t end = address + (search.granules << shift_);
    BlockId first = range.first;
    for (; nodes_[first].address + bytes(nodes_[first]) <= address; first = nodes_[first].after) ++search.touched;
    for (BlockId block = first; block && nodes_[block].address < end; block = nodes_[block].after) {
        ++search.touched;
        if (nodes_[block].state != State::Free || !eligible(nodes_[block], search.stream, search.bound)) return 0;
    }
    index_remove(nodes_[first]);
    if (uint64_t before = address - nodes_[first].address) {
        BlockId rest = cut(first, before >> shift_);
        index_add(first);
        first = rest;
        ++total_.splits;
    }
    while (nodes_[first].granules < search.granules) {
        BlockId next = nodes_[first].after;
        index_remove(nodes_[next]);
        carve(next, std::min(nodes_[next].granules, search.granules - nodes_[first].granules));
        purge(nodes_[first]);
        purge(nodes_[next]);
        absorb(first, next);
    }
    carve(first, search.granules);
    return first;
}

uint64_t Heap::merge(int64_t arena) {
    ASYNCMEM_WRITTEN(merge, arena);
    Coalesced coalesced(*this);
    if (arena >= 2 && !known_arena(arena)) refuse_argument("unknown lease");
    uint64_t before = total_.merges;
    for (size_t at = 0; at < arenas_.size(); ++at)
        if (arena < 2 || at == static_cast<size_t>(arena)) merge_in(arenas_[at]);
    return total_.merges - before;
}

// Free blocks are few beside those in use, so they are found by the index.
void Heap::merge_in(const Arena& arena) {
    std::vector<BlockId> free;
    for (auto& index : arena.by_key)
        if (index) index->each([&](BlockId block) { free.push_back(block); });
    auto place = [this](BlockId block) { return std::pair(nodes_[block].segment, nodes_[block].address); };
    std::ranges::sort(free, {}, place);
    for (size_t i = 0; i < free.size();) {
        BlockId block = free[i++];
        index_remove(nodes_[block]);
        purge(nodes_[block]);
        while (BlockId next = nodes_[block].after) {
            if (nodes_[next].state != State::Free) break;
            index_remove(nodes_[next]);
            purge(nodes_[next]);
            absorb(block, next);
            ++i;
        }
        index_add(block);
    }
}

}  // namespace asyncmem
