// Learning that fences are reached, and telling the reader of an eventfd. No part of it takes the interpreter's lock.
#pragma once

#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "context.hpp"

namespace asyncmem::gpu {

// Of a fence, by its token: 0, or the code with which the device was lost.
using Notice = std::pair<std::uint64_t, Code>;

// Where notices go: any thread puts them in, one reader waits for the descriptor and takes them all. One write wakes the
// reader for however many notices come before it reads.
class Sink {
  public:
    Sink() : descriptor_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
    ~Sink() {
        if (descriptor_ >= 0)
            close(descriptor_);
    }
    Sink(const Sink &) = delete;
    int descriptor() const { return descriptor_; }

    void put(Notice notice) {
        bool first;
        {
            std::lock_guard<std::mutex> guard(lock_);
            first = notices_.empty();
            notices_.push_back(notice);
        }
        if (first)
            wake();
    }

    // Wakes the reader although there is nothing to take.
    void wake() {
        std::uint64_t one = 1;
        // It fails only where the counter is full, and then the reader is awake.
        [[maybe_unused]] auto written = write(descriptor_, &one, sizeof one);
    }

    std::vector<Notice> take() {
        std::uint64_t count;
        // Before the notices: what is put in between writes again, or was put in time to be taken.
        [[maybe_unused]] auto got = read(descriptor_, &count, sizeof count);
        std::lock_guard<std::mutex> guard(lock_);
        return std::exchange(notices_, {});
    }

  private:
    int descriptor_;
    std::mutex lock_;
    std::vector<Notice> notices_;
};

struct Watched {
    Fence *fence;
    std::shared_ptr<Sink> sink;
    std::uint64_t token;
};

// Tells sinks of fences, each once. It asks for every one in turn, on a thread of its own: without a pause after
// something happened, then with growing pauses; without any fence it sleeps. A host function behind each fence
// (cuLaunchHostFunc) would need no asking, but tells later than this does, and of a lost device never.
class Watcher final : public std::enable_shared_from_this<Watcher> {
  public:
    explicit Watcher(Context &context) : context_(context) {}

    // Takes over a reference of the fence. Throws std::system_error if no thread can be started.
    void watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token) {
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

    // Forgets one that has not been notified; a notice that is on its way comes all the same.
    void forget(const Sink *sink, std::uint64_t token) {
        std::lock_guard<std::mutex> guard(lock_);
        if (!drop(coming_, sink, token))
            forgotten_.emplace_back(sink, token);
    }

    // Lets the thread end once all that is watched has been notified; with `wait` it has ended when this returns (blocks).
    void stop(bool wait) {
        std::unique_lock<std::mutex> guard(lock_);
        stopping_ = true;
        changed_.notify_one();
        if (wait)
            ended_.wait(guard, [this] { return !running_; });
    }

  private:
    using Pause = std::chrono::microseconds;
    // From a fence to its wake-up on an H200, us p50/p99 and share of a CPU: pauses of 20: 38/80, 29 %; of 50: 55/113,
    // 18 %; of 100: 76/171, 12 %. Spinning for 50 before gains nothing. A host function behind the fence takes 136/278.
    static constexpr Pause spin_time{20};
    static constexpr Pause first_pause{20};
    static constexpr Pause last_pause{100};
    // In between, an await ends late by this part of itself.
    static constexpr int pause_share = 16;
    static constexpr Pause for_ever{-1};

    void run() {
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
                stirred_ = Clock::now();
            auto quiet = std::chrono::duration_cast<Pause>(Clock::now() - stirred_);
            pause = quiet < spin_time ? Pause(0) : std::clamp(quiet / pause_share, first_pause, last_pause);
        }
    }

    bool drop(std::vector<Watched> &list, const Sink *sink, std::uint64_t token) {
        auto same = [&](const Watched &one) { return one.sink.get() == sink && one.token == token; };
        auto found = std::find_if(list.begin(), list.end(), same);
        if (found == list.end())
            return false;
        context_.release(found->fence);
        list.erase(found);
        return true;
    }

    // Pauses, and takes what was asked for meanwhile into the list; false when the thread is to end.
    bool gather(std::vector<Watched> &watched, Pause pause) {
        std::unique_lock<std::mutex> guard(lock_);
        auto called = [&] { return !coming_.empty() || (stopping_ && watched.empty()); };
        pausing_ = true;
        if (pause == for_ever)
            changed_.wait(guard, called);
        else if (pause.count() > 0)
            changed_.wait_for(guard, pause, called);
        pausing_ = false;
        for (const auto &[sink, token] : forgotten_)
            drop(watched, sink, token);
        forgotten_.clear();
        if (!coming_.empty())
            stirred_ = Clock::now();
        std::move(coming_.begin(), coming_.end(), std::back_inserter(watched));
        coming_.clear();
        running_ = !stopping_ || !watched.empty();
        if (!running_)
            ended_.notify_all();
        return running_;
    }

    // Asks for each fence and tells of those that are reached, or never will be; true when there was one.
    bool sweep(std::vector<Watched> &watched) {
        auto notified = [this](Watched &one) {
            Code code = context_.ask(one.fence);
            if (code == not_ready)
                return false;
            one.sink->put({one.token, code});
            context_.release(one.fence);
            return true;
        };
        auto kept = std::remove_if(watched.begin(), watched.end(), notified);
        bool any = kept != watched.end();
        watched.erase(kept, watched.end());
        return any;
    }

    Context &context_;
    // When a fence last came or was notified; the thread's alone.
    Time stirred_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::condition_variable ended_;
    std::vector<Watched> coming_;
    std::vector<std::pair<const Sink *, std::uint64_t>> forgotten_;
    bool running_ = false;
    bool pausing_ = false;
    bool stopping_ = false;
};

inline std::shared_ptr<Watcher> make_watcher(Context &context) { return std::make_shared<Watcher>(context); }

} // namespace asyncmem::gpu
