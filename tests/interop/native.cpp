// A library that asks for memory in C, as others do: by two functions, without the interpreter's lock.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

using Allocate = void* (*)(size_t nbytes, int device, void* stream);
using Release = void (*)(void* address, size_t nbytes, int device, void* stream);

namespace {

std::atomic<int> ready{0}, served{0};
std::atomic<bool> go{false};

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
