// What memory there is, whose it is, and who may use it.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "abi.hpp"
#include "work.hpp"

enum class Kind { plain, pooled, mapped, host };

struct Memory {
    std::uint64_t address = 0, nbytes = 0;
    Kind kind = Kind::plain;
    CUdevice device = 0;
    Handle owner = 0;                  // its context, pool or physical handle
    std::uint64_t offset = 0;          // of its bytes in the file
    std::map<CUdevice, int> access{};  // of mapped memory
    std::uint64_t block_id = 0;
};

struct Physical {
    Handle handle = 0;
    CUdevice device = 0;
    std::uint64_t nbytes = 0, offset = 0;
    unsigned references = 1;
    std::vector<std::uint64_t> mappings{};  // addresses, the latest last
    CUmemAllocationProp properties{};
};

struct Block {
    std::uint64_t nbytes = 0;
    bool used = false;
    WorkPtr freed;                           // the work that frees it; none: never used
    std::uint64_t stream = 0, count = 0;     // and where in which stream that is
    bool free_now() const { return !used && (!freed || freed->done); }
};

struct Chunk {
    std::uint64_t address = 0, nbytes = 0, offset = 0;
    bool lent = false;  // it is another pool's, too, which accounts for it
};

struct Pool {
    Handle handle = 0;
    CUdevice device = 0;
    std::uint64_t most = 0, threshold = 0;
    std::uint64_t reserved = 0, reserved_high = 0, used = 0, used_high = 0;
    int reuse[3] = {1, 1, 1};  // follow events, opportunistic, internal dependencies
    bool destroyed = false;
    Handle source = 0;  // the pool that an imported one opens memory of
    std::map<CUdevice, int> access;
    std::vector<Chunk> chunks;
    std::map<std::uint64_t, Block> blocks;  // which lie across the borders of chunks side by side
    CUmemPoolProps properties{};
};
