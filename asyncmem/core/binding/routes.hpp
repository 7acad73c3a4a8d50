// Routes: memory for libraries that ask in C, on threads of theirs and without the interpreter's lock.
//
// A thread's allocations go to the route that it has entered. What a library asks for is served from the heap under the
// heap's own lock where that takes no waiting, no growing and no driver call; all else goes to `missed`, which takes the
// interpreter's lock. A free never does, because a library may free with its own locks held, which others that hold the
// interpreter's wait for: a thread that does nothing else tells the pool of it (`wait_for_told`).
//
// Which streams have used a block is the library's secret, so each goes back behind all that any stream was given to do.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../fence_calls.h"
#include "../heap/heap.hpp"

namespace asyncmem {

struct Route {
    Heap* heap;
    const AsyncmemFenceCalls* calls;  // none where no stream is ever captured
    void* object;                     // in Python; it lives for as long as there are `users`
    int device;
    uint32_t account, everywhere;  // the latter the number of the user that stands for all streams
    int32_t arena;

    std::mutex lock{};  // over the next two: once a route is shut, nothing is being taken by it
    bool open = false;
    std::vector<std::pair<uint64_t, uint32_t>> streams{};  // numbers of those that the library keeps alive

    // Under the lock of all routes:
    int64_t users = 0;  // threads inside, blocks, and whether it is to be told of
    int64_t live = 0;   // bytes
    uint32_t flags = 0;
    bool told = false;
    Route* outer = nullptr;
};

class Routes {
public:
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
        if (!route || route->device != device || !nbytes || forked_) return nullptr;
        void* found = take(*route, nbytes, stream);
        return found ? found : missed(route, nbytes, stream);
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
        try {
            // A fence that covers this epoch is recorded after now, and so behind all that was submitted before.
            Entry every{route.everywhere, route.heap->epochs(route.everywhere).open};
            flags = route.heap->free(held.block, std::span<const Entry>(&every, 1));
        } catch (...) {  // only a broken heap throws here, and this is no place to say so
        }
        std::lock_guard guard(lock_);
        route.live -= held.nbytes;
        tell(route, flags);
        route.users--;  // being told of, it stays
    }

    void add(Route& route, void* address, BlockId block, size_t nbytes) {
        std::lock_guard guard(lock_);
        held_.emplace(address, Held{&route, block, nbytes});
        route.users++;
        route.live += nbytes;
    }

    void use(Route& route) {
        std::lock_guard guard(lock_);
        route.users++;
    }

    bool drop(Route& route) {  // whether that was the last use
        std::lock_guard guard(lock_);
        return --route.users == 0;
    }

    int64_t live(const Route& route) {
        std::lock_guard guard(lock_);
        return route.live;
    }

    // Sleeps until a route is to be told of; its flags, and a use of it, are the caller's.
    Route* wait_for_told(uint32_t& flags) {
        std::unique_lock guard(lock_);
        wake_.wait(guard, [&] { return !told_.empty(); });
        Route* route = told_.back();
        told_.pop_back();
        route->told = false;
        flags = std::exchange(route->flags, 0);
        return route;
    }

    void fork() { forked_ = true; }

private:
    struct Held {
        Route* route;
        BlockId block;
        size_t nbytes;
    };

    void* take(Route& route, size_t nbytes, uint64_t stream) noexcept {
        Outcome outcome;
        BlockId block = 0;
        try {
            std::lock_guard guard(route.lock);
            Ask ask{.nbytes = nbytes, .account = route.account, .arena = route.arena, .fast = true};
            if (!route.open || nbytes > max_size || !number_of(route, stream, ask.stream)) return nullptr;
            if (stream && route.calls && route.calls->capturing(route.calls->context, stream)) return nullptr;
            block = route.heap->take(ask, outcome);
            if (!block) return nullptr;
            add(route, reinterpret_cast<void*>(outcome.address), block, nbytes);
        } catch (...) {
            if (block) route.heap->free(block);
            return nullptr;
        }
        if (outcome.flags) {
            std::lock_guard guard(lock_);
            tell(route, outcome.flags);
        }
        return reinterpret_cast<void*>(outcome.address);
    }

    static bool number_of(const Route& route, uint64_t stream, uint32_t& number) {
        for (auto& [handle, known] : route.streams)
            if (handle == stream) {
                number = known;
                return true;
            }
        return false;
    }

    void tell(Route& route, uint32_t flags) {
        route.flags |= flags;
        if (route.told) return;
        route.told = true;
        route.users++;
        told_.push_back(&route);
        wake_.notify_one();
    }

    std::mutex lock_;
    std::condition_variable wake_;
    std::unordered_map<void*, Held> held_;
    std::vector<Route*> told_;
    bool forked_ = false;
};

inline Route* new_route(Heap* heap, const AsyncmemFenceCalls* calls, void* object, int device, uint32_t account,
                        int32_t arena, uint32_t everywhere) {
    return new Route{heap, calls, object, device, account, everywhere, arena};
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

}  // namespace asyncmem
