// Physical memory under reserved ranges of addresses, whose pieces move: unmapped here, mapped there, each batch in one go
// without the interpreter's lock.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "context.hpp"

namespace asyncmem::gpu {

// What became of several calls: the first that failed, and its code.
struct Outcome {
    Code code = success;
    const char *call = "";
};

struct Span {
    std::uint64_t address, nbytes;
};

// How far a remap came, and what stopped it.
struct Progress {
    std::size_t unmapped = 0, mapped = 0;
    Outcome outcome;
};

// Its user makes the context current, and keeps other threads off it.
class Paging {
  public:
    explicit Paging(Context &context) : context_(context) {}

    // Unmaps the spans of one list, then maps those of the other for devices to use, with what was unmapped as far as the
    // sizes agree; gives back what is left. Calls are for a stretch at a time, of at most `step` bytes where spans allow.
    Progress remap(const std::vector<Span> &unmap, const std::vector<Span> &map, const std::vector<int> &devices,
                   std::uint64_t step);
    // Lets devices use all that is mapped, or forbids it.
    Outcome allow(const std::vector<int> &devices, bool allowed, std::uint64_t step);
    // Whether nothing of a range is mapped, half undone stretches included.
    bool bare(const Span &range);
    // Forgets all, where no call may be made any more.
    void forget();

  private:
    using Handle = unsigned long long;
    struct Piece {
        std::uint64_t nbytes;
        Handle handle;
    };
    using Pieces = std::map<std::uint64_t, Piece>; // by address

    Outcome take_away(const std::vector<Span> &spans, std::size_t first, std::size_t end);
    Outcome put(const Span &span, Pieces &stretch);
    Outcome open(const Pieces &stretch, const std::vector<int> &devices, bool allowed);
    void undo(Pieces &stretch);
    void retry();
    Outcome release_spare();
    Outcome called(const char *call, Code code);

    Context &context_;
    Pieces mapped_;
    Pieces half_; // mapped, but not to be: a stretch that could not be opened, nor undone
    std::multimap<std::uint64_t, Handle> spare_; // mapped nowhere, by size; empty between calls, unless a release failed
};

} // namespace asyncmem::gpu
