#include "watch.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

namespace asyncmem::gpu {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

// From a fence to its wake-up on an H200, us p50/p99 and share of a CPU: pauses of 20: 38/80, 29 %; of 50: 55/113, 18 %;
// of 100: 76/171, 12 %. Spinning for 50 before gains nothing. A host function behind the fence takes 136/278.
constexpr microseconds spin_time{20};
constexpr microseconds first_pause{20};
constexpr microseconds last_pause{100};
// In between, an await ends late by this part of itself.
constexpr int pause_share = 16;
constexpr microseconds for_ever{-1};

} // namespace

Sink::Sink() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

Sink::~Sink() {
    if (descriptor_ >= 0)
        close(descriptor_);
}

void Sink::put(Notice notice) {
    bool first;
    {
        std::lock_guard<std::mutex> guard(lock_);
        first = notices_.empty();
        notices_.push_back(notice);
    }
    if (first)
        wake();
}

void Sink::wake() {
    std::uint64_t one = 1;
    // It fails only where the counter is full, and then the reader is awake.
    [[maybe_unused]] auto written = write(descriptor_, &one, sizeof one);
}

std::vector<Notice> Sink::take() {
    std::uint64_t count;
    // Before the notices: what is put in between writes again, or was put in time to be taken.
    [[maybe_unused]] auto got = read(descriptor_, &count, sizeof count);
    std::lock_guard<std::mutex> guard(lock_);
    return std::exchange(notices_, {});
}

void Watcher::watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token) {
    std::lock_guard<std::mutex> guard(lock_);
    if (!running_) {
        std::thread([self = shared_from_this()] { self->run(); }).detach(); // it waits for the lock first
        running_ = true;
        stopping_ = false;
    } else if (pausing_) {
        changed_.notify_one();
    }
    coming_.push_back({fence, std::move(sink), token});
}

void Watcher::forget(const Sink *sink, std::uint64_t token) {
    std::lock_guard<std::mutex> guard(lock_);
    auto same = [&](const Watched &one) { return one.sink.get() == sink && one.token == token; };
    auto found = std::find_if(coming_.begin(), coming_.end(), same);
    if (found == coming_.end()) {
        forgotten_.emplace_back(sink, token);
        return;
    }
    context_.release(found->fence);
    coming_.erase(found);
}

void Watcher::stop(bool wait) {
    std::unique_lock<std::mutex> guard(lock_);
    stopping_ = true;
    changed_.notify_one();
    if (wait)
        ended_.wait(guard, [this] { return !running_; });
}

void Watcher::run() {
    pthread_setname_np(pthread_self(), "asyncmem-fences");
    // By default the system may let a sleep last 50 us longer.
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    // For all of this thread's calls, so that they disturb no graph capture.
    int mode = relaxed;
    context_.driver.cuThreadExchangeStreamCaptureMode(&mode);
    std::vector<Watched> watched;
    Pause pause{0};
    while (gather(watched, watched.empty() ? for_ever : pause)) {
        if (gone())
            return;
        if (sweep(watched))
            stirred_ = steady_clock::now();
        auto quiet = std::chrono::duration_cast<Pause>(steady_clock::now() - stirred_);
        pause = quiet < spin_time ? Pause(0) : std::clamp(quiet / pause_share, first_pause, last_pause);
    }
}

// Pauses, and takes what was asked for meanwhile into the list; false when the thread is to end.
bool Watcher::gather(std::vector<Watched> &watched, Pause pause) {
    std::unique_lock<std::mutex> guard(lock_);
    auto called = [&] { return !coming_.empty() || (stopping_ && watched.empty()); };
    pausing_ = true;
    if (pause == for_ever)
        changed_.wait(guard, called);
    else if (pause.count() > 0)
        changed_.wait_for(guard, pause, called);
    pausing_ = false;
    for (const auto &[sink, token] : forgotten_) {
        auto same = [&, sink = sink, token = token](const Watched &one) {
            return one.sink.get() == sink && one.token == token;
        };
        auto found = std::find_if(watched.begin(), watched.end(), same);
        if (found != watched.end()) {
            context_.release(found->fence);
            watched.erase(found);
        }
    }
    forgotten_.clear();
    if (!coming_.empty())
        stirred_ = steady_clock::now();
    std::move(coming_.begin(), coming_.end(), std::back_inserter(watched));
    coming_.clear();
    running_ = !stopping_ || !watched.empty();
    if (!running_)
        ended_.notify_all();
    return running_;
}

// Asks for each fence and tells of those that are reached, or never will be; true when there was one.
bool Watcher::sweep(std::vector<Watched> &watched) {
    auto told = [this](Watched &one) {
        Code code = context_.ask(one.fence);
        if (code == not_ready)
            return false;
        one.sink->put({one.token, code});
        context_.release(one.fence);
        return true;
    };
    auto kept = std::remove_if(watched.begin(), watched.end(), told);
    bool any = kept != watched.end();
    watched.erase(kept, watched.end());
    return any;
}

std::shared_ptr<Watcher> make_watcher(Context &context) { return std::make_shared<Watcher>(context); }

} // namespace asyncmem::gpu
