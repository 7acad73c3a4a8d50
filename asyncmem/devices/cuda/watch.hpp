// Learning that fences are reached, and telling whoever reads an eventfd. No part of it takes the interpreter's lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "context.hpp"

namespace asyncmem::cuda {

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

// Tells sinks of fences, each once. `watch` takes over a reference of the fence.
class Watcher {
  public:
    virtual ~Watcher() = default;
    virtual Code watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token) = 0;
    // Forgets one that has not been told; where it is being told at this moment, the sink gets it all the same.
    virtual void forget(const Sink *sink, std::uint64_t token) = 0;
    // Lets the thread end once all that is watched has been told; with `wait` it has ended when this returns (blocks).
    virtual void stop(bool wait) = 0;
};

struct Watched {
    Fence *fence;
    std::shared_ptr<Sink> sink;
    std::uint64_t token;
};

// Asks for every fence in turn, on a thread of its own: without a pause after something happened, then with growing
// pauses; without any fence it sleeps.
class Poller final : public Watcher, public std::enable_shared_from_this<Poller> {
  public:
    explicit Poller(Context &context) : context_(context) {}
    Code watch(Fence *fence, std::shared_ptr<Sink> sink, std::uint64_t token) override;
    void forget(const Sink *sink, std::uint64_t token) override;
    void stop(bool wait) override;

  private:
    using Pause = std::chrono::microseconds;
    void run();
    bool gather(std::vector<Watched> &watched, Pause pause);
    bool sweep(std::vector<Watched> &watched);

    Context &context_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::condition_variable ended_;
    std::vector<Watched> coming_;
    std::vector<std::pair<const Sink *, std::uint64_t>> forgotten_;
    bool running_ = false;
    bool pausing_ = false;
    bool stopping_ = false;
};

std::shared_ptr<Watcher> make_poller(Context &context);
std::shared_ptr<Watcher> make_signaller(Context &context);

} // namespace asyncmem::cuda
