// The heap's lock: one atomic exchange to take it and one store to leave it, where a std::mutex needs two exchanges.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

namespace asyncmem {

// Sections under it are short and call nothing, so a waiter spins a little, then yields, and sleeps only behind a walk
// over the whole heap (check, merge). Satisfies BasicLockable.
class Lock {
public:
    void lock() {
        if (!guarded_ && held_.exchange(true, std::memory_order_acquire)) wait();
    }
    void unlock() {
        if (!guarded_) held_.store(false, std::memory_order_release);
    }

    // What a call returns that is made under it.
    template <typename Call>
    auto with(Call call) {
        std::lock_guard lock(*this);
        return call();
    }

    // Whether all who come here hold one other lock already, such as the interpreter's, and hold it until they have left:
    // then this one costs a branch. To be changed by the holder of that lock, before a caller comes without it.
    void set_guarded(bool guarded) { guarded_ = guarded; }

private:
    void wait() {
        uint32_t tries = 0;
        do {
            while (held_.load(std::memory_order_relaxed)) {
                if (++tries < 64) continue;
                if (tries < 1024)
                    std::this_thread::yield();
                else
                    std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        } while (held_.exchange(true, std::memory_order_acquire));
    }

    bool guarded_ = false;
    std::atomic<bool> held_{false};
};

}  // namespace asyncmem
