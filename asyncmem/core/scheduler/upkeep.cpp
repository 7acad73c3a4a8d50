// What happens by the clock: deadlines, upkeep, the end.
#include <algorithm>
#include <cmath>

#include "told.hpp"

namespace asyncmem::scheduler {

// -- time --------------------------------------------------------------------------------------------------------------

void Scheduler::expire(double now) {
    ASYNCMEM_WRITTEN(expire, now);
    std::lock_guard lock(lock_);
    armed_deadline_ = never;
    ++event_;
    pump(now);
    arm_deadline();
}

void Scheduler::expire_due() {
    while (!deadlines_.empty() && deadlines_.front().first <= now_) {
        RequestId id = deadlines_.front().second;
        std::pop_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
        deadlines_.pop_back();
        Request* request = requests_.find(id);
        if (request && request->queued()) fail(*request, Reason::Expired);
    }
}

void Scheduler::arm_deadline() {
    if (!with_deadline_) {
        deadlines_.clear();
        if (armed_deadline_ != never) {
            armed_deadline_ = never;
            emit(Effect{.kind = Effect::Kind::Deadline, .seconds = never});
        }
        return;
    }
    auto is_over = [&](const std::pair<double, RequestId>& one) {
        Request* request = requests_.find(one.second);
        return !request || !request->queued();
    };
    while (!deadlines_.empty() && is_over(deadlines_.front())) {
        std::pop_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
        deadlines_.pop_back();
    }
    if (deadlines_.size() > 2 * with_deadline_ + 64) {
        std::erase_if(deadlines_, is_over);
        std::make_heap(deadlines_.begin(), deadlines_.end(), std::greater<>());
    }
    if (!deadlines_.empty() && deadlines_.front().first < armed_deadline_) {
        armed_deadline_ = deadlines_.front().first;
        emit(Effect{.kind = Effect::Kind::Deadline, .seconds = armed_deadline_});
    }
}

void Scheduler::shift_clock(double seconds) {
    ASYNCMEM_WRITTEN(shift_clock, seconds);
    std::lock_guard lock(lock_);
    requests_.each([&](Request& request) {
        request.since += seconds;
        request.terms.deadline += seconds;
    });
    for (auto& one : deadlines_) one.first += seconds;
    for (auto& [id, job] : jobs_) {
        job.started += seconds;
        job.change.decided += seconds;
    }
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
    ASYNCMEM_WRITTEN(freed, flags, now);
    std::lock_guard lock(lock_);
    now_ = now;
    if (flags & LiveCrossed) look_at_pressure();
    if (flags & Waiting) {
        ++version_;
        ++event_;
        ++progress_;
    }
    if (flags & Waiting) pump(now);
}

void Scheduler::tick(double now) {
    ASYNCMEM_WRITTEN(tick, now);
    std::lock_guard lock(lock_);
    now_ = now;
    source_->forget_refusal();  // others may have given memory back to the device
    capturing_ = false;         // or ended their captures
    requests_.each([](Request& request) { request.unordered = false; });
    if (waiting_ || !growing_.empty()) {
        ++version_;
        ++event_;
        pump(now);
    }
    defragment();
    Account whole = heap_.account(0);
    uint64_t use = whole.hits[0] + whole.hits[1] + whole.hits[2] + whole.frees;
    if (use != last_use_) {
        last_use_ = use;
        used_at_ = now;
        shrunk_ = false;
    } else if (now - used_at_ >= policy_.shrink_after && !shrunk_ && !closed_) {
        shrunk_ = true;
        heap_.flush(-1);
        heap_.merge();
        start(source_->trim(no_limit, policy_.ready, now), nullptr, Means::Trim);
    }
}

void Scheduler::set_capturing(bool capturing) {
    ASYNCMEM_WRITTEN(set_capturing, capturing);
    std::lock_guard lock(lock_);
    capturing_ = capturing;
}

void Scheduler::defragment() {
    uint64_t free = heap_.free_bytes();
    if (!policy_.defragment || waiting_ || !free) return;
    double threshold = squeezed_ ? 0 : policy_.merge_threshold;
    if (1 - static_cast<double>(heap_.largest(-1)) / static_cast<double>(free) > threshold && heap_.merge())
        ++means_[static_cast<size_t>(Means::Merge)];
}

// Caches keep memory from being moved, and what one stream freed is all streams' only once it is joined. That is seen to
// here, by the clock, and not when pages are short: so blocks lie as if no page were ever taken back.
void Scheduler::begin_beat() {
    ASYNCMEM_WRITTEN(begin_beat);
    std::lock_guard lock(lock_);
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
    if (!policy_.paged) return never;
    uint64_t frees = heap_.account(0).frees;
    bool quiet = frees == beat_frees_ && !heap_.lags();
    quiet_beats_ = quiet ? quiet_beats_ + 1 : 0;
    beat_frees_ = frees;
    // What waited for different streams when it was looked at last, and waits for none now, is joined once.
    bool joins = quiet ? settled_frees_ != frees : (frees - merged_frees_) * merge_ratio >= heap_.counts().live_blocks;
    if (heap_.stream_count() > 1 && joins) {
        beat_gained_ = heap_.merge() || beat_gained_;
        merged_frees_ = frees;
        if (quiet) settled_frees_ = frees;
    }
    if (beat_gained_ && (waiting_ || !growing_.empty())) {
        ++version_;
        pump(now);
    }
    beating_ = quiet_beats_ < most_quiet;
    return !beating_ ? never : source_->tight() ? tight_pause : pause;
}

// -- the end -----------------------------------------------------------------------------------------------------------

void Scheduler::drain(double now) {
    ASYNCMEM_WRITTEN(drain, now);
    std::lock_guard lock(lock_);
    draining_ = true;
    pump(now);
}

void Scheduler::close(double now) {
    ASYNCMEM_WRITTEN(close, now);
    std::lock_guard lock(lock_);
    closed_ = true;
    now_ = now;
    requests_.each([&](Request& request) {
        if (request.queued()) fail(request, Reason::Closed);
    });
    pump(now);
}

}  // namespace asyncmem::scheduler
