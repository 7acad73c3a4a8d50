// Blocks as 64-byte nodes in a table of their own: nothing is ever written into the managed memory. What a free block
// still waits for: {stream: epoch}, and how far each stream has come.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace asyncmem {

// Things by number, where a number that was given back is used again.
template <class T, class Store = std::vector<T>>
class Slots {
public:
    // The first `count` are in use from the start.
    explicit Slots(uint32_t count = 0) : all_(count) {}

    // A number whose thing is to be filled in, of whatever it was before.
    uint32_t acquire() {
        if (reuse_.empty()) {
            all_.emplace_back();
            return size() - 1;
        }
        uint32_t at = reuse_.back();
        reuse_.pop_back();
        return at;
    }
    void release(uint32_t at) { reuse_.push_back(at); }

    T& operator[](uint32_t at) { return all_[at]; }
    const T& operator[](uint32_t at) const { return all_[at]; }
    uint32_t size() const { return static_cast<uint32_t>(all_.size()); }
    uint32_t used() const { return size() - static_cast<uint32_t>(reuse_.size()); }
    auto begin() { return all_.begin(); }
    auto end() { return all_.end(); }
    auto begin() const { return all_.begin(); }
    auto end() const { return all_.end(); }

private:
    Store all_;
    std::vector<uint32_t> reuse_;
};

struct Entry {
    uint32_t stream;
    uint64_t epoch;
    bool operator==(const Entry&) const = default;
};

using Entries = std::vector<Entry>;  // sorted by stream, one entry a stream

constexpr uint64_t open_epoch = UINT64_MAX;  // of whichever stream

// How far a stream has come. Epochs of one stream finish in order, so three numbers say everything.
struct Epochs {
    uint64_t open = 1;      // the epoch that frees join now
    uint64_t recorded = 0;  // highest epoch that a recorded fence covers
    uint64_t done = 0;      // highest epoch known to be complete

    bool covers(uint64_t epoch) const { return epoch <= std::max(done, recorded); }
};

// Add an entry; of one stream the later epoch stays.
inline void include(Entries& all, const Entry& entry) {
    auto at = std::ranges::lower_bound(all, entry.stream, {}, &Entry::stream);
    if (at == all.end() || at->stream != entry.stream) {
        all.insert(at, entry);
    } else {
        at->epoch = std::max(at->epoch, entry.epoch);
    }
}

// The union, the only way in which obligations are ever joined; what is added need not be sorted.
inline Entries joined(Entries all, const Entries& more) {
    for (const Entry& entry : more) include(all, entry);
    return all;
}

// What something waits for: one entry, or the list of several that an EntryPool keeps for it.
struct Owed {
    uint64_t epoch = 0;   // the entry's, 0 where there is none or a list
    uint32_t stream = 0;  // the entry's
    uint32_t more = 0;    // the list, 0 where there is none
};

// Entry lists of the few that wait for more than one stream. Index 0 is never used.
class EntryPool {
public:
    template <class Look>
    void each(const Owed& owed, Look look) const {
        if (!owed.more) {
            if (owed.epoch) look(Entry{owed.stream, owed.epoch});
            return;
        }
        for (const Entry& entry : lists_[owed.more]) look(entry);
    }

    Entries all(const Owed& owed) const {
        Entries found;
        each(owed, [&](const Entry& entry) { found.push_back(entry); });
        return found;
    }

    // Let it wait for just these; where there are none its stream stays.
    void store(Owed& owed, Entries entries) {
        if (owed.more) release(owed.more);
        owed.more = 0;
        owed.epoch = 0;
        if (entries.size() == 1) {
            owed.stream = entries[0].stream;
            owed.epoch = entries[0].epoch;
        } else if (!entries.empty()) {
            owed.more = lists_.acquire();
            lists_[owed.more] = std::move(entries);
        }
    }

    // Let it wait for a second stream too, by a list in the memory of one that was released.
    void add(Owed& owed, const Entry& second) {
        Entry first{owed.stream, owed.epoch};
        owed.epoch = 0;
        owed.more = lists_.acquire();
        lists_[owed.more].push_back(first.stream < second.stream ? first : second);
        lists_[owed.more].push_back(first.stream < second.stream ? second : first);
    }

    [[gnu::noinline]] uint32_t copy(uint32_t from) {
        uint32_t at = lists_.acquire();
        lists_[at] = lists_[from];
        return at;
    }
    const Entries& operator[](uint32_t at) const { return lists_[at]; }
    size_t used() const { return lists_.used() - 1; }

private:
    void release(uint32_t at) {
        lists_[at].clear();
        lists_.release(at);
    }

    Slots<Entries> lists_{1};
};

// A range of addresses that is had at once, and gets memory as it is needed: what lies in it never moves.
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

    static void* reserve(size_t nbytes) {
        void* start = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
        return start == MAP_FAILED ? nullptr : start;
    }
    bool allow(size_t end) { return mprotect(start_, end, PROT_READ | PROT_WRITE) == 0; }
    void release() { munmap(start_, nbytes_); }

    size_t nbytes_;
    void* start_;
};

using BlockId = uint32_t;  // index of a node; 0 means "no block"

enum class State : uint8_t {
    Unused,
    Live,     // granted
    Free,     // in the free index of its arena
    Cached,   // in a bin of a stream cache or of the shared cache
    Leased,   // granted, and turned into an arena of its own
    Pending,  // free, on its way into an index
    Bare,     // part of a space without memory, in no index: its end or, where takes go around holes, any
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
        if (!unused_) {
            if (size_ == room_) [[unlikely]] grow();
            return size_++;
        }
        return std::exchange(unused_, nodes_[unused_].after);
    }

    void release(BlockId id) {
        nodes_[id].state = State::Unused;
        nodes_[id].after = std::exchange(unused_, id);
    }

private:
    static constexpr uint32_t step = 1u << 16;
    static constexpr uint32_t most = 1u << 26;

    void grow() {
        range_.back(size_t{room_ + step} * sizeof(Node));
        room_ += step;
    }

    Reserved range_{size_t{most} * sizeof(Node)};
    Node* const nodes_ = static_cast<Node*>(range_.start());
    uint32_t size_ = 1, room_ = 0;
    BlockId unused_ = 0;  // the first of a list through `after`
};

}  // namespace asyncmem
