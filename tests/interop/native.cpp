// A library that asks for memory in C, as others do: by two functions, without the interpreter's lock.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

using Allocate = void* (*)(size_t nbytes, int device, void* stream);
using Release = void (*)(void* address, size_t nbytes, int device, void* stream);

namespace {

std::atomic<int> ready{0}, served{0};
std::atomic<bool> go{false};

struct Held {
    char* address;
    size_t nbytes;
    void* stream;
};

// Blocks of all threads: none may overlap another, and any thread may free any.
class Shared {
public:
    // Takes a block in, and gives another out, if there are more than `most`; false where it overlaps one that is live.
    bool exchange(const Held& mine, Held& other, size_t most) {
        std::lock_guard guard(lock_);
        auto after = live_.lower_bound(mine.address);
        if (after != live_.end() && after->first < mine.address + mine.nbytes) return false;
        if (after != live_.begin() && std::prev(after)->second.address + std::prev(after)->second.nbytes > mine.address)
            return false;
        live_[mine.address] = mine;
        if (live_.size() <= most) return true;
        auto next = live_.upper_bound(mine.address);
        return take(next == live_.end() ? live_.begin() : next, other);
    }

    bool drain(Held& other) {
        std::lock_guard guard(lock_);
        return !live_.empty() && take(live_.begin(), other);
    }

private:
    bool take(std::map<char*, Held>::iterator which, Held& other) {
        other = which->second;
        live_.erase(which);
        return true;
    }

    std::mutex lock_{};
    std::map<char*, Held> live_{};
};

}  // namespace

extern "C" {

// Allocates and frees at random, up to `most` blocks of up to `largest` bytes at a time; returns how often it got none, or
// -1 where two blocks that are live overlap. What it gets is its own: it keeps no other thread's.
long churn(Allocate allocate, Release release, int device, void* stream, long steps, long most, size_t largest,
           uint32_t seed) {
    struct Block {
        char* address;
        size_t nbytes;
    };
    std::vector<Block> live;
    long missed = 0;
    for (long i = 0; i < steps; i++) {
        seed = seed * 1664525 + 1013904223;
        if (static_cast<long>(live.size()) < most && seed >> 31) {
            size_t nbytes = 1 + (seed >> 3) % largest;
            auto* address = static_cast<char*>(allocate(nbytes, device, stream));
            if (!address) {
                missed++;
                continue;
            }
            for (auto& one : live)
                if (address < one.address + one.nbytes && one.address < address + nbytes) return -1;
            live.push_back({address, nbytes});
        } else if (!live.empty()) {
            size_t which = (seed >> 5) % live.size();
            release(live[which].address, live[which].nbytes, device, stream);
            live[which] = live.back();
            live.pop_back();
        }
    }
    for (auto& one : live) release(one.address, one.nbytes, device, stream);
    return missed;
}

// Has threads that Python has never seen allocate on streams of their own, and free each other's blocks, a third of them
// after the stream of the one that frees was named. Returns how many steps got none, or -1 where two live blocks overlap.
long storm(Allocate allocate, Release release, void (*name_stream)(void* address, void* stream), int device,
           void* const* streams, int count, long steps, size_t largest) {
    Shared shared;
    std::atomic<long> missed{0};
    std::atomic<bool> broken{false};
    auto free_it = [&](const Held& one, void* stream, bool named) {
        if (named && name_stream && stream != one.stream) name_stream(one.address, stream);
        release(one.address, one.nbytes, device, one.stream);
    };
    auto run = [&](void* stream, uint32_t seed) {
        for (long i = 0; i < steps && !broken; i++) {
            seed = seed * 1664525 + 1013904223;
            size_t nbytes = 1 + (seed >> 3) % largest;
            char* address = nullptr;
            try {
                address = static_cast<char*>(allocate(nbytes, device, stream));
            } catch (const std::exception&) {
            }
            Held other{};
            if (!address) {
                missed++;
                if (shared.drain(other)) free_it(other, stream, false);
            } else if (!shared.exchange({address, nbytes, stream}, other, 8 * count)) broken = true;
            else if (other.address) free_it(other, stream, seed % 3 == 0);
        }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < count; i++) threads.emplace_back(run, streams[i], 2654435761u * (i + 1));
    for (auto& one : threads) one.join();
    for (Held one{}; shared.drain(one);) free_it(one, one.stream, false);
    return broken ? -1 : missed.load();
}

// Waits for `let_go`, then allocates and frees once.
void* wait_and_take(Allocate allocate, Release release, size_t nbytes, int device, void* stream) {
    ready++;
    while (!go) std::this_thread::yield();
    void* address = allocate(nbytes, device, stream);
    release(address, nbytes, device, stream);
    served++;
    return address;
}

// Allocates by a function that throws where it has nothing, and notes what it says.
void* take_or_note(Allocate allocate, size_t nbytes, int device, void* stream, char* text, size_t room) {
    try {
        return allocate(nbytes, device, stream);
    } catch (const std::exception& error) {
        std::strncpy(text, error.what(), room - 1);
        return nullptr;
    }
}

int count_ready() { return ready; }

// Lets them, and waits until `count` have, or for five seconds; returns how many have. For who holds the interpreter's lock.
int let_go(int count) {
    go = true;
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (served < count && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    go = false;
    ready = 0;
    return served.exchange(0);
}
}
