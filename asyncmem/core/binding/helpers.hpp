// Calls that one thread leaves to another and waits for. Falling asleep and waking takes longer than most of these calls, so
// each looks out for the other for a moment before it sleeps. What it has done it notes with the interpreter's lock free,
// which the other needs at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace asyncmem {

inline std::atomic<uint64_t> left_calls{0}, ended_calls{0};

// Whether the count has changed.
inline bool look_out(const std::atomic<uint64_t>& count, uint64_t seen) {
    constexpr auto moment = std::chrono::microseconds(200);
    auto until = std::chrono::steady_clock::now() + moment;
    while (count.load(std::memory_order_acquire) == seen) {
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::yield();
    }
    return true;
}

inline uint64_t calls_left() { return left_calls.load(std::memory_order_relaxed); }
inline uint64_t calls_ended() { return ended_calls.load(std::memory_order_relaxed); }

// With what the other's count was while the lock was held.
inline bool leave_call(uint64_t ended) {
    left_calls.fetch_add(1, std::memory_order_release);
    return look_out(ended_calls, ended);
}

inline void end_call(uint64_t left, bool idle) {
    ended_calls.fetch_add(1, std::memory_order_release);
    if (idle) look_out(left_calls, left);
}

}  // namespace asyncmem
