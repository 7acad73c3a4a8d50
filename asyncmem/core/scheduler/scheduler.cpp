// Requests: taken in, and ended.
#include <algorithm>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

Scheduler::Scheduler(Heap& heap, const Policy& policy, double now)
    : heap_(heap), journal_(heap.journal()), policy_(policy), source_(make_source(heap, policy_, now)), shares_(heap),
      now_(now), used_at_(now) {
    if (journal_) {
        journal_->write("serve", [&](auto&&...) { begin(); }, policy, now);
    } else {
        begin();
    }
}

void Scheduler::begin() {
    auto root = std::make_unique<Share>();
    root->bypass = policy_.bypass;
    root->limit = policy_.limit;
    root_ = root.get();
    by_account_.push_back(std::move(root));
    heap_.set_limit(0, policy_.limit);
    heap_.go_around(policy_.take_back && !policy_.limited);
    look_at_pressure();
    set_gates(heap_.returns());
}

// -- taking requests in ------------------------------------------------------------------------------------------------

RequestId Scheduler::submit(const Ask& ask, std::vector<uint64_t> pieces, const Terms& terms, double now) {
    ASYNCMEM_ENTER(submit, ask, pieces, terms, now);
    now_ = now;
    Share& share = need_share(ask.account);
    if (ask.arena != share.arena) refuse_argument("another range than that of the pool, budget or lease");
    if (ask.stream >= heap_.stream_count()) refuse_argument("unknown stream");
    Request& request = requests_.add();
    request.ask = ask;
    request.ask.fast = false;
    request.ask.again = policy_.paged;
    request.terms = terms;
    request.share = &share;
    ++share.requests;
    request.since = now;
    request.pieces = std::move(pieces);
    for (uint64_t nbytes : request.sizes()) {
        request.total += rounded(nbytes);
        request.largest = std::max(request.largest, rounded(nbytes));
    }
    ++event_;
    if (closed_ || draining_) {
        settle(request, State::Failed, Reason::Closed);
    } else if (!request.total) {
        request.state = State::Granted;
    } else if (request.total > capacity(share)) {
        fail(request, Reason::NoMemory);
    } else {
        request.sequence = ++sequence_;
        queued_bytes_ += static_cast<int64_t>(request.total);
        // A level of priority is worth half of what may overtake a request.
        double bonus = 0.5 * policy_.bypass * static_cast<double>(policy_.limit) * terms.priority;
        request.key = queued_bytes_ - static_cast<int64_t>(std::clamp(bonus, -4e18, 4e18));
        root_->overtaken += heap_.close_up();
        for (Share* one = &share; one; one = one->up) request.overtaken.push_back(one->overtaken);
        join(request);
        fresh_.push_back(request.id);
        try {
            pump(now);
            note_fresh();
        } catch (...) {  // its caller never learns its number
            if (request.queued()) settle(request, State::Failed, Reason::Error);
            if (request.state == State::Failed) remove(request);
            throw;
        }
    }
    return request.id;
}

// Requests that were taken in stay for now, unless a look at fences is under way for one: find out whether they may.
void Scheduler::note_fresh() {
    while (!fresh_.empty() && !suspended_) {
        RequestId id = fresh_.back();
        fresh_.pop_back();
        Request* request = requests_.find(id);
        if (!request || !request->queued()) continue;
        note(*request);
        if (!request->queued()) pump(now_);  // it has failed: others stood behind it
    }
}

void Scheduler::note(Request& request) {
    const Terms& terms = request.terms;
    if (terms.effort != Effort::All) {
        fail(request, terms.deadline <= now_ ? Reason::Expired : Reason::NoMemory);
        return;
    }
    bool waits = request.state == State::Waiting;
    if (!terms.waits) {
        callers_.push_back(request.id);
        refuse_callers();
    } else if (waits && !terms.calls && static_cast<uint64_t>(root_->tally.waiting) > policy_.max_waiting) {
        fail(request, Reason::TooMany);
    }
    if (!request.queued()) return;
    request.noted = request.missed = true;
    request.waited = waits;
    request.grew = !waits;
    each_tally(request, [&](Tally& tally) { ++(waits ? tally.waits : tally.growth_waits); });
    expire_later(request);
}

// Stand in the queue of its share.
void Scheduler::join(Request& request) {
    request.state = State::Waiting;
    shares_.join(request);
    count(request, 1);
    Share* top = request.share;
    while (top->up) top = top->up;
    if (top != root_ && std::find(waiting_leases_.begin(), waiting_leases_.end(), top) == waiting_leases_.end())
        waiting_leases_.push_back(top);
}

// -- state of a request ------------------------------------------------------------------------------------------------

// It begins or ceases to wait or grow, in the state that it has.
void Scheduler::count(Request& request, int64_t sign) {
    bool grows = request.state == State::Growing;
    each_tally(request, [&](Tally& tally) {
        (grows ? tally.growing : tally.waiting) += sign;
        (grows ? tally.growing_bytes : tally.waiting_bytes) += sign * static_cast<int64_t>(request.total);
    });
}

// Memory is being made for it: its bytes count from now on, so that no other request gets them.
void Scheduler::admit(Request& request) {
    shares_.leave(request);
    count(request, -1);
    heap_.promise(request.ask.account, static_cast<int64_t>(request.total));
    request.state = State::Growing;
    growing_.insert(request);
    count(request, 1);
}

void Scheduler::readmit(Request& request) {
    growing_.remove(request);
    count(request, -1);
    heap_.promise(request.ask.account, -static_cast<int64_t>(request.total));
    ++facts_;
    join(request);
    if (request.noted && !request.waited) {
        request.waited = true;
        each_tally(request, [](Tally& tally) { ++tally.waits; });
    }
}

// Whether another request stands before it and has been overtaken as far as it may be.
bool Scheduler::may_not_pass(const Request& request, const Request& other) const {
    return &other != &request && before(other, request) && request.total > Shares::allowance(*root_, other);
}

// It is about to be served: note which waiting or growing requests it passes.
void Scheduler::count_overtaking(const Request& request) {
    auto passes = [&](const Request* other) { return other && other != &request && before(*other, request); };
    for (Share* one = request.share; one; one = one->up)
        if (passes(shares_.head(*one)) || (one == root_ && passes(growing_.first()))) one->overtaken += request.total;
}

void Scheduler::grant(Request& request) {
    settle(request, request.owed.empty() ? State::Granted : State::Ordering, Reason::None);
}

void Scheduler::leave(Request& request) {
    if (!request.sequence || !request.queued()) return;
    if (request.state == State::Growing) {
        if (growing_.first() == &request) ++version_;  // others stood behind it
        growing_.remove(request);
        heap_.promise(request.ask.account, -static_cast<int64_t>(request.total));
        Shares::touch(*request.share);
    } else {
        shares_.leave(request);
    }
    count(request, -1);
    deadlines_.erase({request.terms.deadline, request.id});
    if (request.sleepers && request.terms.deadline == never) --sleeping_;
}

// End a request: it leaves the queue, and its waiters are woken.
void Scheduler::settle(Request& request, State state, Reason reason) {
    leave(request);
    request.state = state;
    request.reason = reason;
    if (request.terms.deadline < never) arm_deadline();
    bool served = reason == Reason::None;
    figures_.progress += served;
    if (request.missed) {
        double age = now_ - request.since;
        // What another stream had is counted by itself.
        bool counts = served && !request.terms.captured && request.owed.empty();
        each_tally(request, [&](Tally& tally) {
            if (counts) tally.misses += static_cast<int64_t>(request.sizes().size());
            if (request.waited) {
                tally.wait_seconds += age;
                tally.longest_wait = std::max(tally.longest_wait, age);
            } else if (request.grew) {
                tally.growth_seconds += age;
            }
        });
    }
    if (request.waited && request.ask.caused) log_end(request);
    if (state == State::Ordering) {
        emit({.kind = Effect::Kind::Order, .request = request.id});
    } else if (request.noted || request.returned) {
        emit({.kind = state == State::Granted ? Effect::Kind::Granted : Effect::Kind::Failed, .request = request.id});
    }
}

void Scheduler::log_end(const Request& request) {
    LogRow row;
    row.what = LogRow::Waited;
    row.level = request.reason == Reason::None        ? 0
                : request.reason == Reason::Cancelled ? 1
                : request.reason == Reason::Expired   ? 2
                                                      : 3;
    row.nbytes = request.ask.nbytes;
    int64_t priority = request.terms.priority;
    row.address = static_cast<uint64_t>(priority < 0 ? -2 * priority - 1 : 2 * priority);
    row.span_ns = static_cast<int64_t>(1e9 * (now_ - request.since));
    row.caller = request.ask.cause.caller;
    row.stream = static_cast<uint16_t>(request.ask.stream);
    heap_.note(row);
}

void Scheduler::emit(Effect effect) {
    if (journal_) [[unlikely]] journal_->add_effect(effect);
    effects_.push_back(std::move(effect));
}

void Scheduler::fail(Request& request, Reason reason) {
    if (reason == Reason::NoMemory) explain(request);
    if (request.state == State::Waiting && request.sequence) request.ahead = request.share->queue.rank(request);
    each_tally(request, [&](Tally& tally) {
        tally.timeouts += reason == Reason::Expired;
        tally.deadlocks += reason == Reason::Deadlock;
        tally.cancellations += reason == Reason::Cancelled;
    });
    settle(request, State::Failed, reason);
}

// Which share has no room for it, and why.
void Scheduler::explain(Request& request) {
    request.shortage = Shortage::None;
    for (Share* one = request.share; one; one = one->up) {
        request.level = one->account;
        if (request.total > one->limit) {
            request.shortage = Shortage::Size;
            return;
        }
    }
    for (Share* one = request.share; one; one = one->up) {
        request.level = one->account;
        if (request.total > heap_.account(one->account).room()) {
            request.shortage = Shortage::Limit;
            return;
        }
    }
    if (request.share->arena != -1 || heap_.reserved() - heap_.live() >= request.total) {
        request.shortage = Shortage::Fragmentation;
    } else {
        request.shortage = Shortage::Device;
    }
}

Request& Scheduler::need(RequestId id) const {
    Request* request = requests_.find(id);
    if (!request) refuse_argument("no such request");
    return *request;
}

void Scheduler::note_handed_back(uint32_t account) {
    std::lock_guard lock(lock_);
    for (Share* one = share_of(account); one; one = one->part_of) ++one->tally.handed_back;
}

State Scheduler::leave_to(RequestId id) {
    ASYNCMEM_ENTER(leave_to, id);
    Request& request = need(id);
    request.returned = true;
    return request.state;
}

std::vector<Granted> Scheduler::claim(RequestId id) {
    ASYNCMEM_ENTER(claim, id);
    Request& request = need(id);
    if (request.state != State::Granted) refuse_argument("the request has no memory to take");
    std::vector<Granted> blocks = std::move(request.blocks);
    remove(request);
    return blocks;
}

void Scheduler::remove(Request& request) {
    --request.share->requests;
    requests_.remove(request);
}

void Scheduler::forget(RequestId id) {
    ASYNCMEM_ENTER(forget, id);
    Request* request = requests_.find(id);
    if (request && request->state == State::Failed) remove(*request);
}

bool Scheduler::cancel(RequestId id, double now) {
    ASYNCMEM_ENTER(cancel, id, now);
    Request* request = requests_.find(id);
    if (!request || !request->queued()) return false;
    now_ = now;
    fail(*request, Reason::Cancelled);
    ++figures_.progress;
    pump(now);
    return true;
}

void Scheduler::fail(RequestId id, Reason reason, double now) {
    ASYNCMEM_ENTER(fail, id, reason, now);
    Request* request = requests_.find(id);
    if (!request || !request->queued()) return;
    now_ = now;
    fail(*request, reason);
    pump(now);
}

void Scheduler::give(RequestId id, BlockId block, uint64_t address, double now) {
    ASYNCMEM_ENTER(give, id, block, address, now);
    Request& request = need(id);
    if (!request.queued()) refuse_argument("the request does not wait");
    now_ = now;
    request.blocks = {{block, address}};
    grant(request);
    pump(now);
}

Entries Scheduler::owed(RequestId id) const {
    std::lock_guard lock(lock_);
    Entries all;
    for (const Entries& uses : need(id).owed) all = joined(std::move(all), uses);
    return all;
}

void Scheduler::ordered(RequestId id, double now) {
    ASYNCMEM_ENTER(ordered, id, now);
    Request& request = need(id);
    if (request.state != State::Ordering) refuse_argument("the request has nothing to be ordered");
    now_ = now;
    request.owed.clear();
    request.state = State::Granted;
    if (request.noted || request.returned) emit({.kind = Effect::Kind::Granted, .request = request.id});
}

// Its stream could not be ordered: the memory goes back as it was, and the request takes none of other streams.
void Scheduler::unordered(RequestId id, double now) {
    ASYNCMEM_ENTER(unordered, id, now);
    Request& request = need(id);
    if (request.state != State::Ordering) refuse_argument("the request has nothing to be ordered");
    now_ = now;
    figures_.foreign -= static_cast<int64_t>(request.blocks.size());
    put_back(request);
    --figures_.progress;
    if (request.shut) {
        fail(request, Reason::Closed);
        pump(now);
        return;
    }
    request.unordered = true;
    request.reason = Reason::None;
    request.tried = 0;
    join(request);
    sleeping_ += request.sleepers && request.terms.deadline == never;
    if (request.noted) {
        if (!request.terms.waits) callers_.push_back(id);
        expire_later(request);
    } else {
        fresh_.push_back(id);
    }
    ++version_;
    ++event_;
    pump(now);
    note_fresh();
}

}  // namespace asyncmem::scheduler
