// The heap's lock: one atomic exchange to take it and one store to leave it, where a std::mutex needs two exchanges.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace asyncmem {

// Sections under it are short and call nothing, so a waiter spins a little, then yields, and sleeps only behind a walk
// over the whole heap (check, merge). Satisfies BasicLockable.
class Lock {
public:
    void lock() {
        if (held_.exchange(true, std::memory_order_acquire)) wait();
    }
    void unlock() { held_.store(false, std::memory_order_release); }

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

    std::atomic<bool> held_{false};
};

}  // namespace asyncmem
