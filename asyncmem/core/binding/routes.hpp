// Routes: memory for libraries that ask in C, on threads of theirs and without the interpreter's lock.
//
// A thread's allocations go to the route that it has entered, else to the device's, if one is installed. What a library asks for is served from the heap under the
// heap's own lock where that takes no waiting, no growing and no driver call; all else goes to `missed`, which takes the
// interpreter's lock. A free never does, because a library may free with its own locks held, which others that hold the
// interpreter's wait for: a thread that does nothing else tells the pool of it (`wait_for_route`).
//
// Which streams have used a block is mostly the library's secret, so each goes back behind all that any stream was given to
// do. A route may be `names_streams`: then a block goes back behind its own stream, and behind all only if another was named.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../fence_calls.h"
#include "../heap/heap.hpp"

namespace asyncmem {

struct RouteCounts {
    int64_t live = 0, peak = 0, taken = 0, freed = 0;                          // bytes
    int64_t blocks = 0, peak_blocks = 0, blocks_taken = 0, blocks_freed = 0;
};

struct Route {
    Heap* heap;
    const AsyncmemFenceCalls* calls;  // none where no stream is ever captured
    void* object;                     // in Python; it lives for as long as there are `users`
    int device;
    uint32_t account, everywhere;  // the latter the number of the user that stands for all streams
    int32_t arena;
    bool names_streams;  // the library frees on the stream that it asked for, and names others

    std::mutex lock{};  // over the next two: once a route is shut, nothing is being taken by it
    bool open = false;
    std::vector<std::pair<uint64_t, uint32_t>> streams{};  // numbers of those that the library keeps alive

    // Under the lock of all routes:
    int64_t users = 0;  // threads inside, blocks, and whether it is queued
    RouteCounts counts{};
    uint32_t flags = 0;
    bool queued = false;  // for the thread of Python
    bool owes = false;  // a fence behind all streams
    Route* outer = nullptr;
};

class Routes {
public:
    static constexpr int most_devices = 64;

    using Missed = void* (*)(Route* route, size_t nbytes, uint64_t stream);

    static Routes& all() {
        static Routes& one = *new Routes;  // frees come until the very end of the process
        return one;
    }

    Missed missed = nullptr;

    static Route*& here() {
        static thread_local Route* current = nullptr;
        return current;
    }

    void* allocate(size_t nbytes, int device, uint64_t stream) noexcept {
        Route* route = here();
        if (!route || route->device != device) route = installed(device);
        if (!route || !nbytes || forked_) return nullptr;
        void* found = take(*route, nbytes, stream);
        return found ? found : missed(route, nbytes, stream);
    }

    // What is free, without waiting; none else.
    void* take(Route& route, size_t nbytes, uint64_t stream) noexcept {
        Outcome outcome;
        BlockId block = 0;
        try {
            std::lock_guard guard(route.lock);
            Ask ask{.nbytes = nbytes, .account = route.account, .arena = route.arena, .fast = true};
            if (!route.open || forked_ || nbytes > max_size || !number_of(route, stream, ask.stream)) return nullptr;
            if (stream && route.calls && route.calls->capturing(route.calls->context, stream)) return nullptr;
            block = route.heap->take(ask, outcome);
            if (!block) return nullptr;
            add(route, reinterpret_cast<void*>(outcome.address), block, nbytes, !route.names_streams);
        } catch (...) {
            if (block) route.heap->free(block);
            return nullptr;
        }
        if (outcome.flags) {
            std::lock_guard guard(lock_);
            enqueue(route, outcome.flags);
        }
        return reinterpret_cast<void*>(outcome.address);
    }

    void release(void* address) noexcept {
        if (!address || forked_) return;
        Held held;
        {
            std::lock_guard guard(lock_);
            auto found = held_.find(address);
            if (found == held_.end()) return;
            held = found->second;
            held_.erase(found);
        }
        Route& route = *held.route;
        uint32_t flags = 0;
        route.heap->expect_news(1);  // until it is said below whether there are
        try {
            // A fence that covers this epoch is recorded after now, and so behind all that was submitted before.
            Entry every{route.everywhere, held.everywhere ? route.heap->epochs(route.everywhere).open : 0};
            flags = route.heap->free(held.block, std::span<const Entry>(&every, held.everywhere));
        } catch (...) {  // only a broken heap throws here, and this is no place to say so
        }
        std::lock_guard guard(lock_);
        RouteCounts& counts = route.counts;
        counts.live -= held.nbytes, counts.freed += held.nbytes;
        --counts.blocks, ++counts.blocks_freed;
        route.owes |= held.everywhere;
        if (flags || held.everywhere || route.users == 1) enqueue(route, flags);
        route.heap->expect_news(-1);
        route.users--;  // the last one is queued, so that it stays until then
    }

    // `everywhere`: it is not known which streams will use it.
    void add(Route& route, void* address, BlockId block, size_t nbytes, bool everywhere) {
        std::lock_guard guard(lock_);
        held_.emplace(address, Held{&route, block, static_cast<int64_t>(nbytes), everywhere});
        route.users++;
        RouteCounts& counts = route.counts;
        counts.live += nbytes, counts.taken += nbytes;
        ++counts.blocks, ++counts.blocks_taken;
        counts.peak = std::max(counts.peak, counts.live);
        counts.peak_blocks = std::max(counts.peak_blocks, counts.blocks);
    }

    // A stream beside its own has been given work on a block.
    void name_stream(void* address) noexcept {
        std::lock_guard guard(lock_);
        auto found = held_.find(address);
        if (found != held_.end()) found->second.everywhere = true;
    }

    // Serve all threads that have entered no route of the device.
    void install(Route& route) {
        std::lock_guard guard(lock_);
        installed_[route.device] = &route;
    }

    void use(Route& route) {
        std::lock_guard guard(lock_);
        route.users++;
    }

    bool drop(Route& route) {  // whether that was the last use
        std::lock_guard guard(lock_);
        return --route.users == 0;
    }

    RouteCounts counts(const Route& route) {
        std::lock_guard guard(lock_);
        return route.counts;
    }
    void reset_peaks(Route& route) {
        std::lock_guard guard(lock_);
        route.counts.peak = route.counts.live;
        route.counts.peak_blocks = route.counts.blocks;
    }

    // Wait for a queued route; its flags, whether it owes a fence, and a use of it become the caller's.
    Route* wait_for_route(uint32_t& flags, int& owes) {
        std::unique_lock guard(lock_);
        wake_.wait(guard, [&] { return !queue_.empty(); });
        Route* route = queue_.back();
        queue_.pop_back();
        route->queued = false;
        flags = std::exchange(route->flags, 0);
        owes = std::exchange(route->owes, false);
        return route;
    }

    void fork() { forked_ = true; }

    // Why the latest allocation on this thread failed.
    static std::string& failure() {
        static thread_local std::string text;
        return text;
    }

private:
    struct Held {
        Route* route;
        BlockId block;
        int64_t nbytes;
        bool everywhere;
    };

    Route* installed(int device) const { return device >= 0 && device < most_devices ? installed_[device].load() : nullptr; }

    static bool number_of(const Route& route, uint64_t stream, uint32_t& number) {
        for (auto& [handle, known] : route.streams)
            if (handle == stream) {
                number = known;
                return true;
            }
        return false;
    }

    void enqueue(Route& route, uint32_t flags) {
        route.flags |= flags;
        if (route.queued) return;
        route.queued = true;
        route.heap->expect_news(1);
        route.users++;
        queue_.push_back(&route);
        wake_.notify_one();
    }

    std::mutex lock_;
    std::condition_variable wake_;
    std::unordered_map<void*, Held> held_;
    std::vector<Route*> queue_;
    std::atomic<Route*> installed_[most_devices] = {};
    bool forked_ = false;
};

inline Route* new_route(Heap* heap, const AsyncmemFenceCalls* calls, void* object, int device, uint32_t account,
                        int32_t arena, uint32_t everywhere, bool names_streams) {
    if (device < 0 || device >= Routes::most_devices) throw std::invalid_argument("no such device");
    return new Route{heap, calls, object, device, account, everywhere, arena, names_streams};
}

inline void set_open(Route* route, bool open) {
    std::lock_guard guard(route->lock);
    route->open = open;
}

inline void know(Route* route, uint64_t stream, uint32_t number) {
    std::lock_guard guard(route->lock);
    for (auto& [handle, known] : route->streams)
        if (handle == stream) return;
    route->streams.emplace_back(stream, number);
}

// What libraries are given.
inline void* route_allocate(size_t nbytes, int device, void* stream) {
    return Routes::all().allocate(nbytes, device, reinterpret_cast<uint64_t>(stream));
}
inline void route_release(void* address, size_t, int, void*) { Routes::all().release(address); }

// For a library that does not look whether it was given memory.
inline void* route_allocate_or_throw(size_t nbytes, int device, void* stream) {
    Routes::failure() = "CUDA out of memory. No pool serves this device";
    void* found = route_allocate(nbytes, device, stream);
    if (nbytes && !found) throw std::runtime_error(Routes::failure());
    return found;
}
inline void route_name_stream(void* address, void*) { Routes::all().name_stream(address); }

}  // namespace asyncmem
