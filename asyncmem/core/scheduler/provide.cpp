// Taking memory, and the effects that bring some.
#include <algorithm>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

// -- taking memory -----------------------------------------------------------------------------------------------------

// From what is mapped, in the order of what it costs: the stream's own, what is done with, another stream's.
bool Scheduler::take(Request& request) {
    request.uncut = false;
    if (request.share->arena == -1 && !source_->may_hold(request.total)) return false;
    bool found = find(request);
    request.ask.again = true;  // what is tried while it waits says nothing about what programs ask for
    return found;
}

bool Scheduler::find(Request& request) {
    bool several = heap_.stream_count() > 1;
    bool may_order = several && !request.terms.captured && !request.unordered &&
                     (request.terms.effort == Effort::Take || !source_->keeps_apart(request));
    auto lacks_pages = [&] { return lacks_pages_ && !request.pressed; };
    if (find_block(request, false)) return true;
    if (request.uncut) return false;
    if (request.share->arena != -1 && heap_.merge(request.share->arena) && find_block(request, false)) return true;
    if (policy_.paged && may_order && take_foreign(request, false)) return true;
    if (lacks_pages()) return false;
    if (several && !source_->grows_apart(request) && must_look(1, request.ask.stream, {})) return false;
    // Memory of the other size class is for requests that cannot have a segment of their own.
    bool anywhere = request.share->arena == -1 && (request.pressed || !source_->can_grow(request));
    if (anywhere && find_block(request, true)) return true;
    if (anywhere && lacks_pages()) return false;
    return may_order && take_foreign(request, anywhere);
}

Ask Scheduler::ask_for(const Request& request, bool anywhere) const {
    Ask ask = request.ask;
    ask.anywhere = anywhere;
    ask.cuts = request.cut || request.terms.captured || request.terms.effort != Effort::All;
    if (ask.caused) {
        ask.cause.missed = request.noted;
        ask.cause.span_ns = static_cast<int64_t>(1e9 * (now_ - request.since));
    }
    return ask;
}

bool Scheduler::find_block(Request& request, bool anywhere) {
    Ask ask = ask_for(request, anywhere);
    Outcome outcome;
    request.blocks.resize(request.sizes().size());
    bool found;
    if (request.batch()) {
        found = heap_.take_many(ask, request.pieces, request.blocks, outcome);
    } else {
        request.blocks[0] = {heap_.take(ask, outcome), outcome.address};
        found = request.blocks[0].block;
    }
    if (!found) request.blocks.clear();
    lacks_pages_ = outcome.reason == NoPages;
    request.uncut = outcome.reason == Uncut;
    if (outcome.flags & LiveCrossed) look_at_pressure();
    return found;
}

bool Scheduler::take_foreign(Request& request, bool anywhere) {
    Ask ask = ask_for(request, anywhere);
    for (uint64_t nbytes : request.sizes()) {
        ask.nbytes = nbytes;
        Outcome outcome;
        Entries owed;
        BlockId block = heap_.take_foreign(ask, false, owed, outcome);
        if (!block && policy_.late_fences) block = heap_.take_foreign(ask, true, owed, outcome);
        lacks_pages_ = !block && outcome.reason == NoPages;
        if (!block) {
            put_back(request);
            return false;
        }
        request.blocks.push_back({block, outcome.address});
        request.owed.push_back(std::move(owed));
    }
    figures_.foreign += static_cast<int64_t>(request.blocks.size());
    if (std::ranges::all_of(request.owed, &Entries::empty)) request.owed.clear();
    look_at_pressure();
    return true;
}

// What it has taken of other streams goes back as it was.
void Scheduler::put_back(Request& request) {
    for (; !request.blocks.empty(); request.blocks.pop_back(), request.owed.pop_back())
        heap_.put_back(request.blocks.back().block, request.owed.back());
}

// Ask for a look at fences, once for each version of the heap; whether one is under way now.
bool Scheduler::must_look(int depth, uint32_t stream, std::vector<uint32_t> streams) {
    if (looked_since(depth)) return false;
    suspended_ = true;
    look_depth_ = depth;
    emit(Effect{.kind = Effect::Kind::Look, .level = static_cast<uint8_t>(depth), .stream = stream, .streams = std::move(streams)});
    return true;
}

void Scheduler::looked(uint64_t found, double now) {
    ASYNCMEM_ENTER(looked, found, now);
    if (found) {
        ++figures_.means[static_cast<size_t>(Means::Look)];
        ++version_;
    }
    look_event_ = event_;
    now_ = now;
    source_->looked(now);
    bool decides = suspended_;
    suspended_ = false;
    if (decides || (found && (root_->tally.waiting || !growing_.empty()))) pump(now);
    note_fresh();
}

bool Scheduler::flush() {
    if (!heap_.flush(-1)) return false;
    ++figures_.means[static_cast<size_t>(Means::Flush)];
    ++version_;
    return true;
}

// Make the most of what is mapped, at once; whether that changed anything.
bool Scheduler::tidy() {
    bool flushed = flush();
    if (!heap_.merge()) return flushed;
    ++figures_.means[static_cast<size_t>(Means::Merge)];
    ++version_;
    return true;
}

// -- effects under way -------------------------------------------------------------------------------------------------

bool Scheduler::start(Decision job, Request* request, Means means) {
    if (!job) return false;
    if (means != Means::Ask) ++figures_.means[static_cast<size_t>(means)];  // the caller counts that
    Effect& effect = job->effect;
    effect.job = ++last_job_;
    job->started = now_;
    if (request) {
        effect.request = request->id;
        effect.by_caller = request->terms.calls;
        request->job = effect.job;
        if (!effect.by_caller) queue_job_ = effect.job;
    }
    emit(effect);
    jobs_[effect.job] = std::move(*job);
    return true;
}

Job Scheduler::end_job(JobId id) {
    auto found = jobs_.find(id);
    if (found == jobs_.end()) refuse_argument("no such job is under way");
    Job job = std::move(found->second);
    jobs_.erase(found);
    for (JobId* one : {&queue_job_, &shrink_job_, &spill_job_, &split_job_})
        if (*one == id) *one = 0;
    if (Request* request = requests_.find(job.effect.request); request && request->job == id) request->job = 0;
    ++version_;
    ++event_;
    return job;
}

void Scheduler::grew(JobId id, uint64_t address, uint64_t nbytes, uint32_t stream, bool ready, double now, double seconds,
                     uint64_t rest) {
    ASYNCMEM_ENTER(grew, id, address, nbytes, stream, ready, now, seconds, rest);
    Job job = end_job(id);
    root_->overtaken += heap_.close_up();  // the fast path takes nothing of what comes
    source_->grew(job, address, nbytes, rest, stream, ready, seconds);
    look_at_pressure();
    pump(now);
}

void Scheduler::grow_failed(JobId id, bool out_of_memory, double now) {
    ASYNCMEM_ENTER(grow_failed, id, out_of_memory, now);
    source_->grow_failed(end_job(id), out_of_memory);
    pump(now);
}

void Scheduler::trimmed(JobId id, size_t count, double now) {
    ASYNCMEM_ENTER(trimmed, id, count, now);
    auto found = jobs_.find(id);
    if (found == jobs_.end()) refuse_argument("no such job is under way");
    if (count > found->second.effect.returns.size()) refuse_argument("more went back than was to go");
    source_->trimmed(found->second, count, now);
    if (found->second.effect.kind == Effect::Kind::Trim) end_job(id);  // growth goes on
    ++version_;
    pump(now);
}

void Scheduler::remapped(JobId id, size_t moved, size_t unmapped, size_t mapped, bool out_of_memory, double now, double seconds) {
    ASYNCMEM_ENTER(remapped, id, moved, unmapped, mapped, out_of_memory, now, seconds);
    Job job = end_job(id);
    root_->overtaken += heap_.close_up();
    source_->remapped(job, moved, unmapped, mapped, out_of_memory, now, seconds);
    look_at_pressure();
    pump(now);
}

void Scheduler::waited(JobId id, bool seen, double now) {
    ASYNCMEM_ENTER(waited, id, seen, now);
    bool shrinks = id == shrink_job_;
    Job job = end_job(id);
    if (job.reclaims && seen) {
        if (Decision next = source_->reclaim(job.leaving)) {
            start(std::move(next), requests_.find(job.effect.request), Means::Trim);
            if (shrinks) shrink_job_ = last_job_;
            pump(now);
            return;
        }
    }
    source_->waited(job, now);
    pump(now);
}

void Scheduler::ended(JobId id, Ending ending, double now) {
    ASYNCMEM_ENTER(ended, id, ending, now);
    now_ = now;
    Job job = end_job(id);
    Request* request = requests_.find(job.effect.request);
    if (ending == Ending::Retry) source_->forget_refusal();
    if (request && request->queued()) {
        // Threads take and free past the scheduler: what is held by now can be waited for, and what is free be tried.
        bool helps = job.effect.kind == Effect::Kind::LastResort && !request->terms.calls &&
                     (!no_memory_will_come() || heap_.returns() != returns_);
        if (helps) ++version_;
        if (ending == Ending::Refused && !helps) fail(*request, Reason::NoMemory);
        if (ending == Ending::Served) grant(*request);
    }
    pump(now);
}

// Give back what is free above a limit that was lowered; in a pool without pooling, all that is free.
void Scheduler::shrink() {
    if (shrink_job_) return;
    if (!policy_.direct) heap_.flush(-1);
    uint64_t reserved = heap_.reserved();
    uint64_t wanted = policy_.direct ? no_limit : reserved - std::min(reserved, policy_.limit);
    if (start(source_->trim(wanted, 0, now_), nullptr, Means::Trim)) shrink_job_ = last_job_;
}

void Scheduler::trim(uint64_t keep, double now) {
    ASYNCMEM_ENTER(trim, keep, now);
    now_ = now;
    heap_.flush(-1);
    heap_.merge();
    ++version_;
    start(source_->trim(no_limit, keep, now, true), nullptr, Means::Trim);
}

void Scheduler::grow_ahead(double now) {
    ASYNCMEM_ENTER(grow_ahead, now);
    now_ = now;
    if (!closed_) start(source_->grow_ahead(now_), nullptr, Means::Grow);
}

}  // namespace asyncmem::scheduler
