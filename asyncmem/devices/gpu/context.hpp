// The fences of a device's primary context: the calls of stream order, for any thread and without the interpreter.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "heap/lock.hpp"
#include "primary.hpp"

namespace asyncmem::gpu {

class Context;

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// A point in a stream: an event, recorded once. Each holder has one of its references.
struct Fence {
    Handle event;
    Context *home;
    std::atomic<int> references;
    std::atomic<bool> reached; // from then on the driver need not be asked
    Fence *next;               // while it lies unused
    bool gathered = false;     // no event but a thread (`gather`) tells that it is reached, or that it never will be
    std::atomic<Code> failure{success};
};

// There is one for each device that is in use.
class Context final : public Primary {
  public:
    AsyncmemFenceCalls calls;

    // Begins a use of the device's context; retains it if this is the first (blocks). Each use is ended by `end_use`.
    static Code open(const Table &driver, int ordinal, Context **context) {
        using Key = std::pair<const Table *, int>; // a driver and the number of its device
        static auto *contexts = new std::map<Key, Context *>;
        std::lock_guard<std::mutex> guard(open_lock());
        Context *&known = (*contexts)[{&driver, ordinal}];
        auto *fresh = new Context(driver, ordinal);
        Code code = fresh->retain();
        if (code != success) {
            delete fresh;
            return code;
        }
        if (known != nullptr && known->alive_.load() && known->id_ == fresh->id_) {
            // To learn whether it is the same, it was retained once more.
            known->retained_ += driver.cuDevicePrimaryCtxRelease(fresh->device_) != success;
            delete fresh;
        } else {
            // The former one was released, or the device was reset and everything there is gone.
            if (known != nullptr)
                known->alive_.store(false);
            known = fresh;
            known->alive_.store(true);
        }
        known->use();
        *context = known;
        return success;
    }

    Code record(std::uint64_t stream, Fence **fence) {
        if (closed())
            return deinitialized;
        call_count.fetch_add(1, std::memory_order_relaxed);
        return make(stream, fence);
    }

    // As `AsyncmemFenceCalls` says of `record` and `order`.
    int record_outside(std::uint64_t stream, Fence **fence) {
        if (closed())
            return deinitialized;
        int refusal = refusal_of(stream);
        call_count.fetch_add(refusal == 0 ? 2 : 1, std::memory_order_relaxed);
        return refusal == 0 ? make(stream, fence) : refusal;
    }

    int order(std::uint64_t earlier, std::uint64_t later, Fence **fence, Code *refused) {
        if (closed())
            return deinitialized;
        int calls = 1, answer = refusal_of(earlier);
        if (answer == 0) {
            ++calls;
            answer = refusal_of(later);
        }
        if (answer == 0) {
            ++calls;
            answer = make(earlier, fence);
        }
        if (answer == 0) {
            ++calls;
            *refused = follow(later, *fence);
        }
        call_count.fetch_add(calls, std::memory_order_relaxed);
        return answer;
    }

    // Behind everything; capture_unsupported while something may be captured.
    Code record_all(Fence **fence) {
        if (closed())
            return deinitialized;
        call_count.fetch_add(1, std::memory_order_relaxed);
        // The driver would refuse as well, and end the capture with it. A capture that was not announced it ends.
        if (may_capture())
            return capture_unsupported;
        Fence *made = nullptr;
        Code code = take(&made);
        if (code != success)
            return code;
        if (driver.cuCtxRecordEvent != nullptr) {
            Entered entered(*this);
            recording_.fetch_add(1);
            // Asked once more, because one may have begun since; from here on `begin_captures` waits.
            code = captures_.load() > 0          ? capture_unsupported
                   : entered.code() == success ? driver.cuCtxRecordEvent(handle_, made->event)
                                                 : entered.code();
            recording_.fetch_sub(1);
            return issue(made, code, fence);
        }
        issue(made, success, fence);
        code = gather(made);
        if (code != success)
            release(made);
        return code;
    }

    // not_ready until it is reached.
    Code query(Fence *fence) {
        if (!fence->reached.load(std::memory_order_acquire))
            call_count.fetch_add(1, std::memory_order_relaxed);
        return ask(fence);
    }

    // The same for those who ask again and again, which is not counted.
    Code ask(Fence *fence) {
        if (fence->reached.load(std::memory_order_acquire))
            return success;
        if (closed())
            return deinitialized;
        if (fence->gathered) {
            Code failure = fence->failure.load(std::memory_order_acquire);
            return failure == success ? not_ready : failure;
        }
        Code code;
        {
            Relaxed quiet(driver);
            code = driver.cuEventQuery(fence->event);
        }
        if (code == invalid_context) {
            Entered entered(*this);
            code = entered.code() == success ? driver.cuEventQuery(fence->event) : entered.code();
        }
        if (code == success)
            fence->reached.store(true, std::memory_order_release);
        return code;
    }

    // Blocks where the fence is one that no stream can wait for.
    Code wait(std::uint64_t stream, Fence *fence) {
        if (closed())
            return deinitialized;
        if (fence->reached.load(std::memory_order_acquire))
            return success;
        if (fence->gathered)
            return block(fence, Clock::now(), Time::max());
        call_count.fetch_add(1, std::memory_order_relaxed);
        return follow(stream, fence);
    }

    // not_ready where it was not reached in time, capture_unsupported where that is not known before captures end. A wait
    // in parts says each time when the first began (blocks).
    //
    // It asks again and again: the driver's own wait cannot be given up, and does not always notice a lost device. The
    // pauses grow with the wait, so it ends at most a sixteenth late and a long one costs no processor.
    Code block(Fence *fence, Time began, Time until) {
        using namespace std::chrono;
        Code code = query(fence);
        for (Time now = Clock::now(); code == not_ready && now < until; now = Clock::now()) {
            if (fence->gathered && captures_.load() > 0)
                return capture_unsupported; // the caller may be the one to end them
            auto waited = duration_cast<microseconds>(now - began);
            if (waited > microseconds(20))
                std::this_thread::sleep_for(std::clamp(waited / 16, microseconds(5), microseconds(1000)));
            code = ask(fence);
        }
        return code;
    }

    // The same in microseconds from now, after so many that the wait has lasted.
    Code block_for(Fence *fence, std::int64_t waited, std::int64_t more) {
        using std::chrono::microseconds;
        Time now = Clock::now();
        return block(fence, now - microseconds(waited), now + microseconds(more));
    }

    void share(Fence *fence) { fence->references.fetch_add(1, std::memory_order_relaxed); }

    void release(Fence *fence) {
        if (fence->references.fetch_sub(1, std::memory_order_acq_rel) != 1 || gone())
            return;
        put(fence);
        end_use();
    }

  private:
    Context(const Table &table, int ordinal)
        : Primary(table, ordinal), calls{this,      call_record, call_order,     call_record_all, call_query,
                                         call_wait, call_block,  call_capturing, call_release} {}

    // The calls of `AsyncmemFenceCalls`.
    static Context *self(void *context) { return static_cast<Context *>(context); }
    static Fence *fence_of(void *fence) { return static_cast<Fence *>(fence); }
    static int call_record(void *context, std::uint64_t stream, void **fence) {
        return self(context)->record_outside(stream, reinterpret_cast<Fence **>(fence));
    }
    static int call_order(void *context, std::uint64_t earlier, std::uint64_t later, void **fence, int *refused) {
        return self(context)->order(earlier, later, reinterpret_cast<Fence **>(fence), refused);
    }
    static int call_record_all(void *context, void **fence) {
        return self(context)->record_all(reinterpret_cast<Fence **>(fence));
    }
    static int call_query(void *context, void *fence) {
        Code code = self(context)->query(fence_of(fence));
        return code == not_ready ? -1 : code;
    }
    static int call_wait(void *context, std::uint64_t stream, void *fence) {
        return self(context)->wait(stream, fence_of(fence));
    }
    static int call_block(void *context, void *fence) {
        return self(context)->block(fence_of(fence), Clock::now(), Time::max());
    }
    static int call_capturing(void *context, std::uint64_t stream) { return self(context)->capturing(stream); }
    static void call_release(void *context, void *fence) { self(context)->release(fence_of(fence)); }

    void destroy_events() override {
        Entered entered(*this);
        for (Fence *fence = spare_; fence != nullptr;) {
            Fence *next = fence->next;
            driver.cuEventDestroy(fence->event);
            delete fence;
            fence = next;
        }
        spare_ = nullptr;
    }

    // A fence behind the stream.
    Code make(std::uint64_t stream, Fence **fence) {
        Fence *made = nullptr;
        Code code = take(&made);
        if (code != success)
            return code;
        code = on_stream(stream, [&] { return driver.cuEventRecord(made->event, as_handle(stream)); });
        return issue(made, code, fence);
    }

    // The stream behind a fence.
    Code follow(std::uint64_t stream, Fence *fence) {
        return on_stream(stream, [&] { return driver.cuStreamWaitEvent(as_handle(stream), fence->event, 0); });
    }

    // An unused fence; no other code knows it.
    Code take(Fence **fence) {
        {
            std::lock_guard<Lock> guard(spare_lock_);
            if (spare_ != nullptr) {
                *fence = spare_;
                spare_ = spare_->next;
                return success;
            }
        }
        auto *made = new (std::nothrow) Fence{nullptr, this, {0}, {false}, nullptr};
        if (made == nullptr)
            return out_of_memory;
        Entered entered(*this);
        Code code = entered.code();
        if (code == success)
            code = driver.cuEventCreate(&made->event, 2); // without timing
        if (code != success) {
            delete made;
            return code;
        }
        *fence = made;
        return success;
    }

    void put(Fence *fence) {
        std::lock_guard<Lock> guard(spare_lock_);
        fence->next = spare_;
        spare_ = fence;
    }

    Code issue(Fence *made, Code code, Fence **fence) {
        if (code != success) {
            put(made);
            return code;
        }
        made->reached.store(false, std::memory_order_relaxed);
        made->gathered = false;
        made->references.store(1, std::memory_order_relaxed);
        use();
        *fence = made;
        return success;
    }

    // Has a fence reached once all is done that was submitted before. CUDA's driver has fences behind every stream of a
    // context from 12.5 on, HIP has none. Without them nothing in stream order is behind the streams of other libraries
    // that were not named. So a thread waits until the whole device is done, and no stream can wait for that.
    Code gather(Fence *made) {
        made->gathered = true;
        made->failure.store(success, std::memory_order_relaxed);
        std::lock_guard<std::mutex> guard(gathering_lock_);
        if (!gathering_) {
            try {
                std::thread([this] { gather_all(); }).detach();
            } catch (const std::system_error &) {
                return out_of_memory;
            }
            gathering_ = true;
        }
        share(made);
        coming_.push_back(made);
        return success;
    }

    void gather_all() {
        pthread_setname_np(pthread_self(), "asyncmem-gather");
        for (;;) {
            std::vector<Fence *> fences;
            {
                std::lock_guard<std::mutex> guard(gathering_lock_);
                gathering_ = !coming_.empty();
                if (!gathering_)
                    return;
                fences.swap(coming_);
            }
            const Code code = wait_for_all();
            if (gone())
                return;
            for (Fence *fence : fences) {
                if (code == success)
                    fence->reached.store(true, std::memory_order_release);
                else
                    fence->failure.store(code, std::memory_order_release);
                release(fence);
            }
        }
    }

    // The driver refuses to wait while a stream is captured, and ends that capture.
    Code wait_for_all() {
        Entered entered(*this);
        Code code = entered.code() == success ? capture_unsupported : entered.code();
        while (code == capture_unsupported && !gone()) {
            if (!may_capture())
                code = driver.cuCtxSynchronize();
            if (code == capture_unsupported)
                std::this_thread::sleep_for(std::chrono::milliseconds(1)); // until a capture ends
        }
        return code;
    }

    Lock spare_lock_;
    Fence *spare_ = nullptr;

    std::mutex gathering_lock_;
    std::vector<Fence *> coming_;
    bool gathering_ = false; // whether a thread waits; it ends when nothing is left to wait for
};

} // namespace asyncmem::gpu
