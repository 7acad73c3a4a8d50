#include <algorithm>
#include <chrono>
#include <thread>

#include "machine.hpp"

constexpr std::int64_t NEVER = INT64_MAX, LOOK_AGAIN = 100'000;

namespace {

void finish(Work& work, std::int64_t now) {
    work.done = true;
    work.done_at = now;
    work.behind.clear();  // else a long stream would be one long chain
    work.effect = nullptr;
    work.until = nullptr;
}

void stand_behind(Work& work, Clock& clock, const Stream& other) {
    join(clock, other.clock);
    if (other.last && !other.last->done) work.behind.push_back(other.last);
}

}  // namespace

StreamPtr Machine::new_stream(Context& context, unsigned flags, int priority) {
    auto made = std::make_shared<Stream>();
    made->id = ++last_id;
    made->context = &context;
    made->flags = flags;
    made->priority = priority;
    checker.name(made->id, "stream " + std::to_string(made->id) + " of device " + std::to_string(context.device));
    context.streams.push_back(made);
    return made;
}

StreamPtr Machine::stream(Handle handle) {
    if (handle > PER_THREAD_STREAM) {
        // A driver follows such a handle into nowhere, and its process ends there.
        if (streams.was(handle))
            checker.violations.push_back(std::string(my_call) + " names a stream that was destroyed");
        auto found = streams.at(handle);
        require(!devices[found->context->device].lost, devices[found->context->device].lost);
        return found;
    }
    Context& context = current();
    if (handle != PER_THREAD_STREAM) return context.legacy;
    auto& mine = context.per_thread[my_thread()];
    if (!mine) {
        mine = new_stream(context, 0, 0);
        mine->handle = PER_THREAD_STREAM;
    }
    return mine;
}

WorkPtr Machine::submit(Stream& stream, Work plan, const char* call, const std::vector<Span>& reads,
                        const std::vector<Span>& writes) {
    Context& context = *stream.context;
    auto work = std::make_shared<Work>(std::move(plan));
    join(stream.clock, checker.host);
    for (auto& mark : work->behind) join(stream.clock, mark->clock);
    if (stream.legacy) {
        for (auto& other : context.streams)
            if (other.get() != &stream && other->blocking()) stand_behind(*work, stream.clock, *other);
    } else if (stream.blocking()) {
        stand_behind(*work, stream.clock, *context.legacy);
    }
    const Use doer{stream.id, ++stream.clock[stream.id]};
    bool all_there = true;
    for (const Span& span : reads)
        all_there &= checker.touch(span.address, span.nbytes, false, stream.clock, doer, call);
    for (const Span& span : writes)
        all_there &= checker.touch(span.address, span.nbytes, true, stream.clock, doer, call);
    for (auto* spans : {&reads, &writes})
        for (const Span& span : *spans)
            if (moved(span.address, span.nbytes))
                checker.violations.push_back(std::string(call) + " uses an address whose memory has moved");
    work->clock = stream.clock;
    if (work->effect) work->lasts = std::max(work->lasts, pace);
    stream.queue.push_back(work);
    stream.last = work;
    if (work->lasts && !timekeeper_runs_) {
        timekeeper_runs_ = true;
        std::thread([this] { timekeeper(); }).detach();
    }
    if (!all_there) lose(context.device, ILLEGAL_ADDRESS);
    progress();
    if (!work->done) due_.notify_all();
    return work;
}

void Machine::follow(Stream& stream, const WorkPtr& mark) {
    Work work;
    work.behind.push_back(mark);
    submit(stream, std::move(work));
}

WorkPtr Machine::gather(Context& context) {
    Work work;
    for (auto& stream : context.streams)
        if (stream != context.gathering) stand_behind(work, context.gathering->clock, *stream);
    return submit(*context.gathering, std::move(work));
}

bool Machine::advance(Stream& stream, std::int64_t now) {
    bool moved = false;
    while (!stream.queue.empty() && !stream.held && !devices[stream.context->device].lost) {
        auto work = stream.queue.front();
        if (!work->done) {
            const auto& behind = work->behind;
            if (!std::all_of(behind.begin(), behind.end(), [](auto& other) { return other->done; })) break;
            if (work->ends < 0) work->ends = work->lasts ? now + work->lasts : now;
            if ((now < work->ends && !(work->until && work->until())) || work->running) break;
            if (work->function) {
                work->running = true;
                functions_.push_back(work);
                if (!functions_run_) {
                    functions_run_ = true;
                    std::thread([this] { host_functions(); }).detach();
                }
                functions_waiting_.notify_all();
                break;
            }
            if (work->effect) work->effect();
            finish(*work, now);
        }
        if (stream.queue.empty()) break;
        stream.queue.pop_front();
        moved = true;
    }
    return moved;
}

void Machine::progress() {
    const auto now = now_ns();
    bool moved = false, again = true;
    while (again) {
        again = false;
        for (auto& [handle, context] : contexts.live) {
            for (auto& stream : context->streams) again |= advance(*stream, now);
            std::erase_if(context->streams, [&](auto& stream) {
                if (!stream->destroyed || !stream->queue.empty()) return false;
                join(context->gathering->clock, stream->clock);  // what stands behind the whole context stays behind it
                return true;
            });
        }
        moved |= again;
    }
    if (moved) changed_.notify_all();
}

std::int64_t Machine::next_end() {
    std::int64_t soonest = NEVER;
    for (auto& [handle, context] : contexts.live)
        for (auto& stream : context->streams)
            if (!stream->queue.empty() && !stream->queue.front()->done && stream->queue.front()->ends >= 0)
                if (!stream->queue.front()->running) {
                    const Work& work = *stream->queue.front();
                    soonest = std::min(soonest, work.until ? std::min(work.ends, now_ns() + LOOK_AGAIN) : work.ends);
                }
    return soonest;
}

void Machine::timekeeper() {
    Lock lock(mutex);
    for (;;) {
        progress();
        const auto next = next_end();
        if (next == NEVER) due_.wait(lock);
        else due_.wait_for(lock, std::chrono::nanoseconds(std::max<std::int64_t>(next - now_ns(), 1000)));
    }
}

void Machine::host_functions() {
    Lock lock(mutex);
    for (;;) {
        while (functions_.empty()) functions_waiting_.wait(lock);
        auto work = functions_.front();
        functions_.pop_front();
        lock.unlock();
        work->function(work->argument);
        lock.lock();
        join(checker.host, work->clock);
        finish(*work, now_ns());
        progress();
        changed_.notify_all();
    }
}

void Machine::wait(const WorkPtr& work, Context& context) {
    if (!work) return;
    const auto since = epoch;
    const auto ordinal = context.device;
    progress();
    while (!work->done) {
        require(!devices[ordinal].lost, devices[ordinal].lost);
        changed_.wait(*my_lock);
        require(epoch == since, CONTEXT_IS_DESTROYED);
    }
    seen(work);
    release_unused();
}

void Machine::seen(const WorkPtr& work) {
    if (work) join(checker.host, work->clock);
}

void Machine::lose(CUdevice ordinal, CUresult code) {
    if (!devices[ordinal].lost) devices[ordinal].lost = code;
    changed_.notify_all();
}
