// Who is served next, and what is done for a request that finds nothing.
#include <algorithm>
#include <utility>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

namespace {

constexpr int most_tries = 8;  // requests tried in vain for memory in one go; beyond, only what the largest hole holds

}  // namespace

// -- serving -----------------------------------------------------------------------------------------------------------

void Scheduler::pump(double now) {
    now_ = now;
    uint64_t returns = returns_ = heap_.returns();
    root_->overtaken += heap_.close_up();
    for (int64_t account : heap_.take_touched()) {
        Share* share = share_of(static_cast<uint32_t>(account));
        while (!share && account >= 0) {  // a budget that is closed: its memory is the next one's above
            account = heap_.account(static_cast<uint32_t>(account)).parent;
            if (account >= 0) share = share_of(static_cast<uint32_t>(account));
        }
        if (share) Shares::touch(*share);
    }
    Shares::touch(*root_);
    expire_due();
    if (!suspended_ && !closed_) {
        serve_growing();
        if (!suspended_) serve_waiting();
        for (Share* lease : std::vector<Share*>(waiting_leases_))
            if (!suspended_) serve_lease(*lease);
    }
    if (!suspended_ && !closed_) {
        spill_for_waiting();
        refuse_callers();
        if (heap_.reserved() > policy_.limit || policy_.direct) shrink();
    }
    bool empties = closed_ || (draining_ && !root_->tally.waiting && growing_.empty());
    if (empties && !heap_.live()) emit(Effect{.kind = Effect::Kind::Emptied});
    if (set_gates(returns)) return pump(now);
    arm_quiet();
}

// Memory is being made for these, so they are within every limit; what comes is theirs in order.
void Scheduler::serve_growing() {
    uint64_t most = UINT64_MAX;
    for (int tries = 0; Request* request = growing_.first(most);) {
        Request* head = shares_.head(*root_);
        if (head && may_not_pass(*request, *head)) {  // it was let through behind one that waits again by now
            readmit(*request);
            continue;
        }
        switch (attempt(*request)) {
            case Try::Served:
                continue;
            case Try::Suspended:
                return;
            case Try::Blocked:
                readmit(*request);
                continue;
            case Try::Making:
                most = std::min(most, request->total - 1);
                if (++tries >= most_tries) most = std::min(most, heap_.largest(-1));
        }
    }
}

// The others, the first in order who fits first. One who does not fit may be overtaken, as far as its allowance goes.
void Scheduler::serve_waiting() {
    uint64_t most = UINT64_MAX;
    for (int tries = 0; Request* request = shares_.first(*root_, most);) {
        Request* head = shares_.head(*root_);
        switch (attempt(*request)) {
            case Try::Served:
                continue;
            case Try::Suspended:
                return;
            case Try::Making:
                if (request->share->waits && (request->job || queue_job_) && request->making) {
                    admit(*request);
                    continue;
                }
                [[fallthrough]];
            case Try::Blocked:
                if (request == head) most = std::min(most, Shares::allowance(*root_, *request));
                most = std::min(most, request->total - 1);
                if (++tries >= most_tries) most = std::min(most, heap_.largest(-1));
        }
    }
    Request* head = shares_.head(*root_);
    if (head && !head->terms.calls && last_resort(*head)) serve_waiting();
}

// Inside of a lease there is no other memory: a request waits for what is freed there, where it may wait at all, and for
// memory that moves to the host.
void Scheduler::serve_lease(Share& lease) {
    uint64_t most = UINT64_MAX;
    while (Request* request = shares_.first(lease, most)) {
        if (request->tried != version_ && take(*request)) {
            count_overtaking(*request);
            grant(*request);
            continue;
        }
        if (suspended_) return;
        request->tried = version_;
        if (request == shares_.head(lease)) most = std::min(most, Shares::allowance(lease, *request));
        most = std::min(most, request->total - 1);
    }
    std::vector<Request*> waiting;
    auto collect = [&](auto& self, Share& share) -> void {
        if (!share.waits || !spilling_.empty())
            share.queue.each([&](Request& one) { waiting.push_back(&one); });
        for (Share* inner : share.inside) self(self, *inner);
    };
    collect(collect, lease);
    for (Request* request : waiting) {
        if (request->job || spill_job_) continue;
        Share* full = request->share;
        while (full != &lease && request->total <= heap_.account(full->account).room()) full = full->up;
        uint64_t room = heap_.account(full->account).room();
        uint64_t lacking = std::max<uint64_t>(request->total - std::min(request->total, room), 1);
        if (start_spill(*request, *full, lacking) || request->share->waits) continue;
        if (request->terms.effort == Effort::All) fail(*request, Reason::NoMemory);
    }
    if (lease.queue.empty() && lease.inside.empty()) std::erase(waiting_leases_, &lease);
}

Scheduler::Try Scheduler::attempt(Request& request) {
    if (request.tried == version_) return request.making ? Try::Making : Try::Blocked;
    // Its own promise is not in its way.
    auto promised = static_cast<int64_t>(request.state == State::Growing ? request.total : 0);
    heap_.promise(request.ask.account, -promised);
    Try found = try_all(request);
    heap_.promise(request.ask.account, promised);
    if (found == Try::Served) {
        count_overtaking(request);
        grant(request);
        return found;
    }
    if (found != Try::Suspended) {
        request.tried = version_;
        request.making = found == Try::Making;
    }
    return found;
}

Scheduler::Try Scheduler::try_all(Request& request) {
    const Request* grows = growing_.first();
    for (;;) {
        if (!(grows && may_not_pass(request, *grows)) && take(request)) return Try::Served;
        if (suspended_) return Try::Suspended;
        Try found = provide(request);
        if (found != Try::Served) return found;  // else something was made of what there is: try again
    }
}

// Have the part that a request needs of a segment as one of its own; where that cannot be, it has a part all the same.
Scheduler::Try Scheduler::cut(Request& request) {
    if (queue_job_ && !request.terms.calls) return Try::Making;
    request.cut = true;
    return start(source_->cut(request, now_), &request, Means::Grow) ? Try::Making : Try::Served;
}

// Do what can be done for a request that finds no memory, each time the first that helps. Served: it may find some now.
Scheduler::Try Scheduler::provide(Request& request) {
    const Terms& terms = request.terms;
    if (terms.effort == Effort::Take) return Try::Blocked;
    request.missed = true;
    if (request.job) return Try::Making;
    if (request.uncut) return cut(request);
    bool first = terms.effort == Effort::Tidy || (terms.calls && terms.on_loop);
    if (source_->should_tidy(request, first) && tidy()) return Try::Served;
    if (source_->should_flush(request) && flush()) return Try::Served;
    if (terms.effort == Effort::Tidy) return tidy() ? Try::Served : Try::Blocked;
    if (queue_job_ && !terms.calls) return Try::Making;
    if (split_job_ && !(terms.calls && terms.on_loop)) return Try::Making;  // what is split is free again soon
    if ((policy_.paged || policy_.joins) && !beating_) {
        beating_ = true;
        emit(Effect{.kind = Effect::Kind::Beat});
    }
    bool looked = looked_since(2);
    auto go = [&](Decision job, Means means) {
        if (job && job->effect.kind == Effect::Kind::Look)
            return must_look(2, request.ask.stream, std::move(job->effect.streams)) ? Try::Suspended : Try::Served;
        return start(std::move(job), &request, means) ? Try::Making : Try::Blocked;
    };
    if (policy_.patience > 0 && !request.patient && !capturing_) {
        Try found = go(source_->patience(request, now_, looked), Means::Wait);
        request.patient = found == Try::Making;
        if (found != Try::Blocked) return found;
    }
    if (Try found = go(source_->grow(request, now_, looked), Means::Grow); found != Try::Blocked) return found;
    if (terms.captured && !request.settled) {
        request.settled = true;
        return go(job_of({.kind = Effect::Kind::Settle}), Means::Wait);
    }
    if (tidy()) return Try::Served;
    if (policy_.paged && !request.pressed) {
        request.pressed = true;
        return Try::Served;
    }
    if (start(source_->grow_part(request), &request, Means::Grow)) return Try::Making;
    if (capturing_) return Try::Blocked;
    if (start(source_->wait(request, now_), &request, Means::Wait)) return Try::Making;
    if (start(source_->make_room(request, now_), &request, Means::Trim)) return Try::Making;
    if (start_spill(request, *root_, source_->shortage(request.total))) return Try::Making;
    return Try::Blocked;
}

// -- moving memory to the host -----------------------------------------------------------------------------------------

bool Scheduler::start_spill(Request& request, Share& share, uint64_t nbytes) {
    if (request.terms.effort != Effort::All) return false;  // it takes what is free, and leaves before a job has ended
    if (spill_job_ || !share.spillable || share.spillable < nbytes || request.terms.captured) return false;
    if (queue_job_ && !request.terms.calls) return false;
    start(job_of({.kind = Effect::Kind::Spill, .account = share.account, .nbytes = nbytes}), &request, Means::Spill);
    spill_job_ = last_job_;
    return true;
}

// For whom a full budget holds up, or who could overtake one that is beyond help.
void Scheduler::spill_for_waiting() {
    for (size_t i = 0; i < spilling_.size() && !spill_job_ && !queue_job_; ++i) {
        Share& share = *spilling_[i];
        Request* head = share.waits ? shares_.head(share) : nullptr;
        if (!head) continue;
        uint64_t room = heap_.account(share.account).room(), most = room + share.spillable;
        Request* request = head;
        if (head->total > most) request = share.queue.first(std::min(most, Shares::allowance(share, *head)));
        if (!request || request->job || request->total > most) continue;
        uint64_t lacking = &share == root_ ? source_->shortage(request->total)
                                           : std::max<uint64_t>(request->total - std::min(request->total, room), 1);
        if (&share != root_ && request->total <= room) continue;
        start_spill(*request, share, lacking);
    }
}

// -- when nothing helps ------------------------------------------------------------------------------------------------

bool Scheduler::no_memory_will_come() const {
    return !heap_.live() && !heap_.expects_news() && jobs_.empty() && !source_->leaving() && !source_->coming();
}

// Waiting helps as long as memory is held, or some is under way. Whether to serve again at once.
bool Scheduler::last_resort(Request& request) {
    if (request.job || queue_job_ || suspended_) return false;
    if (policy_.fallback && !request.terms.captured) {
        start_plainly(Effect::Kind::ServeFromHost, request);
    } else if (!capturing_ && no_memory_will_come()) {
        if (uint64_t returns = heap_.returns(); returns != returns_) {  // the last of it came back after the last try
            returns_ = returns;
            Shares::touch(*request.share);
            ++version_;
            return true;
        }
        if (source_->refuses() && !request.asked_again) {
            request.asked_again = true;
            source_->forget_refusal();  // others may have given memory back since
            ++version_;
            return true;
        }
        start_plainly(Effect::Kind::LastResort, request);
    }
    return false;
}

void Scheduler::start_plainly(Effect::Kind kind, Request& request) {
    auto level = static_cast<uint8_t>(std::min<uint32_t>(request.refusals++, 255));
    start(job_of({.kind = kind, .level = level}), &request, Means::Ask);
}

// Synchronous callers who will not wait, once nothing is under way that might serve them.
void Scheduler::refuse_callers() {
    for (size_t i = 0; i < callers_.size();) {
        Request* request = requests_.find(callers_[i]);
        if (!request || !request->queued()) {
            callers_[i] = callers_.back();
            callers_.pop_back();
            continue;
        }
        ++i;
        if (request->job || request->state == State::Growing || suspended_) continue;
        bool others = std::any_of(jobs_.begin(), jobs_.end(), [](auto& job) { return job.second.effect.request != 0; });
        if ((others || split_job_ || source_->returning()) && !request->terms.on_loop) continue;  // a loop does not wait
        bool host = policy_.fallback && !request->terms.captured;
        start_plainly(host ? Effect::Kind::ServeFromHost : Effect::Kind::LastResort, *request);
    }
}

}  // namespace asyncmem::scheduler
