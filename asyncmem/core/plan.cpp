// Which addresses a request gets that finds no memory, and which memory is put there.
//
// Addresses are chosen as if memory were behind all that is free. So pages that are taken back change nothing about what
// is placed where, and a program never needs more pages than if they all stayed.
#include <algorithm>
#include <bit>

#include "heap.hpp"

namespace asyncmem {

namespace {
constexpr uint32_t wide = 4096;    // candidates of one class looked at, as in take_foreign
constexpr uint32_t patience = 32;  // handles in a row that are not ready, after which none is expected to be
constexpr uint64_t parts = 32;     // of a request: a handle is no larger than one of them
}  // namespace

// The choice of handles for one plan. Nothing is changed but the queue, out of which those are taken that are in use.
class Heap::Picking {
public:
    Picking(Heap& heap, Range kept, uint32_t segment) : heap_(heap), kept_(kept), segment_(segment) {
        next_ = heap.handles_.oldest();
    }

    // The handle that has been idle the longest and is ready, or 0; each is answered once.
    HandleId next() {
        uint32_t unready = 0;
        while (next_ && unready < patience) {
            HandleId id = next_;
            const Handle& handle = heap_.handles_[id];
            next_ = handle.newer;
            if (!idle(handle)) {
                heap_.handles_.drop(id);
            } else if (!kept(handle)) {
                if (heap_.undone(handle.uses).empty()) return id;
                later_.push_back(id);
                ++unready;
            }
        }
        return 0;
    }

    // What to wait for, so that handles of `nbytes` more are ready; nothing where there are not so many.
    Entries waits(uint64_t nbytes) {
        Entries all;
        for (; next_; next_ = heap_.handles_[next_].newer) later_.push_back(next_);
        for (HandleId id : later_) {
            const Handle& handle = heap_.handles_[id];
            if (kept(handle) || !idle(handle)) continue;
            all = joined(all, heap_.undone(handle.uses));
            if (nbytes <= handle.nbytes) return all;
            nbytes -= handle.nbytes;
        }
        return {};
    }

    // The free block in which a handle lies as a whole, or 0.
    BlockId block(const Handle& handle) {
        if (free_.empty()) find_free();
        auto above = free_.upper_bound(handle.address);
        if (above == free_.begin()) return 0;
        auto& [address, found] = *std::prev(above);
        return handle.address + handle.nbytes <= found.second ? found.first : 0;
    }

    // Lift a handle that was answered; `to` is where it goes.
    Move lift(HandleId id, uint64_t to) {
        const Handle& handle = heap_.handles_[id];
        Space& space = heap_.space_of(handle.segment);
        auto found = std::prev(free_.upper_bound(handle.address));
        auto [block, end] = found->second;
        uint64_t top = handle.address + handle.nbytes;
        heap_.lift(space, block, handle.address, handle.nbytes);
        if (top < end) free_[top] = {heap_.nodes_[space.held[handle.address]].after, end};
        if (found->first == handle.address) {
            free_.erase(found);
        } else {
            found->second.second = handle.address;
        }
        heap_.handles_.drop(id);
        return {handle.segment, handle.address, handle.nbytes, to};
    }

private:
    bool idle(const Handle& handle) { return block(handle) != 0; }
    bool kept(const Handle& handle) const {
        return handle.segment == segment_ && handle.address < kept_.address + kept_.nbytes &&
               kept_.address < handle.address + handle.nbytes;
    }

    void find_free() {
        for (const Arena& arena : {std::cref(heap_.arenas_[0]), std::cref(heap_.arenas_[1])}) {
            if (!arena.space) continue;
            uint32_t least = class_of(heap_.space_of(arena.space - 1).page() >> heap_.shift_);
            for (auto& index : arena.by_key) {
                if (!index) continue;
                for (uint32_t cls = index->next(least); cls != FreeIndex::none; cls = index->next(cls + 1))
                    for (const Candidate& one : index->at(cls))
                        free_[one.address] = {one.node, one.address + heap_.bytes(heap_.nodes_[one.node])};
            }
        }
        free_[UINT64_MAX] = {0, 0};  // so that it is done once
    }

    Heap& heap_;
    Range kept_;
    uint32_t segment_;
    HandleId next_;
    std::vector<HandleId> later_;
    std::map<uint64_t, std::pair<BlockId, uint64_t>> free_;  // large enough for a page, by address, with their ends
};

// The free block that placement would serve if memory were behind all of it.
BlockId Heap::find_addresses(const Ask& ask, uint32_t arena, uint64_t granules, Reach reach) {
    for (Bound bound : {Bound::Done, Bound::Recorded, Bound::Any}) {
        if (static_cast<Reach>(bound) > reach) break;
        Search search{granules, ask.stream, bound, wide};
        if (BlockId block = place(arena, search)) return block;
    }
    return 0;
}

// The free block at the end of what was used, made as large as the request needs; 0 when the space is too small. What is
// free there already is left alone where the request may not have it.
BlockId Heap::extend(Space& space, uint64_t granules, uint32_t stream, Reach reach) {
    BlockId end = space.end;
    if (!end) return 0;
    BlockId last = nodes_[end].before;
    if (last && (nodes_[last].state != State::Free || !eligible(nodes_[last], stream, static_cast<Bound>(reach)))) last = 0;
    uint64_t more = space.up((granules << shift_) - (last ? bytes(nodes_[last]) : 0));
    if (more > bytes(nodes_[end])) return 0;
    space.end = more < bytes(nodes_[end]) ? cut(end, more >> shift_) : 0;
    nodes_[end].state = State::Pending;
    nodes_[end].bare = static_cast<uint32_t>(bytes(nodes_[end]) / space.page());
    if (last) {
        index_remove(last);
        absorb(last, end);
        end = last;
    }
    index_add(end);
    return end;
}

// The stretches of a block's lower part that have no memory.
std::vector<Range> Heap::gaps(const Space& space, uint64_t address, uint64_t nbytes) const {
    std::vector<Range> found;
    for (uint64_t at = address, end = address + nbytes; at < end;) {
        HandleId id = space.handle(at);
        uint64_t next = id ? handles_[id].address + handles_[id].nbytes : space.up(at + 1);
        if (!id) {
            if (found.empty() || found.back().address + found.back().nbytes != at) found.push_back({at, 0});
            found.back().nbytes += next - at;
        }
        at = next;
    }
    return found;
}

Plan Heap::plan(const Ask& ask, uint64_t room, uint64_t most, Reach reach) {
    Settled settled(*this);
    Plan plan;
    need_stream(ask.stream);
    uint64_t granules = rounded(ask.nbytes) >> shift_;
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(granules << shift_);
    if (arena > 1 || !arenas_[arena].space) return plan;
    plan.segment = arenas_[arena].space - 1;
    Space& space = space_of(plan.segment);
    BlockId block = find_addresses(ask, arena, granules, reach);
    if (!block) block = extend(space, granules, ask.stream, reach);
    if (!block) return plan;
    // Up to the end of the last page, if that is bare: all of it is free then.
    plan.address = nodes_[block].address;
    plan.nbytes = granules << shift_;
    if (!space.handle(plan.address + plan.nbytes - 1)) plan.nbytes = space.up(plan.address + plan.nbytes) - plan.address;

    // New memory as long as there is room, else what has been idle the longest, else new memory all the same. An idle
    // handle that is too large for its gap is released, which makes room.
    uint64_t beyond = 0;
    Picking picking(*this, {plan.address, plan.nbytes}, plan.segment);
    std::vector<std::pair<HandleId, uint64_t>> chosen;
    uint64_t largest = std::max(space.page(), std::bit_floor((granules << shift_) / parts));
    for (Range gap : gaps(space, plan.address, plan.nbytes)) {
        while (gap.nbytes > room) {
            HandleId id = picking.next();
            if (!id) break;
            uint64_t nbytes = handles_[id].nbytes;
            chosen.emplace_back(id, nbytes <= gap.nbytes ? gap.address : 0);
            if (nbytes > gap.nbytes) {
                room += nbytes;
            } else {
                gap.address += nbytes;
                gap.nbytes -= nbytes;
            }
        }
        beyond += gap.nbytes - std::min(room, gap.nbytes);
        room -= std::min(room, gap.nbytes);
        while (gap.nbytes) {
            uint64_t nbytes = std::min(largest, std::bit_floor(gap.nbytes));
            plan.fresh.push_back({gap.address, nbytes});
            gap.address += nbytes;
            gap.nbytes -= nbytes;
        }
    }
    if (beyond > most) {
        plan.fresh.clear();
        plan.waits = picking.waits(beyond - most);
        return plan;
    }
    plan.found = true;
    for (auto [id, to] : chosen) plan.moves.push_back(picking.lift(id, to));
    lift(space, block, plan.address, plan.nbytes);
    return plan;
}

Idle Heap::idle() const {
    Settled settled(*this);
    Idle all;
    Picking picking(const_cast<Heap&>(*this), {0, 0}, 0);
    for (const Handle& handle : handles_.all()) {
        if (!handle.nbytes || !picking.block(handle)) continue;
        all.nbytes += handle.nbytes;
        all.uses = joined(all.uses, undone(handle.uses));
    }
    return all;
}

std::vector<uint32_t> Heap::unfenced() const {
    std::lock_guard lock(lock_);
    std::vector<uint32_t> found;
    for (uint32_t s = 0; s < streams_.size(); ++s)
        if (streams_[s]->stamped > std::max(streams_[s]->epochs.recorded, streams_[s]->epochs.done)) found.push_back(s);
    return found;
}

Plan Heap::reclaim(uint64_t nbytes) {
    Settled settled(*this);
    Plan plan;
    Picking picking(*this, {0, 0}, 0);
    std::vector<HandleId> chosen;
    for (uint64_t found = 0; found < nbytes;) {
        HandleId id = picking.next();
        if (!id) break;
        chosen.push_back(id);
        found += handles_[id].nbytes;
    }
    plan.found = !chosen.empty();
    for (HandleId id : chosen) plan.moves.push_back(picking.lift(id, 0));
    return plan;
}

}  // namespace asyncmem
