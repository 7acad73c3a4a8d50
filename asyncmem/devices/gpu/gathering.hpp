// A fence behind every stream of a context, for drivers that have none: the host sees all work done.
#pragma once

#include <pthread.h>

#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "context.hpp"

namespace asyncmem::gpu {

// CUDA has such fences from 12.5 on, HIP has none. Without them nothing in stream order is behind the streams of other
// libraries that were not named. So a thread waits until the whole device is done, and no stream can wait for that.
class Gathering {
  public:
    explicit Gathering(Context &context) : context_(context) {}

    // Has a fence reached once all is done that was submitted before; takes over a reference. False where no thread is
    // to be had.
    bool add(Fence *fence) {
        std::lock_guard<std::mutex> guard(lock_);
        if (!running_) {
            try {
                std::thread([this] { run(); }).detach();
            } catch (const std::system_error &) {
                return false;
            }
            running_ = true;
        }
        coming_.push_back(fence);
        return true;
    }

  private:
    void run() {
        pthread_setname_np(pthread_self(), "asyncmem-gather");
        for (;;) {
            std::vector<Fence *> fences;
            {
                std::lock_guard<std::mutex> guard(lock_);
                running_ = !coming_.empty();
                if (!running_)
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
                context_.release(fence);
            }
        }
    }

    // The driver refuses to wait while a stream is captured, and ends that capture.
    Code wait_for_all() {
        Entered entered(context_);
        Code code = entered.code() == success ? capture_unsupported : entered.code();
        while (code == capture_unsupported && !gone()) {
            if (!context_.may_capture())
                code = context_.driver.cuCtxSynchronize();
            if (code == capture_unsupported)
                std::this_thread::sleep_for(std::chrono::milliseconds(1)); // until a capture ends
        }
        return code;
    }

    Context &context_;
    std::mutex lock_;
    std::vector<Fence *> coming_;
    bool running_ = false; // the thread ends when nothing is left to wait for
};

} // namespace asyncmem::gpu
