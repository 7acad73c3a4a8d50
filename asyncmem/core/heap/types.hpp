// What a heap is asked and returns, and how a journal writes it.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "accounts.hpp"
#include "journal.hpp"
#include "log.hpp"
#include "node.hpp"
#include "pages.hpp"

namespace asyncmem {

[[noreturn]] inline void refuse_argument(const char* why) { throw std::invalid_argument(why); }

constexpr uint64_t max_size = uint64_t{1} << 47;
constexpr uint64_t nowhere = UINT64_MAX;  // no address
constexpr uint64_t largest_handle = uint64_t{2} << 30;  // the longest call for one, its release, takes some 2 ms
constexpr uint64_t usual_parts = 16;  // of a request: a handle is no larger than one of them

// NoPages: there are addresses, but not all of the memory. Uncut: what was found is the segment that stays whole.
enum Reason : uint8_t { Served, NoMemory, OverLimit, GateClosed, NoPages, Uncut };
// How far another stream must have come with a block that a request may get: done with it, or only fenced, or anything.
enum class Bound : uint8_t { Done, Recorded, Any };
enum Flag : uint32_t { Waiting = 1, LiveCrossed = 2 };

struct Tuning {
    uint64_t small_limit = 1 << 20;
    bool best_fit = true;
    uint64_t stream_cache_blocks = 256;
    uint64_t stream_cache_bytes = 64 << 20;
    uint64_t shared_cache_blocks = 1024;
    uint64_t shared_cache_bytes = 256 << 20;
};

struct Ask {
    uint64_t nbytes = 0;
    uint32_t stream = 0;
    uint32_t account = 0;
    int32_t arena = -1;     // -1: by size
    bool anywhere = false;  // the other one of arenas 0 and 1 will do as well
    bool cuts = false;      // the segment that stays whole will do as well
    bool fast = false;      // by the fast path: refused while a gate is closed, unless that is ajar
    bool again = false;     // asked before: the caches learn nothing from it
    bool caused = false;    // the log is read, and `cause` says for it who asks
    Cause cause{};          // left as it lies otherwise
};

// What became of the latest take.
struct Outcome {
    uint8_t level = 0;  // 1 stream cache, 2 shared cache, 3 placed, 0 missed
    Reason reason = Served;
    bool passing = false;  // by a gate that is ajar
    uint32_t flags = 0;
    uint32_t touched = 0;  // nodes and candidates examined
    uint64_t address = 0;
};

// One block of a take_many.
struct Granted {
    BlockId block;
    uint64_t address;
};

struct Segment {
    uint64_t address = 0, nbytes = 0;
    uint64_t mapped = 0;    // bytes that have memory behind them: all of them, but for a space
    BlockId first = 0;
    BlockId container = 0;  // a lease's range: the leased block it lies in
    uint32_t arena = 0;
    std::unique_ptr<Space> space{};  // none for an ordinary one
    uint64_t page = 0;               // a space's
    bool used = false;
};

struct Counts {
    uint64_t reserved, live, free, cached, empty;
    uint64_t peak_live, peak_cached, peak_reserved;
    uint64_t allocations, frees, stream_hits, shared_hits, placed, foreign, misses, refusals, barred, splits, merges;
    uint64_t lifted, live_blocks, free_blocks, cached_blocks, segments, streams, accounts, leases, touched;
};

struct SegmentInfo {
    uint32_t id, arena;
    uint64_t address, nbytes, live, free, cached, largest;
    uint64_t live_blocks;
};

// Memory that could go back to the device, or serve elsewhere, once its uses are done: a segment, or some pages.
struct Piece {
    uint32_t segment = 0;
    uint64_t address = 0, nbytes = 0;
    Entries uses{};
    uint32_t arena = 0;  // of a segment
};

struct BlockInfo {
    uint64_t address, nbytes;
    State state;
    uint32_t arena, stream, account;
    Entries entries;
};

struct Range {
    uint64_t address, nbytes;
};

// What is reserved and in no use: its stretches between blocks that are.
struct Waste {
    uint64_t bytes = 0, largest = 0;
    double squares = 0;              // of each hole's bytes
    std::vector<uint64_t> stranded;  // by stream: what only that stream may take without waiting
};

// A handle that is idle where it is mapped, and the bare address to map it at as well; 0 to release it.
struct Move {
    uint32_t segment;
    uint64_t address, nbytes;
    uint64_t to;
    Entries uses{};  // what is to be done before it is unmapped where it was
};

// How a request gets its memory: all of the range is lifted, and parts of it have none yet.
struct Plan {
    bool found = false;
    uint32_t segment = 0;
    uint64_t address = 0, nbytes = 0;
    std::vector<Move> moves;
    std::vector<Range> fresh;  // what nothing is moved to
    uint64_t ahead = 0;        // bytes of that behind the request
    Entries waits;             // nothing found, and done once these are: enough to find something
    std::vector<Piece> later;  // the same in its parts, in the order in which they were freed
};

// -- in a journal ------------------------------------------------------------------------------------------------------

inline void put(std::string& text, const Entry& entry) { put_all(text, entry.stream, entry.epoch); }
inline void put(std::string& text, const Granted& one) { put_all(text, one.block, one.address); }
inline void put(std::string& text, const Piece& one) { put_all(text, one.address, one.nbytes, one.uses); }
inline void put(std::string& text, const Ask& ask) {
    put_all(text, ask.nbytes, ask.stream, ask.account, ask.arena, ask.anywhere, ask.again, ask.fast);
}
inline void put(std::string& text, const Outcome& outcome) {
    put_all(text, outcome.level, static_cast<uint8_t>(outcome.reason), outcome.flags, outcome.address);
}

// An object, field by field.
class Fields {
public:
    explicit Fields(std::string& text) : text_(text) { text_ += '{'; }
    ~Fields() { text_ += '}'; }
    template <typename Value>
    Fields& operator()(const char* name, const Value& value) {
        put(text_ += first_ ? "" : ",", name);
        put(text_ += ':', value);
        first_ = false;
        return *this;
    }
    // The same where there is something to say.
    template <typename Value>
    Fields& known(const char* name, const Value& value) {
        if constexpr (requires { value.empty(); })
            return value.empty() ? *this : (*this)(name, value);
        else
            return value == Value{} ? *this : (*this)(name, value);
    }

private:
    std::string& text_;
    bool first_ = true;
};

// By the names that Python has for them.
inline void put_fields(Fields& fields, const Tuning& tuning) {
    fields("small_limit", tuning.small_limit)("strategy", tuning.best_fit ? "best_fit" : "good_fit");
    fields("stream_cache_blocks", tuning.stream_cache_blocks)("stream_cache_bytes", tuning.stream_cache_bytes);
    fields("shared_cache_blocks", tuning.shared_cache_blocks)("shared_cache_bytes", tuning.shared_cache_bytes);
}
inline void put(std::string& text, const Tuning& tuning) {
    Fields fields(text);
    put_fields(fields, tuning);
}

}  // namespace asyncmem
