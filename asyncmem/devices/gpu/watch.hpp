// Learning that fences are reached, and telling the reader of an eventfd. No part of it takes the interpreter's lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "context.hpp"

namespace asyncmem::gpu {

// What became of a fence: 0, or the code with which the device was lost.
struct Notice {
    std::uint64_t token;
    Code code;
};

// Where notices go: any thread puts them in, one reader waits for the descriptor and takes them all. One write wakes the
// reader for however many notices come before it reads.
class Sink {
  public:
    Sink();
    ~Sink();
    Sink(const Sink &) = delete;
    int descriptor() const { return descriptor_; }
    void put(Notice notice);
    std::vector<Notice> take();
    // Wakes the reader although there is nothing to take.
    void wake();

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
    // Takes over a reference of the fence. Throws std::system_error where no thread is to be had.
    void watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token);
    // Forgets one that has not been told; where it is being told at this moment, the sink gets it all the same.
    void forget(const Sink *sink, std::uint64_t token);
    // Lets the thread end once all that is watched has been told; with `wait` it has ended when this returns (blocks).
    void stop(bool wait);

  private:
    using Pause = std::chrono::microseconds;
    void run();
    bool gather(std::vector<Watched> &watched, Pause pause);
    bool sweep(std::vector<Watched> &watched);

    Context &context_;
    // When a fence last came or was told of; the thread's alone.
    std::chrono::steady_clock::time_point stirred_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::condition_variable ended_;
    std::vector<Watched> coming_;
    std::vector<std::pair<const Sink *, std::uint64_t>> forgotten_;
    bool running_ = false;
    bool pausing_ = false;
    bool stopping_ = false;
};

std::shared_ptr<Watcher> make_watcher(Context &context);

} // namespace asyncmem::gpu
