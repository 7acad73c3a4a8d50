#include "gathering.hpp"

#include <pthread.h>

#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "context.hpp"

namespace asyncmem::gpu {
namespace {

constexpr std::chrono::milliseconds until_a_capture_ends{1};

} // namespace

bool Gathering::add(Fence *fence) {
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

void Gathering::run() {
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
Code Gathering::wait_for_all() {
    Entered entered(context_);
    Code code = entered.code() == success ? capture_unsupported : entered.code();
    while (code == capture_unsupported && !gone()) {
        if (!context_.may_capture())
            code = context_.driver.cuCtxSynchronize();
        if (code == capture_unsupported)
            std::this_thread::sleep_for(until_a_capture_ends);
    }
    return code;
}

} // namespace asyncmem::gpu
