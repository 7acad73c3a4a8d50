// Which addresses a request gets that finds no memory, and which memory is put there.
//
// Addresses are chosen where the least memory is missing, or as if memory were behind all that is free. Memory that is idle moves
// there before more than ever is taken.
#include <algorithm>
#include <bit>
#include <functional>
#include <tuple>
#include <utility>

#include "heap.hpp"

namespace asyncmem {

namespace {
constexpr uint32_t patience = 32;  // handles in a row that are not ready, after which none is expected to be
}  // namespace

// The choice of handles for one plan. Nothing is changed.
class Heap::Picking {
public:
    Picking(Heap& heap, Range kept, uint32_t segment, const uint32_t* early = nullptr)
        : heap_(heap), kept_(kept), segment_(segment), early_(early) {}

    // The handle that has been idle the longest and is ready, or 0; each is answered once. Where it is to move to a gap of so
    // many bytes it is ready early, if only the stream of the request still uses it: that one's work is in order.
    HandleId next(uint64_t gap = 0) {
        for (uint32_t unready = 0; unready < patience; ++unready) {
            HandleId id = oldest();
            if (!id) return 0;
            Entries uses = heap_.uses(id);
            if (uses.empty() || (heap_.handles_[id].nbytes <= gap && is_early(uses))) return id;
            later_.push_back(id);
        }
        return 0;
    }

    // What to wait for, so that handles of `nbytes` more are ready; nothing where there are not so many.
    Entries waits(uint64_t nbytes, std::vector<Piece>& later) {
        Entries all;
        auto enough = [&](HandleId id) {
            const Handle& handle = heap_.handles_[id];
            later.push_back({.nbytes = handle.nbytes, .uses = heap_.uses(id)});
            for (const Entry& entry : later.back().uses) include(all, entry);
            nbytes -= std::min(nbytes, handle.nbytes);
            return nbytes == 0;
        };
        for (HandleId id : later_)
            if (enough(id)) return all;
        while (HandleId id = oldest())
            if (enough(id)) return all;
        return {};
    }

    // Lift a handle that was answered; `to` is where it goes.
    Move lift(HandleId id, uint64_t to) {
        const Handle& handle = heap_.handles_[id];
        heap_.lift(heap_.space_of(handle.segment), heap_.idle(handle), handle.address, handle.nbytes);
        return {handle.segment, handle.address, handle.nbytes, to, heap_.uses(id)};
    }

private:
    // The handle that has been idle the longest of those that were not asked for, or 0.
    HandleId oldest() {
        auto newer = [this](HandleId a, HandleId b) {
            const Handle &x = heap_.handles_[a], &y = heap_.handles_[b];
            return std::tie(x.freed, x.address) > std::tie(y.freed, y.address);
        };
        if (!std::exchange(looked_, true)) {
            heap_.find_holes();
            idle_ = heap_.idle_handles();
            std::erase_if(idle_, [this](HandleId id) { return kept(heap_.handles_[id]); });
            std::ranges::make_heap(idle_, newer);
        }
        if (idle_.empty()) return 0;
        std::ranges::pop_heap(idle_, newer);
        HandleId id = idle_.back();
        idle_.pop_back();
        return id;
    }
    bool is_early(const Entries& uses) const { return early_ && uses.size() == 1 && uses[0].stream == *early_; }
    bool kept(const Handle& handle) const {
        return handle.segment == segment_ && handle.address < kept_.address + kept_.nbytes &&
               kept_.address < handle.address + handle.nbytes;
    }

    Heap& heap_;
    Range kept_;
    uint32_t segment_;
    const uint32_t* early_;  // the stream of the request, where memory may move before it is done
    bool looked_ = false;
    std::vector<HandleId> idle_, later_;  // to be asked for, by a heap; and those that were not ready
};

// The free block that placement would serve if memory were behind all of it.
// Where nothing of other streams will do, that is what `take` finds: its own search, and none beyond.
BlockId Heap::find_addresses(const Ask& ask, uint32_t arena, uint64_t granules, Bound bound) {
    for (Reach reach : reaches) {
        if (bound == Bound::Done ? reach.window != narrow : reach.bound > bound) break;
        if (reach.bound == Bound::Any && has_spot(ask, granules)) break;
        Search search{granules, ask.stream, reach.bound, reach.window};
        if (BlockId block = place(arenas_[arena], search)) return block;
    }
    return 0;
}

// The free block right before the end, joined with what lies free before it; 0 where there is none that may serve the request.
BlockId Heap::last_used(const Space& space, const Ask& ask, Bound bound) {
    BlockId last = nodes_[space.end].before;
    if (!last || nodes_[last].state != State::Free) return 0;
    if (!eligible(nodes_[last], ask.stream, bound)) return 0;
    index_remove(nodes_[last]);
    purge(nodes_[last]);
    if (bound == Bound::Any) last = join(last);
    index_add(last);
    return last;
}

// The free block `last`, or a new one for 0, with `more` bytes of the addresses at the end.
BlockId Heap::extend(Space& space, const Ask& ask, BlockId last, uint64_t more, Bound bound) {
    if (last) index_remove(nodes_[last]);
    BlockId found = last;
    if (more) {
        BlockId start = space.end;
        Node& node = nodes_[start];
        space.end = more < bytes(node) ? cut(start, more >> shift_) : 0;
        node.state = State::Pending;
        node.bare = static_cast<uint32_t>(more / space.page());
        if (last) {
            absorb(last, start);
        } else {
            found = start;
        }
    }
    // As a segment is born owing the stream that it was grown for: so it joins nothing that this one may not use.
    if (bound != Bound::Any)
        entry_pool_.store(nodes_[found], joined(entry_pool_.all(nodes_[found]), {{ask.stream, streams_[ask.stream]->epochs.open}}));
    index_add(found);
    return found;
}

bool Heap::has_addresses(const Ask& ask, Bound bound) {
    Coalesced coalesced(*this);
    need_stream(ask.stream);
    uint64_t granules = rounded(ask.nbytes) >> shift_;
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(granules << shift_);
    return find_addresses(ask, arena, granules, bound) || has_spot(ask, granules);
}

// Bytes from an address on that have no memory, up to the first that have or an end.
uint64_t Heap::bare_behind(const Space& space, uint64_t from, uint64_t end) {
    uint64_t at = from;
    while (at < end && !space.handle(at)) at += space.page();
    return at - from;
}

Plan Heap::plan(const Ask& ask, uint64_t room, uint64_t most, Bound bound, uint64_t parts, uint64_t spare, bool early,
                bool moves) {
    Coalesced coalesced(*this);
    Plan plan;
    need_stream(ask.stream);
    if (ask.nbytes - 1 >= max_size) refuse_argument("size must be from 1 to 2**47 bytes");
    if (!parts) refuse_argument("parts must be at least 1");
    uint64_t granules = rounded(ask.nbytes) >> shift_;
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(granules << shift_);
    if (!known_arena(arena)) refuse_argument("unknown arena");
    if (arena > 1 || !arenas_[arena].space) return plan;
    plan.segment = arenas_[arena].space - 1;
    Space& space = space_of(plan.segment);
    uint64_t need = granules << shift_, more = 0;
    BlockId block = find_addresses(ask, arena, granules, bound);
    Spot spot = !block && around_ ? cheapest(space, need, ask.stream, true) : Spot{};
    if (spot.block) block = spot.block;
    bool anew = !block;  // it takes addresses from the end, but not before the memory for them is found
    if (anew) {
        if (!space.end || around_) return plan;
        block = last_used(space, ask, bound);
        uint64_t have = block ? bytes(nodes_[block]) : 0;
        more = space.up(need - std::min(need, have));
        if (more > bytes(nodes_[space.end])) return plan;
    }
    plan.address = spot.block ? spot.address : nodes_[block ? block : space.end].address;
    if (nodes_[block ? block : space.end].segment != plan.segment) {  // an ordinary segment's, which another search has found
        plan.segment = nodes_[block].segment;
        plan.found = true;
        return plan;
    }
    // Up to the end of the last page, if that is bare: all of it is free then.
    plan.nbytes = need;
    if (!space.handle(plan.address + plan.nbytes - 1)) plan.nbytes = space.up(plan.address + plan.nbytes) - plan.address;

    // What is to be free behind it. Small blocks begin with little, as they do in segments.
    uint64_t ahead = space.up(spare), end = spot.block ? spot.end : nodes_[block].address + bytes(nodes_[block]);
    if (!arena) ahead = std::min(ahead, space.up(std::max(2 * tuning_.small_limit, segments_[plan.segment].mapped / 2)));
    ahead = anew ? std::min(ahead, bytes(nodes_[space.end]) - more)
                 : bare_behind(space, plan.address + plan.nbytes, std::min(plan.address + plan.nbytes + ahead, end));

    // New memory as long as there is room, else what has been idle the longest, else new memory all the same. An idle
    // handle that is too large for its gap is released, which makes room.
    uint64_t beyond = 0;
    Picking picking(*this, {plan.address, plan.nbytes}, plan.segment, early ? &ask.stream : nullptr);
    std::vector<std::pair<HandleId, uint64_t>> chosen;
    uint64_t largest = parts == 1 ? largest_handle : std::max(space.page(), std::bit_floor(need / parts));
    std::vector<Range> gaps;
    space.stretches(plan.address, plan.nbytes, [&](uint64_t at, uint64_t size, bool filled) {
        if (!filled) gaps.push_back({at, size});
    });
    // The largest first: what does not fit a small one might fill it, and each handle is offered once.
    std::ranges::stable_sort(gaps, std::greater<>(), &Range::nbytes);
    for (Range gap : gaps) {
        while (gap.nbytes > room) {
            HandleId id = picking.next(moves ? gap.nbytes : 0);
            if (!id) break;
            uint64_t nbytes = handles_[id].nbytes;
            bool fits = moves && nbytes <= gap.nbytes;
            chosen.emplace_back(id, fits ? gap.address : 0);
            if (!fits) {
                room += nbytes;
            } else {
                gap.address += nbytes;
                gap.nbytes -= nbytes;
            }
        }
        beyond += gap.nbytes - std::min(room, gap.nbytes);
        room -= std::min(room, gap.nbytes);
        if (gap.nbytes && gap.address + gap.nbytes == plan.address + plan.nbytes) {
            gap.nbytes += ahead;
            plan.nbytes += plan.ahead = ahead;
            more += anew ? ahead : 0;
        }
        while (gap.nbytes) {
            uint64_t nbytes = std::min(largest, gap.nbytes);
            plan.fresh.push_back({gap.address, nbytes});
            gap.address += nbytes;
            gap.nbytes -= nbytes;
        }
    }
    if (beyond > most) {
        plan.fresh.clear();
        plan.waits = picking.waits(beyond - most, plan.later);
        return plan;
    }
    plan.found = true;
    for (auto [id, to] : chosen) plan.moves.push_back(picking.lift(id, to));
    if (anew) block = extend(space, ask, block, more, bound);
    for (uint64_t at = plan.address, last = at + plan.nbytes; at < last;) {
        while (nodes_[block].address + bytes(nodes_[block]) <= at) block = nodes_[block].after;
        uint64_t nbytes = std::min(last, nodes_[block].address + bytes(nodes_[block])) - at;
        BlockId first = block;
        lift(space, block, at, nbytes);
        if (nodes_[first].address < at) first = nodes_[first].after;
        if (spot.block) resolve(nodes_[first], ask.stream);
        at += nbytes;
    }
    return plan;
}

// Where the least memory is missing among free blocks that the stream may have at once and bare ones, side by side, in the
// smallest such stretch of addresses that is as good, and the lowest of those; with addresses that were never used, or without.
Heap::Spot Heap::cheapest(const Space& space, uint64_t nbytes, uint32_t stream, bool anew) const {
    Spot best;
    uint64_t looked_at = 0;  // up to where
    auto usable = [&](BlockId block) {
        const Node& node = nodes_[block];
        if (node.state == State::Bare) return anew || block != space.end;
        return node.state == State::Free && eligible(node, stream, Bound::Done);
    };
    auto look_around = [&](BlockId bare) {
        if (nodes_[bare].address < looked_at) return;
        BlockId first = bare, last = bare;
        while (usable(nodes_[first].before)) first = nodes_[first].before;
        while (usable(nodes_[last].after)) last = nodes_[last].after;
        uint64_t from = nodes_[first].address, end = looked_at = nodes_[last].address + bytes(nodes_[last]), size = end - from;
        if (size < nbytes) return;
        auto look = [&](uint64_t at) {
            if (at < from || at + nbytes > end) return;
            uint64_t missing = space.bare(at, nbytes) * space.page();
            if (std::tie(missing, size, at) < std::tie(best.missing, best.size, best.address)) best = {first, at, missing, size, end};
        };
        look(from);
        space.stretches(from, size, [&](uint64_t at, uint64_t filled, bool mapped) {
            if (!mapped) return;
            look(at);
            if (at + filled >= nbytes) look((at + filled - nbytes) & ~(space.page() - 1));
        });
        if (last != space.end) look((end - nbytes) & ~(space.page() - 1));
    };
    for (auto [_, block] : space.bare_blocks) look_around(block);
    if (anew && space.end) look_around(space.end);
    return best;
}

// Whether a request that found no memory could have addresses that were used before.
[[gnu::noinline]] bool Heap::has_spot(const Ask& ask, uint64_t granules) {
    uint32_t arena = ask.arena >= 0 ? static_cast<uint32_t>(ask.arena) : natural_arena(granules << shift_);
    if (!around_ || arena > 1 || !arenas_[arena].space) return false;
    const Space& space = space_of(arenas_[arena].space - 1);
    if (space.bare_blocks.empty()) return false;
    coalesce();
    return cheapest(space, granules << shift_, ask.stream, false).block;
}

Plan Heap::reclaim(uint64_t nbytes) {
    Coalesced coalesced(*this);
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

Plan Heap::plan_split(uint64_t size, uint64_t most) {
    Coalesced coalesced(*this);
    Plan plan;
    if (!most) refuse_argument("there must be a part at least");
    find_holes();
    std::vector<HandleId> large = idle_handles();
    std::erase_if(large, [&](HandleId id) { return handles_[id].nbytes < 2 * size || !uses(id).empty(); });
    std::ranges::stable_sort(large, std::greater<>(), [&](HandleId id) { return handles_[id].nbytes; });
    Picking picking(*this, {0, 0}, 0);
    for (HandleId id : large) {
        const Handle& handle = handles_[id];
        if (plan.found && handle.segment != plan.segment) continue;
        plan.segment = handle.segment;
        uint64_t least = (handle.nbytes + most - 1) / most, end = handle.address + handle.nbytes;
        uint64_t part = std::max({space_of(plan.segment).page(), std::bit_floor(size), std::bit_ceil(least)});
        uint64_t count = (handle.nbytes + part - 1) / part;
        if (count == 1 || plan.fresh.size() + count > most) break;
        plan.found = true;
        for (uint64_t at = handle.address; at < end; at += part) plan.fresh.push_back({at, std::min(part, end - at)});
        plan.moves.push_back(picking.lift(id, 0));
    }
    return plan;
}

}  // namespace asyncmem
