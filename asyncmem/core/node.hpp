// Blocks as 64-byte nodes in a table of their own: nothing is ever written into the managed memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

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

struct Node {
    uint64_t address;
    uint64_t granules;
    // Not live: the epoch of `stream`'s entry, 0 when clean or when `more` holds the entries.
    // Live: the epoch that home still owed when the block was taken, so that a take can be undone exactly.
    uint64_t epoch;
    uint32_t stream;         // live: home; not live: whose entry `epoch` is
    uint32_t more;           // entry list in the EntryPool (two or more streams), else 0
    uint32_t before, after;  // neighbours by address within the segment
    uint32_t slot;           // Free: position in its candidate list; Cached: next in the bin; Leased: its arena
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

// Nodes never move: growing adds a chunk, so no operation copies the table.
class NodeTable {
public:
    // With the first chunk, because a pool's first growth, on whose way it would come else, has an event loop beside it.
    NodeTable() { add_chunk(0); }

    Node& operator[](BlockId id) { return chunks_[id >> chunk_bits][id & (chunk_nodes - 1)]; }
    const Node& operator[](BlockId id) const { return chunks_[id >> chunk_bits][id & (chunk_nodes - 1)]; }
    bool known(BlockId id) const { return id != 0 && id < size_; }
    uint32_t size() const { return size_; }

    // A node to be filled in, of whatever there was before.
    BlockId acquire() {
        if (!reuse_.empty()) {
            BlockId id = reuse_.back();
            reuse_.pop_back();
            return id;
        }
        if (!chunks_[size_ >> chunk_bits]) add_chunk(size_ >> chunk_bits);
        return size_++;
    }

    void release(BlockId id) {
        (*this)[id].state = State::Unused;
        reuse_.push_back(id);
    }

private:
    static constexpr uint32_t chunk_bits = 16;
    static constexpr uint32_t chunk_nodes = 1u << chunk_bits;
    static constexpr uint32_t most_chunks = 4096;
    struct Freed {
        void operator()(Node* chunk) const { std::free(chunk); }
    };

    void add_chunk(uint32_t at) {
        if (at + 1 == most_chunks) throw std::bad_alloc();
        reuse_.reserve(size_t{at + 1} * chunk_nodes);  // so that release() never allocates
        // calloc: the pages of a fresh chunk are touched one by one as nodes are used, not all at once.
        chunks_[at].reset(static_cast<Node*>(std::calloc(chunk_nodes, sizeof(Node))));
        if (!chunks_[at]) throw std::bad_alloc();
    }

    // The table of chunks lies in the object itself: one load less on the way to every node.
    std::unique_ptr<Node[], Freed> chunks_[most_chunks];
    std::vector<BlockId> reuse_;
    uint32_t size_ = 1;
};

}  // namespace asyncmem
