// Who holds what, and who can never be served whatever everybody else does.
//
// The proof supposes that every owner who does not wait frees all it holds. Whoever can then be served is, and frees what
// it holds, and so on. Who is left is stuck for certain: short of cancelling one of them, nothing helps. Requests with a
// deadline help themselves. A deadlock is stable, so the proof runs only when nothing has moved for a while.
#include <algorithm>
#include <map>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

uint32_t Scheduler::hold(uint64_t owner, BlockId block) {
    std::lock_guard lock(lock_);
    if (free_holds_.empty()) {
        if (holds_.empty()) holds_.emplace_back();  // number 0 stands for none
        holds_.emplace_back();
        free_holds_.push_back(static_cast<uint32_t>(holds_.size() - 1));
    }
    uint32_t id = free_holds_.back();
    free_holds_.pop_back();
    holds_[id] = {owner, block, forgets_};
    ++held_;
    ++facts_;
    return id;
}

void Scheduler::release(uint32_t id) {
    std::lock_guard lock(lock_);
    if (id >= holds_.size() || !holds_[id].block) throw std::invalid_argument("nothing is held by that number");
    holds_[id] = {};
    free_holds_.push_back(id);
    --held_;
}

void Scheduler::forget_owner(uint64_t owner) {
    std::lock_guard lock(lock_);
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
    std::lock_guard lock(lock_);
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
    std::lock_guard lock(lock_);
    now_ = now;
    ++facts_;
    arm_quiet();
}

void Scheduler::awake(RequestId id) {
    std::lock_guard lock(lock_);
    Request* request = requests_.find(id);
    if (!request || !request->sleepers) return;
    if (--request->sleepers) return;
    request->owner = 0;
    if (request->queued() && request->terms.deadline == never) --sleeping_;
}

void Scheduler::arm_quiet() {
    if (quiet_armed_ || !held_ || !sleeping_ || proved_at_ == progress_ + facts_) return;
    wait_for_quiet(policy_.quiet_after);
}

void Scheduler::wait_for_quiet(double seconds) {
    quiet_armed_ = true;
    progress_seen_ = progress_;
    emit(Effect{.kind = Effect::Kind::Quiet, .seconds = now_ + seconds});
}

// What owners who wait hold, and who of them could still be served.
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
        std::unordered_set<uint64_t> owners;
        for (const One& one : waiting_) owners.insert(one.owner);
        for (const Hold& hold : scheduler.holds_) {
            uint64_t owner = scheduler.owner_of(hold);
            if (!hold.block || !owners.contains(owner)) continue;
            Range range{heap_.address(hold.block), heap_.size(hold.block)};
            Share* share = scheduler.share_of(heap_.account_of(hold.block));
            held_[owner].push_back({range, share});
            for (Share* at = share; at; at = at->up) bound_[at] += range.nbytes;
        }
        if (!scheduler.policy_.paged)
            for (const SegmentInfo& one : heap_.segments())
                if (one.arena < 2 && one.nbytes) segments_.push_back({one.address, one.nbytes});
        std::sort(segments_.begin(), segments_.end(), [](auto& a, auto& b) { return a.address < b.address; });
    }

    // Who is stuck, and whom to fail so that the others go on: of those who hold something the youngest that helps somebody,
    // until none is left.
    std::vector<RequestId> solve(std::vector<Stuck>& stuck) {
        std::vector<RequestId> victims;
        for (;;) {
            reduce();
            std::erase_if(waiting_, [](const One& one) { return one.served; });
            if (victims.empty())
                for (const One& one : waiting_)
                    stuck.push_back({one.owner, one.request ? one.request->id : 0, one.nbytes, held_by(one.owner), one.since});
            One* victim = helpful();
            // Whoever brings home what another one waits for holds up what that one holds.
            bool claims = std::any_of(waiting_.begin(), waiting_.end(), [&](const One& one) { return !one.request && held_by(one.owner); });
            if (!victim && claims) victim = youngest([](const One&) { return true; });
            if (!victim) return victims;
            victims.push_back(victim->request->id);
            victim->served = true;
            let_go(victim->owner);
        }
    }

private:
    struct One {
        Request* request;
        uint64_t owner, nbytes;
        Share* share;
        double since;
        bool served = false;
    };
    struct Held {
        Range range;
        Share* share;
    };

    // What a victim frees may lie where nobody fits, so the few youngest are tried.
    One* helpful() {
        constexpr size_t tries = 4;
        std::vector<One*> holders;
        for (One& one : waiting_)
            if (one.request && held_by(one.owner)) holders.push_back(&one);
        size_t count = std::min(tries, holders.size());
        std::partial_sort(holders.begin(), holders.begin() + static_cast<ptrdiff_t>(count), holders.end(),
                          [](One* a, One* b) { return a->request->sequence > b->request->sequence; });
        for (size_t i = 0; i < count; ++i) {
            Proof without = *this;
            without.waiting_[static_cast<size_t>(holders[i] - waiting_.data())].served = true;
            without.let_go(holders[i]->owner);
            without.reduce();
            auto served = std::count_if(without.waiting_.begin(), without.waiting_.end(), [](auto& one) { return one.served; });
            if (served > 1) return holders[i];
        }
        return count ? holders[0] : nullptr;
    }

    template <typename Fit>
    One* youngest(Fit&& fits) {
        One* found = nullptr;
        for (One& one : waiting_)
            if (one.request && fits(one) && (!found || one.request->sequence > found->request->sequence)) found = &one;
        return found;
    }

    // Serve whoever can be served, again and again, until nobody can.
    void reduce() {
        for (bool any = true; any;) {
            any = false;
            std::unordered_map<Share*, const One*> first;  // in each share, who is the first that does not fit there
            measure();
            for (One& one : waiting_) {
                if (one.served) continue;
                if (Share* full = blocked_at(one, first)) {
                    first.try_emplace(full, &one);
                    continue;
                }
                one.served = true;
                any = let_go(one.owner) || any;
            }
        }
    }

    // The innermost share that does not let it pass, or none.
    Share* blocked_at(const One& one, const std::unordered_map<Share*, const One*>& first) {
        for (Share* at = one.share; at; at = at->up) {
            auto held = bound_.find(at);
            uint64_t room = at->limit - std::min(at->limit, held == bound_.end() ? 0 : held->second);
            if (one.nbytes > room) return at;
            auto head = first.find(at);
            if (one.request && head != first.end() && head->second->request &&
                one.nbytes > Shares::allowance(*at, *head->second->request))
                return at;
            if (at == scheduler_.root_ && !has_place(one)) return at;
        }
        return nullptr;
    }

    // Whether its pieces find room between what is held. Sound, not complete: of each size at most as many as fit alone.
    bool has_place(const One& one) const {
        if (gaps_.empty()) return true;
        std::vector<uint64_t> pieces{one.nbytes};
        if (one.request && one.request->batch()) {
            pieces = one.request->pieces;
            for (uint64_t& piece : pieces) piece = (piece + 511) & ~uint64_t{511};
            std::sort(pieces.begin(), pieces.end(), std::greater<>());
        }
        for (size_t i = 0; i < pieces.size(); ++i) {
            if (i + 1 < pieces.size() && pieces[i + 1] == pieces[i]) continue;
            uint64_t places = 0;
            for (uint64_t gap : gaps_) places += gap / pieces[i];
            if (places < i + 1) return false;
        }
        return true;
    }

    // The gaps between what is held. Segments of which nothing is held can go back, and come again in any shape.
    void measure() {
        gaps_.clear();
        if (scheduler_.policy_.paged) return;
        std::vector<Range> ranges;
        for (auto& [owner, all] : held_)
            for (const Held& one : all)
                if (one.share && !one.share->part_of_lease()) ranges.push_back(one.range);
        std::sort(ranges.begin(), ranges.end(), [](auto& a, auto& b) { return a.address < b.address; });
        uint64_t kept = 0;
        auto next = ranges.begin();
        for (const Range& segment : segments_) {
            uint64_t at = segment.address, end = segment.address + segment.nbytes;
            while (next != ranges.end() && next->address < at) ++next;
            if (next == ranges.end() || next->address >= end) continue;
            kept += segment.nbytes;
            for (; next != ranges.end() && next->address < end; ++next) {
                if (next->address > at) gaps_.push_back(next->address - at);
                at = std::max(at, next->address + next->nbytes);
            }
            if (at < end) gaps_.push_back(end - at);
        }
        uint64_t limit = scheduler_.policy_.limit;
        gaps_.push_back(limit - std::min(limit, kept));
    }

    bool let_go(uint64_t owner) {
        auto found = held_.find(owner);
        if (found == held_.end()) return false;
        for (const Held& one : found->second)
            for (Share* at = one.share; at; at = at->up) bound_[at] -= one.range.nbytes;
        held_.erase(found);
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
    std::vector<One> waiting_;
    std::unordered_map<uint64_t, std::vector<Held>> held_;
    std::unordered_map<Share*, uint64_t> bound_;
    std::vector<Range> segments_;
    std::vector<uint64_t> gaps_;
};

void Scheduler::quiet(double now, const std::vector<Claim>& claims) {
    constexpr double patience = 5;
    std::lock_guard lock(lock_);
    now_ = now;
    quiet_armed_ = false;
    if (progress_ == progress_seen_) {
        proved_at_ = progress_ + facts_;
        std::vector<Stuck> stuck;
        std::vector<RequestId> victims = Proof(*this, claims).solve(stuck);
        // Whoever waits for its own memory alone may have it freed by a timer or another thread: that is given longer.
        bool alone = std::all_of(stuck.begin(), stuck.end(), [&](const Stuck& one) { return one.owner == stuck[0].owner; });
        if (!victims.empty() && alone && alone_at_ != progress_) {
            alone_at_ = progress_;
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
            ++progress_;
            pump(now);
        }
    }
    arm_quiet();
}

std::vector<Stuck> Scheduler::stuck() const {
    std::lock_guard lock(lock_);
    return stuck_;
}

}  // namespace asyncmem::scheduler
