#include "space.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "abi.hpp"

namespace {

constexpr std::uint64_t MOST_ADDRESSES = 1ull << 44, CHIPS = 1ull << 42;

[[noreturn]] void give_up(const char* what) {
    std::perror(what);
    std::abort();
}

// As many as can be had: sanitizers and limits leave few.
std::uint64_t addresses(std::uint64_t& nbytes) {
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* base = MAP_FAILED;
    for (nbytes = 2 * MOST_ADDRESSES; base == MAP_FAILED && nbytes > 2 * PAGE;)
        base = mmap(nullptr, nbytes /= 2, PROT_NONE, how, -1, 0);
    if (base == MAP_FAILED) give_up("fake driver: reserving addresses");
    nbytes -= PAGE;  // for the first one to start on a page
    return (reinterpret_cast<std::uint64_t>(base) + PAGE - 1) / PAGE * PAGE;
}

int chips() {
    const int file = memfd_create("fake device memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, CHIPS + PAGE) != 0) give_up("fake driver: making memory");
    return file;
}

void* at(std::uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

std::uint64_t Ranges::take(std::uint64_t nbytes, std::uint64_t alignment) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
        const auto [start, length] = *range;
        const auto from = (start + alignment - 1) / alignment * alignment;
        if (from + nbytes > start + length) continue;
        free_.erase(range);
        if (from > start) free_[start] = from - start;
        if (from + nbytes < start + length) free_[from + nbytes] = start + length - from - nbytes;
        return from;
    }
    return 0;
}

void Ranges::give(std::uint64_t start, std::uint64_t nbytes) {
    auto next = free_.lower_bound(start);
    if (next != free_.end() && start + nbytes == next->first) {
        nbytes += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        auto before = std::prev(next);
        if (before->first + before->second == start) {
            before->second += nbytes;
            return;
        }
    }
    free_[start] = nbytes;
}

Space::Space() : file_(chips()), base_(addresses(nbytes_)), addresses_(base_, nbytes_), chips_(PAGE, CHIPS) {}

std::uint64_t Space::reserve(std::uint64_t nbytes, std::uint64_t alignment) {
    return nbytes > nbytes_ || alignment > nbytes_ ? 0 : addresses_.take(nbytes, alignment);
}

void Space::release(std::uint64_t address, std::uint64_t nbytes) { addresses_.give(address, nbytes); }

std::uint64_t Space::create(std::uint64_t nbytes) { return chips_.take(nbytes, PAGE); }

void Space::destroy(std::uint64_t offset, std::uint64_t nbytes) {
    if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, nbytes) != 0) give_up("fake driver: hole");
    chips_.give(offset, nbytes);
}

void Space::map(std::uint64_t address, std::uint64_t nbytes, std::uint64_t offset, bool usable) {
    const int may = usable ? PROT_READ | PROT_WRITE : PROT_NONE;
    if (mmap(at(address), nbytes, may, MAP_SHARED | MAP_FIXED, file_, offset) == MAP_FAILED) give_up("fake driver: map");
}

void Space::protect(std::uint64_t address, std::uint64_t nbytes, bool usable) {
    if (mprotect(at(address), nbytes, usable ? PROT_READ | PROT_WRITE : PROT_NONE) != 0) give_up("fake driver: access");
}

void Space::unmap(std::uint64_t address, std::uint64_t nbytes) {
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap(at(address), nbytes, PROT_NONE, how, -1, 0) == MAP_FAILED) give_up("fake driver: unmap");
}

bool Space::within(std::uint64_t address) const { return address >= base_ && address < base_ + nbytes_; }
