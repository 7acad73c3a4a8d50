// Physical memory under a range of addresses: mapped piece by piece, and taken back, each in one go, so that the
// interpreter's lock changes hands once a segment and not at every call.
#pragma once

#include <cstdint>
#include <vector>

#include "context.hpp"

namespace asyncmem::gpu {

// What became of several calls: the first that failed, and its code.
struct Outcome {
    Code code = success;
    const char *call = "";
};

// What memory is asked for, and who may use it.
Properties memory_of(const Context &context);
std::vector<Access> access_of(const std::vector<int> &devices, bool allowed);

// Whoever uses one makes the context current, and keeps other threads off it.
class Mapping {
  public:
    Mapping(Context &context, std::uint64_t address) : context_(context), end_(address) {}

    // Maps handles of these sizes, one behind the other, for devices to use. Where that fails, `clear` undoes it.
    Outcome map(const std::vector<std::uint64_t> &sizes, const std::vector<int> &devices, std::uint64_t step);
    // Lets devices use all pieces, or forbids it, at most `step` bytes a call where the pieces allow that.
    Outcome allow(const std::vector<int> &devices, bool allowed, std::uint64_t step);
    // Takes back piece by piece, the last first; where that fails, goes on from there the next time.
    Outcome clear();

  private:
    struct Piece {
        std::uint64_t address, nbytes;
        unsigned long long handle;
        bool mapped;
    };

    Outcome add(std::uint64_t nbytes);
    Outcome called(const char *call, Code code);

    Context &context_;
    std::uint64_t end_; // where the next piece comes
    std::vector<Piece> pieces_;
};

} // namespace asyncmem::gpu
