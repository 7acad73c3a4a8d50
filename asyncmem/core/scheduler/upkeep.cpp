// What happens by the clock: deadlines, upkeep, the end; effects handed out, figures, and the invariants.

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "scheduler.hpp"

namespace asyncmem::scheduler {

// -- time --------------------------------------------------------------------------------------------------------------

void Scheduler::expire(double now) {
    ASYNCMEM_ENTER(expire, now);
    armed_deadline_ = never;
    ++event_;
    pump(now);
    arm_deadline();
}

void Scheduler::expire_due() {
    while (!deadlines_.empty() && deadlines_.begin()->first <= now_)
        fail(need(deadlines_.begin()->second), Reason::Expired);
}

// A thread that blocks looks at the clock by itself.
void Scheduler::expire_later(const Request& request) {
    if (request.terms.deadline == never || request.terms.calls) return;
    deadlines_.emplace(request.terms.deadline, request.id);
    arm_deadline();
}

// A timer that is too early does no harm; only the last one is called off.
void Scheduler::arm_deadline() {
    double first = deadlines_.empty() ? never : deadlines_.begin()->first;
    if (first == armed_deadline_ || (armed_deadline_ < first && first < never)) return;
    armed_deadline_ = first;
    emit(Effect{.kind = Effect::Kind::Deadline, .seconds = first});
}

void Scheduler::shift_clock(double seconds) {
    ASYNCMEM_ENTER(shift_clock, seconds);
    requests_.each([&](Request& request) {
        request.since += seconds;
        request.terms.deadline += seconds;
    });
    for (auto& [when, id] : std::exchange(deadlines_, {})) deadlines_.emplace(when + seconds, id);
    for (auto& [id, job] : jobs_) job.started += seconds;
    source_->shift(seconds);
    used_at_ += seconds;
    now_ += seconds;
    // What was armed was on the other clock.
    armed_deadline_ = never;
    arm_deadline();
    quiet_armed_ = false;
    arm_quiet();
}

void Scheduler::freed(uint32_t flags, double now) {
    ASYNCMEM_ENTER(freed, flags, now);
    now_ = now;
    if (flags & LiveCrossed) look_at_pressure();
    if (flags & Waiting) {
        ++version_;
        ++event_;
        ++figures_.progress;
    }
    if (flags & Waiting) pump(now);
}

void Scheduler::tick(double now) {
    ASYNCMEM_ENTER(tick, now);
    now_ = now;
    source_->forget_refusal();  // others may have given memory back to the device
    capturing_ = false;         // or ended their captures
    requests_.each([](Request& request) { request.unordered = false; });
    if (root_->tally.waiting || !growing_.empty()) {
        ++version_;
        ++event_;
        pump(now);
    }
    defragment();
    Account whole = heap_.account(0);
    uint64_t use = whole.grants() + whole.frees, peak = heap_.recent_peak();
    needed_ = std::max(peak, std::exchange(recent_peak_, peak));
    if (use != last_use_) {
        last_use_ = use;
        used_at_ = now;
        quiet_ticks_ = 0;
        shrunk_ = tidied_ = false;
    } else if (++quiet_ticks_; now - used_at_ >= policy_.shrink_after && !shrunk_ && !closed_) {
        shrunk_ = true;
        heap_.flush(-1);
        heap_.merge();
        start(source_->trim(no_limit, policy_.ready, now), nullptr, Means::Trim);
    }
}

void Scheduler::offer(double now) {
    ASYNCMEM_ENTER(offer, now);
    constexpr uint64_t spare = 8;  // a pool that works keeps one part in so many more than it has needed: memory is in pieces
    constexpr uint32_t rest = 2;   // ticks without a use, after which it keeps nothing
    now_ = now;
    if (closed_ || shrink_job_ || root_->tally.waiting || !growing_.empty()) return;
    bool rests = quiet_ticks_ >= rest;
    if (rests && !std::exchange(tidied_, true)) {
        heap_.flush(-1);
        heap_.merge();
    }
    uint64_t keep = std::max(policy_.ready, rests ? 0 : needed_ + needed_ / spare);
    if (start(source_->trim(no_limit, keep, now), nullptr, Means::Trim)) shrink_job_ = last_job_;
}

void Scheduler::set_capturing(bool capturing) {
    ASYNCMEM_ENTER(set_capturing, capturing);
    capturing_ = capturing;
}

void Scheduler::defragment() {
    uint64_t free = heap_.free_bytes();
    if (!policy_.defragment || root_->tally.waiting || !free) return;
    double threshold = squeezed_ ? 0 : policy_.merge_threshold;
    if (1 - static_cast<double>(heap_.largest(-1)) / static_cast<double>(free) > threshold && heap_.merge())
        ++figures_.means[static_cast<size_t>(Means::Merge)];
}

// Caches keep memory from being moved, and what one stream freed is all streams' only once it is joined. That is seen to
// here, by the clock, and not when pages are short: so blocks lie as if no page were ever taken back.
void Scheduler::begin_beat() {
    ASYNCMEM_ENTER(begin_beat);
    if (policy_.joins && !closed_)
        for (uint32_t s = 0; s < heap_.stream_count(); ++s)
            while (start(source_->join(s), nullptr, Means::Grow)) {}
    if (!policy_.paged) return;
    beat_gained_ = heap_.flush(-1);
    emit(Effect{.kind = Effect::Kind::Look, .level = 2, .streams = source_->unfenced()});
}

double Scheduler::end_beat(double now) {
    ASYNCMEM_WRITTEN(end_beat, now);
    constexpr double pause = 0.004, tight_pause = 0.0005;  // seconds to the next; and near the limit
    constexpr uint32_t most_quiet = 16;    // beats after which nothing was freed that end them
    constexpr uint64_t merge_ratio = 32;   // live blocks for each free, up to which neighbours are joined
    std::lock_guard lock(lock_);
    if (!policy_.paged && !policy_.joins) return never;
    uint64_t frees = heap_.account(0).frees;
    bool quiet = frees == beat_frees_ && !heap_.lags();
    quiet_beats_ = quiet ? quiet_beats_ + 1 : 0;
    beat_frees_ = frees;
    // What waited for different streams when it was looked at last, and waits for none now, is joined once.
    bool joins = quiet ? settled_frees_ != frees : (frees - merged_frees_) * merge_ratio >= heap_.counts().live_blocks;
    if (policy_.paged && heap_.stream_count() > 1 && joins) {
        beat_gained_ = heap_.merge() || beat_gained_;
        merged_frees_ = frees;
        if (quiet) settled_frees_ = frees;
    }
    if (beat_gained_ && (root_->tally.waiting || !growing_.empty())) {
        ++version_;
        pump(now);
    }
    start(source_->unmap_vacated(now), nullptr, Means::Ask);
    if (!split_job_ && !capturing_ && !closed_ && start(source_->split(now), nullptr, Means::Ask)) split_job_ = last_job_;
    beating_ = quiet_beats_ < most_quiet || source_->has_vacated();
    return !beating_ ? never : source_->tight() ? tight_pause : pause;
}

// -- the end -----------------------------------------------------------------------------------------------------------

void Scheduler::drain(double now) {
    ASYNCMEM_ENTER(drain, now);
    draining_ = true;
    pump(now);
}

void Scheduler::close(double now) {
    ASYNCMEM_ENTER(close, now);
    closed_ = true;
    now_ = now;
    requests_.each([&](Request& request) {
        if (request.queued()) fail(request, Reason::Closed);
        request.shut = request.state == State::Ordering;
    });
    pump(now);
}

// -- figures -----------------------------------------------------------------------------------------------------------

bool Scheduler::next(Effect& effect) {
    std::lock_guard lock(lock_);
    if (effects_.empty()) return false;
    effect = std::move(effects_.front());
    effects_.pop_front();
    return true;
}

Gauges Scheduler::gauges() const {
    std::lock_guard lock(lock_);
    Gauges found = figures_;
    const Tally& all = root_->tally;
    found.waiting = static_cast<uint64_t>(all.waiting);
    found.waiting_bytes = static_cast<uint64_t>(all.waiting_bytes);
    found.growing = static_cast<uint64_t>(all.growing);
    found.growing_bytes = static_cast<uint64_t>(all.growing_bytes);
    found.coming = source_->coming();
    found.leaving = source_->leaving();
    found.overtaken = root_->overtaken;
    found.under_way = jobs_.size();
    found.grows = source_->grows;
    found.trims = source_->trims;
    found.moved = source_->moved();
    found.waited = source_->waited();
    return found;
}

std::vector<RequestId> Scheduler::queued() const {
    std::lock_guard lock(lock_);
    std::vector<std::pair<uint64_t, RequestId>> found;
    requests_.each([&](Request& request) {
        if (request.queued() && request.sequence) found.emplace_back(request.sequence, request.id);
    });
    std::sort(found.begin(), found.end());
    std::vector<RequestId> ids;
    for (auto& one : found) ids.push_back(one.second);
    return ids;
}

std::string Scheduler::check() const {
    std::lock_guard lock(lock_);
    std::unordered_map<const Share*, size_t> requests, parts;
    std::unordered_map<const Share*, Tally> tallies;
    requests_.each([&](Request& request) {
        ++requests[request.share];
        if (!request.sequence || !request.queued()) return;
        auto total = static_cast<int64_t>(request.total);
        for (Share* one = request.share; one; one = one->part_of) {
            Tally& tally = tallies[one];
            bool waits = request.state == State::Waiting;
            ++(waits ? tally.waiting : tally.growing);
            (waits ? tally.waiting_bytes : tally.growing_bytes) += total;
        }
    });
    const Tally& all = root_->tally;
    if (static_cast<size_t>(all.growing) != growing_.count()) return "the growing requests are miscounted";
    size_t queued = 0;
    for (auto& share : by_account_)
        if (share) ++parts[share->part_of];
    for (auto& share : by_account_) {
        if (!share) continue;
        if (share->requests != requests[share.get()]) return "the requests of a share are miscounted";
        if (share->parts != parts[share.get()]) return "the parts of a share are miscounted";
        const Tally &told = share->tally, &found = tallies[share.get()];
        if (told.waiting != found.waiting || told.waiting_bytes != found.waiting_bytes)
            return "the waiting requests of a share are miscounted";
        if (told.growing != found.growing || told.growing_bytes != found.growing_bytes)
            return "the growing requests of a share are miscounted";
        if (!share->queue.sound()) return "a queue is out of order";
        queued += share->queue.count();
        if (share->up && (share->listed != 0) != (!share->queue.empty() || !share->inside.empty()))
            return "a share with requests is not listed, or one without is";
    }
    if (queued != static_cast<size_t>(all.waiting)) return "the queues hold other requests than those that wait";
    if (!growing_.sound()) return "the queue of growing requests is out of order";
    if (heap_.account(0).promised != static_cast<uint64_t>(all.growing_bytes))
        return "the pool has promised other bytes than its growing requests ask for";
    return "";
}

}  // namespace asyncmem::scheduler
