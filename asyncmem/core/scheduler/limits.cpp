// Shares and their limits, pressure, and what the heap tells.
#include <algorithm>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

// -- shares ------------------------------------------------------------------------------------------------------------

Share& Scheduler::need_share(uint32_t account) const {
    Share* share = share_of(account);
    if (!share) refuse_argument("no such pool, budget or lease");
    return *share;
}

void Scheduler::open_share(uint32_t account, int64_t up, uint32_t part_of, int32_t arena, bool waits, double bypass) {
    ASYNCMEM_ENTER(open_share, account, up, part_of, arena, waits, bypass);
    auto share = std::make_unique<Share>();
    share->account = account;
    share->up = up < 0 ? nullptr : &need_share(static_cast<uint32_t>(up));
    share->part_of = &need_share(part_of);
    share->depth = share->up ? share->up->depth + 1 : 0;
    share->arena = arena;
    share->waits = waits;
    share->bypass = bypass;
    share->limit = heap_.account(account).limit;
    if (account >= by_account_.size()) by_account_.resize(account + 1);
    if (by_account_[account]) refuse_argument("the account has a share already");
    ++share->part_of->parts;
    by_account_[account] = std::move(share);
}

// Fail all requests that wait in a share that ends; what else is left there counts for the share around it from now on.
void Scheduler::leave_to_outer(Share& share, double now) {
    auto is_inside = [&](const Share* one) {
        for (; one; one = one->part_of)
            if (one == &share) return true;
        return false;
    };
    requests_.each([&](Request& request) {
        if (!is_inside(request.share)) return;
        now_ = now;
        if (request.queued()) fail(request, Reason::Closed);
        request.shut |= request.state == State::Ordering;
    });
    requests_.each([&](Request& request) {
        if (request.share == &share) request.share = share.part_of;
    });
    for (auto& one : by_account_) {
        if (!one) continue;
        if (one->part_of == &share) one->part_of = share.part_of;
        if (one->up == &share) one->up = share.up;
    }
    share.part_of->requests += share.requests;
    share.part_of->parts += share.parts;
}

void Scheduler::close_share(uint32_t account, double now) {
    ASYNCMEM_ENTER(close_share, account, now);
    Share& share = need_share(account);
    if (!account) refuse_argument("the pool's own share ends with the pool");
    // A lease comes and goes with each step of its tasks: where nothing is left in it, no other request is looked at.
    if (share.requests || share.parts) leave_to_outer(share, now);
    --share.part_of->parts;
    std::erase(spilling_, &share);
    std::erase(waiting_leases_, &share);
    shares_.forget(share);
    if (share.up) Shares::touch(*share.up);
    if (share.gated) heap_.set_gate(account, false);
    by_account_[account].reset();
    ++version_;
    pump(now);
}

void Scheduler::set_limit(uint32_t account, uint64_t limit, double now) {
    ASYNCMEM_ENTER(set_limit, account, limit, now);
    now_ = now;
    Share& share = need_share(account);
    share.limit = limit;
    heap_.set_limit(account, limit);
    if (!account) policy_.limit = limit;
    Shares::touch(share);
    refuse_hopeless(share, limit);
    ++version_;
    ++facts_;
    look_at_pressure();
    pump(now);
}

void Scheduler::configure(const Policy& policy, double now) {
    ASYNCMEM_ENTER(configure, policy, now);
    now_ = now;
    policy_ = policy;
    root_->limit = policy.limit;
    heap_.set_limit(0, policy.limit);
    heap_.go_around(policy.take_back && !policy.limited);
    source_->forget_refusal();
    for (auto& share : by_account_) {
        if (!share) continue;
        share->bypass = policy.bypass;
        Shares::touch(*share);
    }
    refuse_hopeless(*root_, policy.limit);
    fit_caches();
    ++version_;
    ++facts_;
    look_at_pressure();
    pump(now);
}

// Fail the requests for more than a limit that was lowered allows.
void Scheduler::refuse_hopeless(Share& share, uint64_t limit) {
    refuse_waiting(share, limit);
    std::vector<Request*> growing = growing_inside(share);
    for (Request* one : growing)
        if (one->total > limit) fail(*one, Reason::NoMemory);
    take_promises_back(share);
}

// Promises above a limit that was lowered are in the way of all requests, those with one included: memory would be made for
// them, which no request may take, and given back, for ever. The last ones wait for other holders again.
void Scheduler::take_promises_back(const Share& share) {
    auto too_much = [&] {
        Account account = heap_.account(share.account);
        return account.live + account.promised > account.limit;
    };
    if (!too_much()) return;
    std::vector<Request*> growing = growing_inside(share);
    for (; !growing.empty() && too_much(); growing.pop_back()) readmit(*growing.back());
}

std::vector<Request*> Scheduler::growing_inside(const Share& share) const {
    std::vector<Request*> found;
    growing_.each([&](Request& one) {
        if (one.share->is_inside(share)) found.push_back(&one);
    });
    return found;
}

void Scheduler::refuse_waiting(Share& share, uint64_t limit) {
    while (Request* request = share.queue.first_above(limit)) fail(*request, Reason::NoMemory);
    for (Share* inner : std::vector<Share*>(share.inside)) refuse_waiting(*inner, limit);
}

uint64_t Scheduler::capacity(const Share& share) const {
    uint64_t most = share.limit;
    for (const Share* one = &share; one; one = one->up) most = std::min(most, one->limit);
    return most;
}

void Scheduler::add_spillable(uint32_t account, int64_t nbytes, double now) {
    ASYNCMEM_ENTER(add_spillable, account, nbytes, now);
    Share& share = need_share(account);
    bool was = share.spillable;
    share.spillable = static_cast<uint64_t>(static_cast<int64_t>(share.spillable) + nbytes);
    ++facts_;
    if (share.spillable && !was) spilling_.push_back(&share);
    if (!share.spillable && was) std::erase(spilling_, &share);
    if (nbytes > 0 && requests_.count()) {
        ++version_;
        pump(now);
    }
}

// -- what the heap is told -----------------------------------------------------------------------------------------------

// The gates are closed where a request waits before newcomers. Where all who are here have memory made for them, hits pass
// within the allowance of the first, and a free is told only where it is enough for one of them.
//
// Other threads free meanwhile, and tell of it only where a gate is closed. So where one is closed that was open, and blocks
// were given back beyond `returns`, all waiting requests must be tried again: true.
bool Scheduler::set_gates(uint64_t returns) {
    bool again = false;
    auto set = [&](Share& share, bool gated) {
        bool closes = gated && !share.gated;
        share.gated = gated;
        if (heap_.set_gate(share.account, gated) == returns || !closes) return;
        Shares::touch(share);
        again = true;
    };
    bool ends = closed_ || draining_;
    bool waits = shares_.head(*root_);
    for (Share* lease : waiting_leases_) shares_.head(*lease);
    for (Share* share : shares_.turned())
        if (share != root_) set(*share, shares_.head(*share));
    bool all = ends || waits || policy_.direct || heap_.reserved() > policy_.limit;
    set(*root_, all || !growing_.empty());
    if (!all && root_->gated) heap_.leave_ajar(Shares::allowance(*root_, *growing_.first()), growing_.least());
    version_ += again;
    return again;
}

// Pressure is followed by two marks in the heap, so that a hit pays two comparisons.
void Scheduler::look_at_pressure() {
    static constexpr double border[] = {0, 0.6, 0.8, 0.95};
    constexpr double less = 0.05;  // a level ends so far below where it began
    auto limit = static_cast<double>(policy_.limit);
    for (;;) {
        double share = limit > 0 ? static_cast<double>(heap_.live()) / limit : 0;
        uint8_t level = figures_.pressure;
        while (level < 3 && (level < 2 ? share >= border[level + 1] : share > border[3])) ++level;
        while (level > 0 && share < border[level] - less) --level;
        if (level != figures_.pressure) {
            figures_.pressure = level;
            LogRow row;
            row.what = LogRow::Pressed;
            row.level = level;
            row.nbytes = heap_.live();
            heap_.note(row);
            emit(Effect{.kind = Effect::Kind::Pressure, .level = level});
            fit_caches();
        }
        double low = level ? (border[level] - less) * limit : 0;
        uint64_t high = level == 3 ? no_limit : static_cast<uint64_t>(border[level + 1] * limit) - (level < 2 ? 1 : 0);
        heap_.set_marks(static_cast<uint64_t>(low), high);
        // Others free and take meanwhile; what they changed before the marks were set has not been told.
        double again = limit > 0 ? static_cast<double>(heap_.live()) / limit : 0;
        if (again == share) return;
    }
}

// While little is left, caches keep a quarter: what they hold serves one size and cannot join its neighbours.
void Scheduler::fit_caches() {
    constexpr uint64_t part = 4;
    bool squeezed = policy_.adaptive && (figures_.pressure >= 2 || (squeezed_ && figures_.pressure > 0));
    Tuning tuning = policy_.tuning;
    if (squeezed) {
        tuning.stream_cache_bytes /= part;
        tuning.shared_cache_bytes /= part;
    }
    bool changed = squeezed != squeezed_;
    squeezed_ = squeezed;
    heap_.configure(tuning);
    if (changed) defragment();
}

}  // namespace asyncmem::scheduler
