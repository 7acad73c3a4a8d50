// Blocks as 64-byte nodes in a table of their own: nothing is ever written into the managed memory.
#pragma once

#include <cstdint>

#include "entries.hpp"
#include "reserved.hpp"

namespace asyncmem {

using BlockId = uint32_t;  // index of a node; 0 means "no block"

enum class State : uint8_t {
    Unused,
    Live,     // granted
    Free,     // in the free index of its arena
    Cached,   // in a bin of a stream cache or of the shared cache
    Leased,   // granted, and turned into an arena of its own
    Pending,  // free, on its way into an index
    Bare,     // the addresses of a space that were never used: its end
    Lifted,   // part of a space with memory behind it, held back while pages are mapped or unmapped
    Filling,  // likewise, without memory
};

// What a block owes: not live, what it waits for. Live, `stream` is its home, and `epoch` what that still owed when the
// block was taken, so that a take can be undone exactly.
struct Node : Owed {
    uint64_t address;
    uint64_t granules;
    uint32_t before, after;  // neighbours by address within the segment
    uint32_t slot;           // Free: place in its index; Cached: next in the bin; Leased: its arena
    uint32_t link;           // Free: class of its candidate list; Cached: previous in the bin; Live: level of the take
    uint32_t segment;
    uint32_t arena;
    union {
        uint32_t account;  // live
        uint32_t bare;     // Free or Pending: how many of its pages have no memory behind them
    };
    uint16_t slack;  // rounded size minus the size asked for
    State state;
    bool shared;  // Cached: in the shared cache rather than in its stream's
};
static_assert(sizeof(Node) == 64, "one node a cache line");

inline bool in_use(const Node& node) { return node.state == State::Live || node.state == State::Leased; }

// Nodes never move: the table has its addresses from the start, and growing puts memory behind more of them.
class NodeTable {
public:
    // With its first nodes, because a pool's first growth, on whose way they would come else, has an event loop beside it.
    NodeTable() {
        grow();
        nodes_[0].state = State::Unused;  // touched: what lies there may be a page of 2 MiB
    }

    Node& operator[](BlockId id) { return nodes_[id]; }
    const Node& operator[](BlockId id) const { return nodes_[id]; }
    bool known(BlockId id) const { return id != 0 && id < size_; }
    uint32_t size() const { return size_; }

    // A node to be filled in, of whatever there was before.
    BlockId acquire() {
        if (reusable_) return reuse_[--reusable_];
        if (size_ == room_) [[unlikely]] grow();
        return size_++;
    }

    void release(BlockId id) {
        nodes_[id].state = State::Unused;
        reuse_[reusable_++] = id;
    }

private:
    static constexpr uint32_t step = 1u << 16;
    static constexpr uint32_t most = 1u << 26;

    void grow() {
        uint32_t room = room_ + step;
        nodes_range_.back(size_t{room} * sizeof(Node));
        reuse_range_.back(size_t{room} * sizeof(BlockId));
        room_ = room;
    }

    Reserved nodes_range_{size_t{most} * sizeof(Node)};
    Reserved reuse_range_{size_t{most} * sizeof(BlockId)};  // for all of them, so that release() never allocates
    Node* const nodes_ = static_cast<Node*>(nodes_range_.start());
    BlockId* const reuse_ = static_cast<BlockId*>(reuse_range_.start());
    uint32_t size_ = 1, room_ = 0, reusable_ = 0;
};

}  // namespace asyncmem
