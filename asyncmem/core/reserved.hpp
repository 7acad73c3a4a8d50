// A range of addresses that is had at once, and gets memory as it is needed: what lies in it never moves.
#pragma once

#include <cstddef>
#include <new>

#ifdef _WIN32
#ifndef NOMINMAX
#define NOMINMAX
#endif
#include <windows.h>
#else
#include <sys/mman.h>
#endif

namespace asyncmem {

class Reserved {
public:
    // So many bytes of addresses; where a limit is set on them, a part of what is left.
    explicit Reserved(size_t nbytes) : nbytes_(nbytes), start_(reserve(nbytes)) {
        if (start_) return;
        while (!start_) start_ = reserve(halved());
        release();
        start_ = reserve(halved());
        if (!start_) throw std::bad_alloc();
    }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;
    ~Reserved() { release(); }

    void* start() const { return start_; }

    // Put zeroed memory behind all of the range up to `end`.
    void back(size_t end) {
        if (end > nbytes_ || !allow(end)) throw std::bad_alloc();
    }

private:
    size_t halved() {
        if (!(nbytes_ /= 2)) throw std::bad_alloc();
        return nbytes_;
    }

#ifdef _WIN32
    static void* reserve(size_t nbytes) { return VirtualAlloc(nullptr, nbytes, MEM_RESERVE, PAGE_NOACCESS); }
    bool allow(size_t end) { return VirtualAlloc(start_, end, MEM_COMMIT, PAGE_READWRITE); }
    void release() { VirtualFree(start_, 0, MEM_RELEASE); }
#else
    static void* reserve(size_t nbytes) {
        void* start = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
        return start == MAP_FAILED ? nullptr : start;
    }
    bool allow(size_t end) { return mprotect(start_, end, PROT_READ | PROT_WRITE) == 0; }
    void release() { munmap(start_, nbytes_); }
#endif

    size_t nbytes_;
    void* start_;
};

}  // namespace asyncmem
