// What each owner holds, and which requests can never be served whatever all others do.
//
// The proof supposes that every owner that does not wait frees all it holds. Each one that can then be served is, and frees what
// it holds, and so on. Who is left is stuck for certain: short of cancelling one of them, nothing helps. Requests with a
// deadline help themselves. A deadlock is stable, so the proof runs only when nothing has moved for a while.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

uint32_t Scheduler::hold(uint64_t owner, BlockId block) {
    ASYNCMEM_ENTER(hold, owner, block);
    uint32_t id = holds_.acquire();
    holds_[id] = {owner, block, forgets_};
    ++facts_;
    return id;
}

void Scheduler::release(uint32_t id) {
    ASYNCMEM_ENTER(release, id);
    if (id >= holds_.size() || !holds_[id].block) refuse_argument("nothing is held by that number");
    holds_[id] = {};
    holds_.release(id);
}

void Scheduler::forget_owner(uint64_t owner) {
    ASYNCMEM_ENTER(forget_owner, owner);
    forgotten_[owner] = ++forgets_;
    if (forgotten_.size() <= 2 * holds_.size() + 64) return;
    for (Hold& one : holds_) one.owner = owner_of(one);
    forgotten_.clear();
}

// The owner of a hold; 0 where it was forgotten since, whose number may be another owner's by now.
uint64_t Scheduler::owner_of(const Hold& hold) const {
    auto found = forgotten_.find(hold.owner);
    return found != forgotten_.end() && found->second > hold.since ? 0 : hold.owner;
}

std::vector<Hold> Scheduler::holds() const {
    std::lock_guard lock(lock_);
    std::vector<Hold> found;
    for (const Hold& one : holds_)
        if (one.block) found.push_back({owner_of(one), one.block, one.since});
    return found;
}

void Scheduler::asleep(RequestId id, uint64_t owner, double now) {
    ASYNCMEM_ENTER(asleep, id, owner, now);
    Request* request = requests_.find(id);
    if (!request) return;
    now_ = now;
    request->owner = owner;
    if (!request->sleepers++ && request->queued() && request->terms.deadline == never) {
        ++sleeping_;
        ++facts_;
    }
    arm_quiet();
}

void Scheduler::note_claim(double now) {
    ASYNCMEM_ENTER(note_claim, now);
    now_ = now;
    ++facts_;
    arm_quiet();
}

void Scheduler::awake(RequestId id) {
    ASYNCMEM_ENTER(awake, id);
    Request* request = requests_.find(id);
    if (!request || !request->sleepers) return;
    if (--request->sleepers) return;
    request->owner = 0;
    if (request->queued() && request->terms.deadline == never) --sleeping_;
}

void Scheduler::arm_quiet() {
    if (quiet_armed_ || holds_.used() == 1 || !sleeping_ || proved_at_ == figures_.progress + facts_) return;
    wait_for_quiet(policy_.quiet_after);
}

void Scheduler::wait_for_quiet(double seconds) {
    quiet_armed_ = true;
    progress_seen_ = figures_.progress;
    emit(Effect{.kind = Effect::Kind::Quiet, .seconds = now_ + seconds});
}

// Ranges that are held, and the gaps between them. A segment of which nothing is held can go back to the device, and its
// bytes can come again in any shape.
class Gaps {
public:
    void add_segment(uint64_t address, uint64_t nbytes) { segments_[address] = {nbytes, 0}; }
    void set_limit(uint64_t limit) { limit_ = limit; }

    void add(Range range) {
        Segment* segment = around(range);
        if (!segment) return;
        Held& held = ranges_[range.address];
        held.nbytes = range.nbytes;
        if (held.count++) return;
        if (!segment->second.count++) {
            kept_ += segment->second.nbytes;
            count(segment->second.nbytes, 1);
        }
        auto [before, after] = beside(range, *segment);
        count(before + range.nbytes + after, -1);
        count(before, 1);
        count(after, 1);
    }

    void remove(Range range) {
        Segment* segment = around(range);
        if (!segment) return;
        auto held = ranges_.find(range.address);
        if (--held->second.count) return;
        auto [before, after] = beside(range, *segment);
        ranges_.erase(held);
        count(before, -1);
        count(after, -1);
        count(before + range.nbytes + after, 1);
        if (--segment->second.count) return;
        kept_ -= segment->second.nbytes;
        count(segment->second.nbytes, -1);
    }

    uint64_t largest() const { return std::max(loose(), gaps_.empty() ? 0 : gaps_.rbegin()->first); }

    // How many pieces of that size fit.
    uint64_t places(uint64_t nbytes) const {
        uint64_t found = loose() / nbytes;
        for (auto gap = gaps_.lower_bound(nbytes); gap != gaps_.end(); ++gap) found += gap->first / nbytes * gap->second;
        return found;
    }

private:
    struct Held {
        uint64_t nbytes, count;  // how often a range is held; of a segment, how many of its ranges are
    };
    using Segment = std::pair<const uint64_t, Held>;

    Segment* around(Range range) {
        auto next = segments_.upper_bound(range.address);
        if (next == segments_.begin()) return nullptr;
        Segment& found = *std::prev(next);
        return range.address - found.first < found.second.nbytes ? &found : nullptr;
    }

    // The gaps before and after a range that is in the list.
    std::pair<uint64_t, uint64_t> beside(Range range, const Segment& segment) const {
        auto here = ranges_.find(range.address), next = std::next(here);
        uint64_t from = segment.first, to = segment.first + segment.second.nbytes;
        if (here != ranges_.begin()) from = std::max(from, std::prev(here)->first + std::prev(here)->second.nbytes);
        if (next != ranges_.end()) to = std::min(to, next->first);
        return {range.address - from, to - range.address - range.nbytes};
    }

    void count(uint64_t gap, int64_t change) {
        if (gap && !(gaps_[gap] += static_cast<uint64_t>(change))) gaps_.erase(gap);
    }

    uint64_t loose() const { return limit_ - std::min(limit_, kept_); }

    std::map<uint64_t, Held> segments_;
    std::map<uint64_t, Held> ranges_;
    std::map<uint64_t, uint64_t> gaps_;  // size to how many
    uint64_t limit_ = 0, kept_ = 0;
};

// What waiting owners hold, and which of them could still be served.
//
// Everybody who cannot be served is listed at the innermost share that stops it. Only when something there is freed, or
// the first one there goes, are those looked at again that fit now: O(n log n) for n requests, however long the chains.
class Scheduler::Proof {
public:
    Proof(const Scheduler& scheduler, const std::vector<Claim>& claims) : scheduler_(scheduler), heap_(scheduler.heap_) {
        scheduler.requests_.each([&](Request& request) {
            if (request.state != State::Waiting || !request.sleepers || request.terms.deadline < never) return;
            waiting_.push_back({&request, request.owner, request.total, request.share, request.since});
        });
        for (const Claim& claim : claims) {
            Share* share = scheduler.share_of(claim.account);
            if (share) waiting_.push_back({nullptr, claim.owner, claim.nbytes, share, scheduler.now_});
        }
        std::sort(waiting_.begin(), waiting_.end(), [](const One& a, const One& b) {
            if (!a.request || !b.request) return a.request && !b.request;
            return before(*a.request, *b.request);
        });
        gaps_.set_limit(scheduler.policy_.limit);
        if (!scheduler.policy_.paged)
            for (const SegmentInfo& one : heap_.segments())
                if (one.arena < 2 && one.nbytes) gaps_.add_segment(one.address, one.nbytes);
        std::unordered_set<uint64_t> owners;
        for (const One& one : waiting_) owners.insert(one.owner);
        for (const Hold& hold : scheduler.holds_) {
            uint64_t owner = scheduler.owner_of(hold);
            if (!hold.block || !owners.contains(owner)) continue;
            BlockInfo held = heap_.info(hold.block);
            Share* share = scheduler.share_of(held.account);
            held_[owner].push_back({{held.address, held.nbytes}, share});
        }
        for (auto& [owner, all] : held_) bind(all);
        for (size_t i = 0; i < waiting_.size(); ++i)
            if (waiting_[i].request && held_.contains(waiting_[i].owner)) youngest_.emplace(~waiting_[i].request->sequence, i);
    }

    // Who is stuck, and whom to fail so that the others go on: of those that hold something the youngest that helps another,
    // until none is left.
    std::vector<RequestId> solve(std::vector<Stuck>& stuck) {
        std::vector<size_t> all(waiting_.size());
        std::iota(all.begin(), all.end(), 0);
        serve(all);
        for (const One& one : waiting_)
            if (!one.served) stuck.push_back({one.owner, one.request ? one.request->id : 0, one.nbytes, held_by(one.owner), one.since});
        std::vector<RequestId> victims;
        for (;;) {
            size_t victim = find_victim();
            if (victim == waiting_.size()) return victims;
            victims.push_back(waiting_[victim].request->id);
            dirty_.insert(waiting_[victim].stopped);
            unblock(victim);
            finish(victim);
            serve({});
        }
    }

private:
    struct One {
        Request* request;
        uint64_t owner, nbytes;
        Share* share;
        double since;
        Share* stopped = nullptr;  // where it is listed
        bool served = false;
        bool single() const { return request && !request->batch(); }
    };
    struct Held {
        Range range;
        Share* share;
    };
    struct Stopped {
        std::set<size_t> order;                          // requests
        std::set<std::pair<uint64_t, size_t>> singles, others;  // by size
    };

    // Serve all that can be served, and all that can be then, until none is left.
    void serve(std::vector<size_t> some) {
        for (;;) {
            for (size_t i : some) {
                Share* from = waiting_[i].stopped;
                if (from) unblock(i);
                Share* full = blocked_at(i);
                if (full) block(i, *full);
                if (from && from != full) dirty_.insert(from);
                if (!full) finish(i);
            }
            some.clear();
            for (Share* share : std::exchange(dirty_, {})) look(*share, [&](size_t i) {
                    some.push_back(i);
                    return true;
                });
            if (some.empty()) return;
            std::sort(some.begin(), some.end());
        }
    }

    // Those stopped at a share who may pass it now, until `found` has enough.
    template <typename Found>
    void look(Share& share, Found&& found) {
        auto stopped = stopped_.find(&share);
        if (stopped == stopped_.end()) return;
        const Stopped& list = stopped->second;
        uint64_t most = room(share);
        const size_t* head = list.order.empty() ? nullptr : &*list.order.begin();
        bool passes = head && waiting_[*head].nbytes <= most && has_place(share, waiting_[*head]);
        if (passes && !found(*head)) return;
        uint64_t allowed = head && !passes ? Shares::allowance(share, *waiting_[*head].request) : UINT64_MAX;
        uint64_t gap = fits_in_gaps(share) ? gaps_.largest() : UINT64_MAX;
        for (auto& [nbytes, i] : list.singles) {
            if (nbytes > std::min({most, allowed, gap})) break;
            if (!(passes && i == *head) && !found(i)) return;
        }
        for (auto& [nbytes, i] : list.others) {
            if (nbytes > most) break;
            const One& one = waiting_[i];
            if (passes && i == *head) continue;
            if ((!one.request || nbytes <= allowed) && has_place(share, one) && !found(i)) return;
        }
    }

    // The innermost share that does not let it pass, or none.
    Share* blocked_at(size_t i) {
        const One& one = waiting_[i];
        for (Share* at = one.share; at; at = at->up) {
            if (one.nbytes > room(*at)) return at;
            auto stopped = stopped_.find(at);
            if (one.request && stopped != stopped_.end() && !stopped->second.order.empty()) {
                size_t head = *stopped->second.order.begin();
                if (head < i && one.nbytes > Shares::allowance(*at, *waiting_[head].request)) return at;
            }
            if (!has_place(*at, one)) return at;
        }
        return nullptr;
    }

    void block(size_t i, Share& share) {
        One& one = waiting_[i];
        one.stopped = &share;
        Stopped& list = stopped_[&share];
        if (one.request) list.order.insert(i);
        (one.single() ? list.singles : list.others).emplace(one.nbytes, i);
    }

    void unblock(size_t i) {
        One& one = waiting_[i];
        Stopped& list = stopped_[one.stopped];
        list.order.erase(i);
        (one.single() ? list.singles : list.others).erase({one.nbytes, i});
        one.stopped = nullptr;
    }

    // It is served, or given up: what its owner holds is free.
    void finish(size_t i) {
        waiting_[i].served = true;
        if (waiting_[i].request) youngest_.erase({~waiting_[i].request->sequence, i});
        auto held = held_.extract(waiting_[i].owner);
        if (!held.empty()) let_go(held.mapped());
    }

    // What a victim frees may lie where no request fits, so the few youngest are tried. Number waiting_.size() means none.
    size_t find_victim() {
        constexpr int tries = 4;
        std::vector<size_t> holders;
        for (auto one = youngest_.begin(); one != youngest_.end() && holders.size() < tries;) {
            bool holds = held_.contains(waiting_[one->second].owner);
            if (holds) holders.push_back(one->second);
            one = holds ? std::next(one) : youngest_.erase(one);
        }
        for (size_t i : holders)
            if (helps(i)) return i;
        if (!holders.empty()) return holders[0];
        // An owner that brings back what another one waits for holds up what that one holds.
        bool claims = false;
        size_t last = waiting_.size();
        for (size_t i = 0; i < waiting_.size(); ++i) {
            const One& one = waiting_[i];
            if (one.served) continue;
            claims = claims || (!one.request && held_.contains(one.owner));
            if (one.request && (last == waiting_.size() || one.request->sequence > waiting_[last].request->sequence)) last = i;
        }
        return claims ? last : waiting_.size();
    }

    // Whether another could be served if this one gave up.
    bool helps(size_t i) {
        Share* from = waiting_[i].stopped;
        const std::vector<Held>& held = held_.at(waiting_[i].owner);
        unblock(i);
        dirty_.insert(from);
        let_go(held);
        bool helped = false;
        for (Share* share : std::exchange(dirty_, {})) {
            if (helped) break;
            look(*share, [&](size_t other) {
                helped = helped || !blocked_at(other);
                return !helped;
            });
        }
        bind(held);
        block(i, *from);
        return helped;
    }

    void bind(const std::vector<Held>& held) {
        for (const Held& one : held) {
            for (Share* at = one.share; at; at = at->up) bound_[at] += one.range.nbytes;
            if (one.share && !one.share->part_of_lease()) gaps_.add(one.range);
        }
    }

    void let_go(const std::vector<Held>& held) {
        for (const Held& one : held) {
            for (Share* at = one.share; at; at = at->up) {
                bound_[at] -= one.range.nbytes;
                dirty_.insert(at);
            }
            if (one.share && !one.share->part_of_lease()) gaps_.remove(one.range);
        }
    }

    uint64_t room(const Share& share) const {
        auto held = bound_.find(&share);
        return share.limit - std::min(share.limit, held == bound_.end() ? 0 : held->second);
    }

    bool fits_in_gaps(const Share& share) const { return &share == scheduler_.root_ && !scheduler_.policy_.paged; }

    // Whether its pieces find room between what is held. Sound, not complete: of each size at most as many as fit alone.
    bool has_place(const Share& share, const One& one) const {
        if (!fits_in_gaps(share)) return true;
        if (!one.request || one.single()) return one.nbytes <= gaps_.largest();
        if (one.request->largest > gaps_.largest()) return false;
        std::vector<uint64_t> pieces = one.request->pieces;
        for (uint64_t& piece : pieces) piece = rounded(piece);
        std::sort(pieces.begin(), pieces.end(), std::greater<>());
        for (size_t i = 0; i < pieces.size(); ++i)
            if ((i + 1 == pieces.size() || pieces[i + 1] != pieces[i]) && gaps_.places(pieces[i]) < i + 1) return false;
        return true;
    }

    uint64_t held_by(uint64_t owner) const {
        auto found = held_.find(owner);
        uint64_t sum = 0;
        if (found != held_.end())
            for (const Held& one : found->second) sum += one.range.nbytes;
        return sum;
    }

    const Scheduler& scheduler_;
    Heap& heap_;
    std::vector<One> waiting_;  // in order, claims last
    std::unordered_map<uint64_t, std::vector<Held>> held_;
    std::unordered_map<const Share*, uint64_t> bound_;
    std::unordered_map<Share*, Stopped> stopped_;
    std::set<Share*> dirty_;    // shares in which others may pass now
    std::set<std::pair<uint64_t, size_t>> youngest_;  // of those whose owner holds something
    Gaps gaps_;
};

void Scheduler::quiet(double now, const std::vector<Claim>& claims) {
    ASYNCMEM_WRITTEN(quiet, now, claims);
    constexpr double patience = 5;
    std::lock_guard lock(lock_);
    now_ = now;
    quiet_armed_ = false;
    if (figures_.progress == progress_seen_) {
        proved_at_ = figures_.progress + facts_;
        std::vector<Stuck> stuck;
        std::vector<RequestId> victims = Proof(*this, claims).solve(stuck);
        // The memory of an owner that waits for itself alone may be freed by a timer or another thread: that is given longer.
        bool alone = std::all_of(stuck.begin(), stuck.end(), [&](const Stuck& one) { return one.owner == stuck[0].owner; });
        if (!victims.empty() && alone && alone_at_ != figures_.progress) {
            alone_at_ = figures_.progress;
            proved_at_ = -1;
            wait_for_quiet(patience * policy_.quiet_after);
            return;
        }
        if (!victims.empty()) {
            stuck_ = std::move(stuck);
            for (RequestId id : victims)
                if (Request* request = requests_.find(id)) fail(*request, Reason::Deadlock);
            ++version_;
            ++event_;
            ++figures_.progress;
            pump(now);
        }
    }
    arm_quiet();
}

}  // namespace asyncmem::scheduler
