// A device's primary context: retained while it is in use; its streams, and which of them may be captured.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "fence_calls.h"
#include "table.hpp"

namespace asyncmem::gpu {

// Makes a context current on this thread, unless it is, and puts the former one back.
class Current {
  public:
    Current(const Table &driver, Handle context) : driver_(driver) {
        if (gone()) {
            code_ = deinitialized;
            return;
        }
        Handle current = nullptr;
        code_ = driver_.cuCtxGetCurrent(&current);
        if (code_ == success && current != context) {
            code_ = driver_.cuCtxPushCurrent(context);
            pushed_ = code_ == success;
        }
    }
    ~Current() {
        Handle popped = nullptr;
        if (pushed_)
            driver_.cuCtxPopCurrent(&popped);
    }
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
    explicit Relaxed(const Table &driver) : driver_(driver), mode_(relaxed) {
        if (gone() || driver_.cuThreadExchangeStreamCaptureMode(&mode_) != success)
            mode_ = relaxed;
    }
    ~Relaxed() {
        if (mode_ != relaxed)
            driver_.cuThreadExchangeStreamCaptureMode(&mode_);
    }
    Relaxed(const Relaxed &) = delete;

  private:
    const Table &driver_;
    int mode_;
};

// A context that is retained when its device is opened, and released after its last use. Uses are the devices that are
// open, their segments and streams, and fences. The object itself stays for ever, a few hundred bytes, so that a late
// call is an error and no crash.
class Primary {
  public:
    const Table &driver;
    std::atomic<std::uint64_t> call_count{0};
    std::atomic<std::uint64_t> over_budget{0};

    Handle handle() const { return handle_; }
    int device() const { return device_; }

    void use() { uses_.fetch_add(1, std::memory_order_relaxed); }

    // Ends a use; the last one destroys the events and releases the context.
    void end_use() {
        if (gone() || uses_.fetch_sub(1, std::memory_order_acq_rel) != 1)
            return;
        std::lock_guard<std::mutex> guard(open_lock());
        // It may have been opened again before the lock was ours.
        if (uses_.load(std::memory_order_acquire) == 0 && alive_.load())
            close();
    }

    Code create_stream(std::uint64_t *stream);

    // The driver lets queued work end first, and fences of everything cover it.
    void destroy_stream(std::uint64_t stream);

    // Streams that may be captured without a word; `may_capture` asks them.
    void add_stream(std::uint64_t stream) {
        if (gone())
            return;
        std::lock_guard<std::mutex> guard(streams_lock_);
        streams_.push_back(stream);
    }

    void remove_stream(std::uint64_t stream) {
        if (gone())
            return;
        std::lock_guard<std::mutex> guard(streams_lock_);
        auto found = std::find(streams_.begin(), streams_.end(), stream);
        if (found != streams_.end())
            streams_.erase(found);
    }

    // From the one to the other any stream may be captured, also one that is not known here. Waits for fences behind all
    // streams that are being recorded, for some microseconds.
    void begin_captures() {
        captures_.fetch_add(1);
        while (recording_.load() > 0)
            std::this_thread::yield();
    }
    void end_captures() { captures_.fetch_sub(1); }

    bool may_capture() {
        if (captures_.load() > 0)
            return true;
        std::lock_guard<std::mutex> guard(streams_lock_);
        return std::any_of(streams_.begin(), streams_.end(),
                           [this](std::uint64_t stream) { return refusal_of(stream) == ASYNCMEM_CAPTURED; });
    }

    // 1, 0, or minus a code.
    int capturing(std::uint64_t stream) {
        if (closed())
            return -deinitialized;
        call_count.fetch_add(1, std::memory_order_relaxed);
        int refusal = refusal_of(stream);
        return refusal == ASYNCMEM_CAPTURED ? 1 : refusal;
    }

    // Begins to count notices of being over budget.
    Code listen() {
        if (gone() || driver.cuDeviceRegisterAsyncNotification == nullptr)
            return not_found;
        std::lock_guard<std::mutex> guard(listening_lock_);
        auto note = [](void *, void *data, Handle) {
            static_cast<Primary *>(data)->over_budget.fetch_add(1, std::memory_order_relaxed);
        };
        Code code = success;
        if (listening_ == nullptr)
            code = driver.cuDeviceRegisterAsyncNotification(device_, note, this, &listening_);
        listeners_ += code == success;
        return code;
    }

    void stop_listening() {
        if (gone())
            return;
        std::lock_guard<std::mutex> guard(listening_lock_);
        if (--listeners_ == 0) {
            driver.cuDeviceUnregisterAsyncNotification(device_, listening_);
            listening_ = nullptr;
        }
    }

    // Makes a call that names a stream; default streams mean those of the current context.
    template <typename Call> Code on_stream(std::uint64_t stream, Call call) {
        if (stream > per_thread) {
            Code code = call();
            if (code != invalid_context)
                return code;
            // A thread without any context: a stream knows its own, but not every driver asks it.
        }
        Current current(driver, handle_);
        return current.code() == success ? call() : current.code();
    }

  protected:
    Primary(const Table &table, int ordinal) : driver(table), ordinal_(ordinal) {}
    virtual ~Primary() = default;
    virtual void destroy_events() = 0;

    // Never destroyed: threads may come here while the process ends.
    static std::mutex &open_lock() {
        static auto *lock = new std::mutex;
        return *lock;
    }

    bool closed() const { return gone() || !alive_.load(std::memory_order_relaxed); }

    Code retain() {
        Code code = driver.cuDeviceGet(&device_, ordinal_);
        if (code == success)
            code = driver.cuDevicePrimaryCtxRetain(&handle_, device_);
        if (code != success)
            return code;
        code = driver.cuCtxGetId(handle_, &id_);
        if (code != success)
            driver.cuDevicePrimaryCtxRelease(device_);
        return code;
    }

    // 0, ASYNCMEM_CAPTURED, or minus a code.
    int refusal_of(std::uint64_t stream) {
        int status = 0;
        Code code = on_stream(stream, [&] { return driver.cuStreamIsCapturing(as_handle(stream), &status); });
        if (code != success)
            return -code;
        return status == 0 ? 0 : ASYNCMEM_CAPTURED;
    }

    int ordinal_;
    int device_ = 0;
    Handle handle_ = nullptr;
    Number id_ = 0;
    int retained_ = 1;
    std::atomic<bool> alive_{false};
    std::atomic<int> captures_{0};
    std::atomic<int> recording_{0}; // calls that would end a capture

  private:
    void close() {
        alive_.store(false);
        destroy_events();
        for (; retained_ > 0; --retained_)
            driver.cuDevicePrimaryCtxRelease(device_);
    }

    std::atomic<std::int64_t> uses_{0};

    std::mutex streams_lock_;
    std::vector<std::uint64_t> streams_;

    std::mutex listening_lock_;
    int listeners_ = 0;
    Handle listening_ = nullptr;
};

// Makes a context current undisturbed by captures, for calls that are not on the hot path.
class Entered {
  public:
    explicit Entered(Primary &context) : current_(context.driver, context.handle()), relaxed_(context.driver) {}
    Code code() const { return current_.code(); }

  private:
    Current current_;
    Relaxed relaxed_;
};

inline Code Primary::create_stream(std::uint64_t *stream) {
    if (closed())
        return deinitialized;
    call_count.fetch_add(1, std::memory_order_relaxed);
    Entered entered(*this);
    Handle made = nullptr;
    Code code = entered.code();
    if (code == success)
        code = driver.cuStreamCreate(&made, 1); // non-blocking
    if (code != success)
        return code;
    *stream = reinterpret_cast<std::uint64_t>(made);
    use();
    add_stream(*stream);
    return success;
}

inline void Primary::destroy_stream(std::uint64_t stream) {
    if (gone())
        return;
    call_count.fetch_add(1, std::memory_order_relaxed);
    {
        Entered entered(*this);
        remove_stream(stream);
        driver.cuStreamDestroy(as_handle(stream));
    }
    end_use();
}

} // namespace asyncmem::gpu
