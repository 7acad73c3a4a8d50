// What the heap says about itself: gauges, counters, and the walk over all blocks.
#include "heap.hpp"

#include <algorithm>
#include <stdexcept>

namespace asyncmem {

// The largest free block outside the caches: of one arena, or (-1) of arenas 0 and 1.
uint64_t Heap::largest(int32_t arena) const {
    Settled settled(*this);
    if (arena >= 0 && !known_arena(arena))
        throw std::invalid_argument("unknown arena");
    uint64_t most = 0;
    for (size_t a = 0; a < arenas_.size(); ++a) {
        if (arena >= 0 ? a != static_cast<size_t>(arena) : a > 1) continue;
        for (auto& index : arenas_[a].by_key) {
            if (index) index->each_large([&](BlockId block) { most = std::max(most, bytes(nodes_[block])); });
        }
    }
    return most;
}

uint64_t Heap::live() const {
    std::lock_guard lock(lock_);
    return ledger_[0].live;
}

uint64_t Heap::reserved() const {
    std::lock_guard lock(lock_);
    return reserved_;
}

uint64_t Heap::free_bytes() const {
    std::lock_guard lock(lock_);
    return unused();
}

uint64_t Heap::cached_bytes() const {
    std::lock_guard lock(lock_);
    return cached_;
}

// Free bytes outside leases that some stream has still to be done with. Walks the blocks that owe anything.
uint64_t Heap::pending_bytes() const {
    Settled settled(*this);
    uint64_t pending = 0;
    for (uint32_t a : {0, 1}) {
        auto& by_key = arenas_[a].by_key;
        for (size_t key = 1; key < by_key.size(); ++key) {
            if (!by_key[key]) continue;
            by_key[key]->each([&](BlockId block) {
                if (!undone(entry_pool_.all(nodes_[block])).empty()) pending += mapped(nodes_[block]);
            });
        }
    }
    return pending;
}

Counts Heap::counts() const {
    Settled settled(*this);
    Counts c = total_;
    c.reserved = reserved_;
    c.live = ledger_[0].live;
    c.peak_live = ledger_[0].peak;
    c.free = unused();
    c.cached = cached_;
    c.lifted = lifted_;
    c.cached_blocks = shared_.blocks();
    for (auto& stream : streams_) c.cached_blocks += stream->cache.blocks();
    Account all = ledger_.totals();
    c.stream_hits = all.hits[0];
    c.shared_hits = all.hits[1];
    c.placed = all.hits[2];
    c.allocations = c.stream_hits + c.shared_hits + c.placed;
    c.frees = all.frees;
    c.live_blocks = c.allocations - c.frees - leases_closed_;
    for (const Arena& arena : arenas_) {
        for (auto& index : arena.by_key) c.free_blocks += index ? index->count() : 0;
    }
    for (const Segment& segment : segments_) {
        if (!segment.used || segment.container) continue;
        c.segments += segment.mapped > 0;
        const Node& first = nodes_[segment.first];
        if (first.state == State::Free && !first.after && !segment.space) c.empty += segment.nbytes;
    }
    c.streams = streams_.size();
    for (uint32_t a = 0; a < ledger_.size(); ++a) c.accounts += ledger_[a].used;
    c.leases = arenas_.used() - 2;
    return c;
}

std::vector<SegmentInfo> Heap::segments() const {
    Settled settled(*this);
    std::vector<SegmentInfo> all;
    for (uint32_t s = 0; s < segments_.size(); ++s)
        if (segments_[s].used && !segments_[s].container) all.push_back(survey(s));
    return all;
}

SegmentInfo Heap::survey(uint32_t id) const {
    const Segment& segment = segments_[id];
    SegmentInfo info{};
    info.id = id;
    info.arena = segment.arena;
    info.address = segment.address;
    info.nbytes = segment.mapped;
    for (BlockId block = segment.first; block; block = nodes_[block].after) {
        const Node& node = nodes_[block];
        if (node.state == State::Free) {
            info.free += mapped(node);
            info.largest = std::max(info.largest, bytes(node));
        } else if (node.state == State::Cached) {
            info.cached += bytes(node);
        } else if (in_use(node)) {
            info.live += bytes(node);
            ++info.live_blocks;
        }
    }
    return info;
}

std::vector<Piece> Heap::empty_segments() const {
    Settled settled(*this);
    std::vector<Piece> empty;
    for (uint32_t s = 0; s < segments_.size(); ++s) {
        const Segment& segment = segments_[s];
        if (!segment.used || segment.container || segment.space) continue;
        const Node& first = nodes_[segment.first];
        if (first.state != State::Free || first.after) continue;
        empty.push_back({s, segment.address, segment.nbytes, undone(entry_pool_.all(first))});
    }
    return empty;
}

BlockInfo Heap::describe(const Node& node) const {
    if (in_use(node)) return {node.address, bytes(node), node.state, node.arena, node.stream, node.account, {}};
    return {node.address, bytes(node), node.state, node.arena, 0, 0, entry_pool_.all(node)};
}

// Every block, segment by segment in address order; the inside of a lease after the segments.
std::vector<BlockInfo> Heap::blocks() const {
    Settled settled(*this);
    std::vector<BlockInfo> all;
    for (bool leases : {false, true}) {
        for (const Segment& segment : segments_) {
            if (!segment.used || (segment.container != 0) != leases) continue;
            for (BlockId block = segment.first; block; block = nodes_[block].after) {
                all.push_back(describe(nodes_[block]));
            }
        }
    }
    return all;
}

}  // namespace asyncmem
