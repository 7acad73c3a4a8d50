// A device's primary context and its fences: the calls of stream order, for any thread and without the interpreter.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "fence_calls.h"
#include "heap/lock.hpp"
#include "table.hpp"

namespace asyncmem::gpu {

class Context;
class Gathering;

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// A point in a stream: an event, recorded once. Each holder has one of its references.
struct Fence {
    Handle event;
    Context *home;
    std::atomic<int> references;
    std::atomic<bool> reached; // from then on the driver need not be asked
    Fence *next;               // while it lies unused
    bool gathered = false;     // no event but a thread (Gathering) tells that it is reached, or that it never will be
    std::atomic<Code> failure{success};
};

// Makes the context current on this thread, unless it is, and puts the former one back.
class Current {
  public:
    explicit Current(Context &context);
    ~Current();
    Current(const Current &) = delete;
    Code code() const { return code_; }

  private:
    const Table &driver_;
    bool pushed_ = false;
    Code code_ = success;
};

// Puts this thread into the relaxed capture mode and back. In any other one the driver refuses much of what we do, and
// asking for an event, while some thread captures a graph, and the refusal ends that capture.
class Relaxed {
  public:
    explicit Relaxed(const Table &driver);
    ~Relaxed();
    Relaxed(const Relaxed &) = delete;

  private:
    const Table &driver_;
    int mode_;
};

// Both, for calls that are not on the hot path.
class Entered {
  public:
    explicit Entered(Context &context);
    Code code() const { return current_.code(); }

  private:
    Current current_;
    Relaxed relaxed_;
};

// One for each device that is in use: retained when it is opened, released after its last use. Uses are the
// devices that are open, their segments and streams, and fences. The object itself stays for ever, a few hundred bytes, so
// that a late call is an error and no crash.
class Context {
  public:
    const Table &driver;
    AsyncmemFenceCalls calls;
    std::atomic<std::uint64_t> call_count{0};
    std::atomic<std::uint64_t> over_budget{0};

    // Begins a use of the device's context; retains it if this is the first (blocks). Each use is ended by `end_use`.
    static Code open(const Table &driver, int ordinal, Context **context);

    Handle handle() const { return handle_; }
    int device() const { return device_; }

    void use() { uses_.fetch_add(1, std::memory_order_relaxed); }
    // Ends a use; the last one destroys the events and releases the context.
    void end_use();

    Code record(std::uint64_t stream, Fence **fence);
    // As `AsyncmemFenceCalls` says of `record` and `order`.
    int record_outside(std::uint64_t stream, Fence **fence);
    int order(std::uint64_t earlier, std::uint64_t later, Fence **fence, Code *refused);
    // Behind everything; capture_unsupported while something may be captured.
    Code record_all(Fence **fence);
    Code query(Fence *fence); // not_ready until it is reached
    Code ask(Fence *fence);   // the same for those who ask again and again, which is not counted
    // Blocks where the fence is one that no stream can wait for.
    Code wait(std::uint64_t stream, Fence *fence);
    // not_ready where it was not reached in time, capture_unsupported where it cannot be told before captures end. A wait in
    // parts says each time when the first began (blocks).
    Code block(Fence *fence, Time began, Time until);
    // The same in microseconds from now, after so many that the wait has lasted.
    Code block_for(Fence *fence, std::int64_t waited, std::int64_t more);
    // 1, 0, or minus a code.
    int capturing(std::uint64_t stream);
    void share(Fence *fence) { fence->references.fetch_add(1, std::memory_order_relaxed); }
    void release(Fence *fence);

    Code create_stream(std::uint64_t *stream);
    void destroy_stream(std::uint64_t stream);
    // Streams that may be captured without a word; `record_all` asks them.
    void add_stream(std::uint64_t stream);
    void remove_stream(std::uint64_t stream);
    // From the one to the other any stream may be captured, also one that is not known here.
    void begin_captures() { captures_.fetch_add(1); }
    void end_captures() { captures_.fetch_sub(1); }
    bool may_capture() { return captures_.load() > 0 || any_capture(); }

    Code listen();
    void stop_listening();

    // Makes a call that names a stream; default streams mean those of the current context.
    template <typename Call> Code on_stream(std::uint64_t stream, Call call);

  private:
    Context(const Table &table, int ordinal);
    ~Context();
    bool closed() const { return gone() || !alive_.load(std::memory_order_relaxed); }
    Code retain();
    Code make(std::uint64_t stream, Fence **fence);  // a fence behind the stream
    Code follow(std::uint64_t stream, Fence *fence); // the stream behind a fence
    int refusal_of(std::uint64_t stream);            // 0, ASYNCMEM_CAPTURED, or minus a code
    Code issue(Fence *made, Code code, Fence **fence);
    Code take(Fence **fence); // unused so far; no other code knows it
    void put(Fence *fence);
    Code gather(Fence *made);
    bool any_capture();
    void close();

    friend class Current;

    int ordinal_;
    int device_ = 0;
    Handle handle_ = nullptr;
    unsigned long long id_ = 0;
    int retained_ = 1;
    std::atomic<bool> alive_{false};
    std::atomic<std::int64_t> uses_{0};

    Lock spare_lock_;
    Fence *spare_ = nullptr;

    std::mutex streams_lock_;
    std::vector<std::uint64_t> streams_;
    std::atomic<int> captures_{0};
    std::unique_ptr<Gathering> gathering_;

    std::mutex listening_lock_;
    int listeners_ = 0;
    Handle listening_ = nullptr;
};

} // namespace asyncmem::gpu
