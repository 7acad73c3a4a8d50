#include "watch.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <thread>
#include <utility>

namespace asyncmem::cuda {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

// Chosen for awaits of a few to a few hundred microseconds; a longer one ends late by a small part of itself.
constexpr microseconds spin_time{50};
constexpr microseconds first_pause{20};
constexpr microseconds last_pause{200};
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

Code Poller::watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token) {
    std::lock_guard<std::mutex> guard(lock_);
    coming_.push_back({fence, std::move(sink), token});
    if (!running_) {
        running_ = true;
        stopping_ = false;
        std::thread([self = shared_from_this()] { self->run(); }).detach();
    } else if (pausing_) {
        changed_.notify_one();
    }
    return success;
}

void Poller::forget(const Sink *sink, std::uint64_t token) {
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

void Poller::stop(bool wait) {
    std::unique_lock<std::mutex> guard(lock_);
    stopping_ = true;
    changed_.notify_one();
    if (wait)
        ended_.wait(guard, [this] { return !running_; });
}

void Poller::run() {
    pthread_setname_np(pthread_self(), "asyncmem-fences");
    // By default the system may let a sleep last 50 us longer.
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    // For all of this thread's calls, so that they disturb no graph capture.
    int mode = relaxed;
    context_.driver.cuThreadExchangeStreamCaptureMode(&mode);
    std::vector<Watched> watched;
    auto last = steady_clock::now();
    Pause pause{0};
    while (gather(watched, watched.empty() ? for_ever : pause)) {
        if (gone())
            return;
        auto now = steady_clock::now();
        if (sweep(watched)) {
            last = now;
            pause = Pause(0);
        } else if (now - last > spin_time) {
            pause = std::clamp(pause * 3 / 2, first_pause, last_pause);
        }
    }
}

// Pauses, and takes what was asked for meanwhile into the list; false when the thread is to end.
bool Poller::gather(std::vector<Watched> &watched, Pause pause) {
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
    std::move(coming_.begin(), coming_.end(), std::back_inserter(watched));
    coming_.clear();
    running_ = !stopping_ || !watched.empty();
    if (!running_)
        ended_.notify_all();
    return running_;
}

// Asks for each fence and tells of those that are reached, or never will be; true when there was one.
bool Poller::sweep(std::vector<Watched> &watched) {
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

std::shared_ptr<Watcher> make_poller(Context &context) { return std::make_shared<Poller>(context); }

} // namespace asyncmem::cuda
