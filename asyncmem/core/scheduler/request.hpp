// The scheduler's policy, requests and effects, and how a journal writes them.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <utility>
#include <vector>

#include "heap/heap.hpp"

namespace asyncmem::scheduler {

// The options of a pool about getting, keeping and giving back memory. Times are seconds, sizes bytes.
struct Policy {
    uint64_t limit = no_limit;           // the most that may be reserved
    bool limited = false;                // the user chose it
    bool paged = false;                  // memory comes by pages; else in segments
    bool joins = false;                  // segments side by side, free in a stream's order, become one
    bool direct = false;                 // a segment for each request, which goes back as it is freed
    uint64_t granularity = 1;            // a segment's size is a multiple of it
    uint64_t page = 0;
    uint64_t segment_size = 64 << 20;
    uint64_t small_limit = 1 << 20;      // smaller requests have segments of their own
    uint64_t ready = 0;                  // kept reserved, used or not
    bool late_fences = true;
    // How much may be free while the pool grows rather than make a stream wait: bytes, or a share of the peak.
    uint64_t overlap_bytes = 0;
    double overlap_share = 0;
    uint64_t overlap_least = 0;
    // For how long growth may wait for memory that is about to be ready: for each request, and of all the time.
    double patience = 0;
    double patience_share = std::numeric_limits<double>::infinity();
    bool take_back = true;               // memory in no use serves elsewhere before more than ever is reserved
    double dear = 0.05;                  // of the time moves of pages may take; then new memory is first
    double bypass = 2;
    uint64_t max_waiting = UINT64_MAX;
    bool fallback = false;               // the host serves what the device cannot
    double quiet_after = 0.1;            // without progress for so long, deadlocks are looked for
    double merge_threshold = 0.1;
    bool defragment = true;
    bool adaptive = true;
    double shrink_after = std::numeric_limits<double>::infinity();
    Tuning tuning;                       // the heap's own; its caches are smaller under pressure
};

// What a size takes in a heap of usual granules.
inline uint64_t rounded(uint64_t nbytes) { return (nbytes + 511) & ~uint64_t{511}; }

using RequestId = uint64_t;  // slot and generation; 0 means "no request"

constexpr double never = std::numeric_limits<double>::infinity();

// How much is done for a request that finds no memory.
enum class Effort : uint8_t {
    Take,  // nothing
    Tidy,  // what takes no time: caches are emptied, neighbours joined
    All,
};
constexpr const char* effort_names[] = {"take", "tidy", "all"};

enum class State : uint8_t {
    Waiting,   // queued behind other holders of memory
    Growing,   // within every limit; memory is being made for it
    Ordering,  // has its memory; its stream must still be ordered behind earlier uses
    Granted,   // has its memory, which is not yet claimed
    Failed,    // refused, cancelled or expired
};
constexpr const char* state_names[] = {"waiting", "growing", "ordering", "granted", "failed"};

// Why a request failed.
enum class Reason : uint8_t { None, NoMemory, Expired, Cancelled, Closed, TooMany, Deadlock, Error };
constexpr const char* reason_names[] = {"none",   "no memory", "expired",  "cancelled",
                                        "closed", "too many",  "deadlock", "error"};

// Why there is no memory for a request; part of its error.
enum class Shortage : uint8_t { None, Size, Limit, Fragmentation, Device };

struct Terms {
    double deadline = never;   // in seconds of the pool's clock
    int32_t priority = 0;      // larger is sooner
    Effort effort = Effort::All;
    bool waits = true;         // false: refused rather than queued
    bool calls = false;        // its thread blocks and carries out what it needs by itself
    bool on_loop = false;      // that thread runs an event loop, which must not wait for the device
    bool captured = false;     // for captured work, which can wait for nothing outside of its graph
};

struct Share;

struct Request {
    // What was asked for.
    Ask ask;                           // its size is that of a single buffer, else the sum
    Terms terms;
    std::vector<uint64_t> pieces;      // sizes of a batch, without empty ones; none for a single buffer
    uint64_t total = 0;                // bytes of the heap, all pieces together
    uint64_t largest = 0;              // the largest piece
    Share* share = nullptr;
    double since = 0;                  // when it was asked

    // Where it stands.
    State state = State::Waiting;
    Reason reason = Reason::None;
    Shortage shortage = Shortage::None;
    bool noted = false;                // it stays for now, and counts as waiting or growing
    bool returned = false;             // its call has: an effect says how it ends
    bool missed = false;               // mapped memory had none for it when it came
    bool waited = false;               // it has been behind other holders of memory
    bool grew = false;                 // memory has been made for it
    bool making = false;               // what the last try came to: something is under way for it
    bool pressed = false;              // it takes what it would rather leave: there is nothing better
    bool patient = false;              // it has waited rather than have more reserved than ever
    bool uncut = false;                // what it found is the segment that stays whole, of which it would need a part
    bool cut = false;                  // that segment was to be cut for it, which is tried once
    bool settled = false;              // captured: the host has waited for free memory for its sake
    bool unordered = false;            // its stream could not be ordered behind others' uses
    bool shut = false;                 // its share has ended, or the pool, while its stream was being ordered
    int64_t key = 0;                   // place in the order: bytes that had been queued before it, less its bonus
    uint64_t sequence = 0;             // place in the order of arrival
    std::vector<uint64_t> overtaken;   // what each share on its way had let pass when it came, innermost first
    uint64_t tried = 0;                // version of the heap at which it found nothing
    uint64_t job = 0;                  // the effect under way for it
    uint64_t owner = 0;                // who sleeps on it
    uint32_t sleepers = 0;
    bool asked_again = false;          // the device was asked once more after it had refused
    uint32_t refusals = 0;             // how often the last resort was tried
    uint32_t level = 0;                // account of the share that has no room for it
    uint64_t ahead = 0;                // how many stood before it when it failed

    // What it got.
    std::vector<Granted> blocks;       // one a size
    std::vector<Entries> owed;         // by block, uses to order its stream behind; none where there are none

    // Its place in a RequestQueue.
    Request* left = nullptr;
    Request* right = nullptr;
    uint32_t weight = 0;
    uint64_t least = 0, most = 0;      // totals in its subtree
    uint32_t count = 0;                // requests in it

    RequestId id = 0;                  // 0: the slot is free
    uint32_t generation = 0;
    uint64_t caller = 0;               // whatever the caller wants to find it by

    bool batch() const { return !pieces.empty(); }
    std::span<const uint64_t> sizes() const { return batch() ? std::span(pieces) : std::span(&ask.nbytes, 1); }
    bool queued() const { return state == State::Waiting || state == State::Growing; }
};

// All requests by number. Requests never move.
class Requests {
public:
    Request& add() {
        uint32_t slot = slots_.acquire();
        Request& request = slots_[slot];
        request.id = uint64_t{++request.generation} << 32 | slot;
        return request;
    }

    void remove(Request& request) {
        slots_.release(static_cast<uint32_t>(request.id));
        uint32_t generation = request.generation;
        request = Request{};
        request.generation = generation;
    }

    // The request of that number, or nullptr when it is gone.
    Request* find(RequestId id) {
        uint32_t slot = static_cast<uint32_t>(id);
        return id && slot < slots_.size() && slots_[slot].id == id ? &slots_[slot] : nullptr;
    }

    size_t count() const { return slots_.used(); }

    template <typename Look>
    void each(Look&& look) {
        for (Request& request : slots_)
            if (request.id) look(request);
    }

private:
    Slots<Request, std::deque<Request>> slots_;
};

using JobId = uint64_t;

// How a job ended that is no growth, trim, remapping or wait.
enum class Ending : uint8_t {
    Done,
    Retry,    // the last resort asks for one more try,
    Refused,  // or does not
    Served,   // by the host's memory
};
constexpr const char* ending_names[] = {"done", "retry", "refused", "served"};

struct Effect {
    enum class Kind : uint8_t {
        Granted,        // the request has its memory: wake its waiters, which then call `claim`
        Order,          // order the request's stream behind its `owed` uses: `ordered` or `unordered`
        Failed,         // the request has failed: wake its waiters
        Look,           // record fences on `streams`, then ask which fences are done: `looked`
        Grow,           // give `returns` back, then get a segment: `trimmed`, `grew` or `grow_failed`
        Trim,           // give `returns` back: `trimmed`
        Remap,          // make `moves`, unmap `out`, then map `into`: `remapped`
        Wait,           // wait on the host until `uses` are done, for at most `seconds`: `waited`
        Settle,         // wait on the host for all free memory, for captured work: `waited`
        Spill,          // move `nbytes` of what is charged to `account` to the host: `ended`
        LastResort,     // collect garbage, ask the user: `ended`
        ServeFromHost,  // serve the request from the host's memory: `ended`
        Deadline,       // call `expire` at the time `seconds`
        Quiet,          // call `quiet` at the time `seconds`
        Beat,           // call `begin_beat` and `end_beat` from now on, as long as the latter says
        Pressure,       // the level of pressure is now `level`
        Emptied,        // a pool that is closed or drained holds nothing any more
    };
    static constexpr int kinds = 17;
    static constexpr const char* names[kinds] = {
        "granted", "order",       "failed",          "look",     "grow",  "trim", "remap",    "wait",   "settle",
        "spill",   "last_resort", "serve_from_host", "deadline", "quiet", "beat", "pressure", "emptied"};

    struct Span {
        uint32_t segment;
        uint64_t address, nbytes;
    };

    Kind kind = Kind::Granted;
    bool by_caller = false;  // the thread that made the request carries it out
    bool joins = false;      // of growth: `returns` lie side by side, go back in the stream's order, and are a part of what comes
    uint8_t level = 0;
    uint32_t arena = 0, stream = 0, account = 0;
    RequestId request = 0;
    JobId job = 0;           // names it to the event that ends it
    uint64_t nbytes = 0;     // of growth: what to ask for
    uint64_t need = 0;       // of growth and of remapping: the least that is of use
    uint64_t rest = 0;       // of growth that joins: what of `returns` comes as a second segment
    double seconds = 0;
    std::vector<uint32_t> streams{};
    std::vector<Piece> returns{};   // segments that have left the heap, and go back once their last uses are done
    Entries uses{};
    std::vector<std::pair<Span, uint64_t>> moves{};  // what is mapped, and the address to map it at as well
    std::vector<Span> out{}, into{};
    size_t vacated = 0;      // of `out`: so many of the first are addresses that memory has moved away from
};

// An owner that waits for memory without a queued request: for another task that brings spilled memory back.
struct Claim {
    uint64_t owner;
    uint64_t nbytes;
    uint32_t account;
};

// -- in a journal ------------------------------------------------------------------------------------------------------

inline void put(std::string& text, Effort effort) { asyncmem::put(text, effort_names[static_cast<size_t>(effort)]); }
inline void put(std::string& text, State state) { asyncmem::put(text, state_names[static_cast<size_t>(state)]); }
inline void put(std::string& text, Ending ending) { asyncmem::put(text, ending_names[static_cast<size_t>(ending)]); }
inline void put(std::string& text, Reason reason) { asyncmem::put(text, reason_names[static_cast<size_t>(reason)]); }
inline void put(std::string& text, const Terms& terms) {
    put_all(text, terms.deadline, terms.priority, terms.effort, terms.waits, terms.calls, terms.on_loop, terms.captured);
}
inline void put(std::string& text, const Claim& claim) { put_all(text, claim.owner, claim.nbytes, claim.account); }
inline void put(std::string& text, const Effect::Span& span) { put_all(text, span.address, span.nbytes); }
inline void put(std::string& text, const std::pair<Effect::Span, uint64_t>& move) {
    put_all(text, move.first.address, move.first.nbytes, move.second);
}

inline void put(std::string& text, const Policy& policy) {
    Fields fields(text);
    fields("limit", policy.limit)("limited", policy.limited)("paged", policy.paged)("joins", policy.joins)("direct", policy.direct);
    fields("granularity", policy.granularity)("page", policy.page)("segment_size", policy.segment_size);
    fields("ready", policy.ready)("late_fences", policy.late_fences);
    policy.overlap_share > 0 ? fields("overlap", policy.overlap_share) : fields("overlap", policy.overlap_bytes);
    fields("overlap_least", policy.overlap_least)("patience", policy.patience)("patience_share", policy.patience_share);
    fields("take_back", policy.take_back)("bypass", policy.bypass)("max_waiting", policy.max_waiting);
    fields("fallback", policy.fallback)("quiet_after", policy.quiet_after)("merge_threshold", policy.merge_threshold);
    fields("defragment", policy.defragment)("adaptive", policy.adaptive)("shrink_after", policy.shrink_after);
    put_fields(fields, policy.tuning);
}

inline void put(std::string& text, const Effect& effect) {
    Fields fields(text);
    fields("kind", Effect::names[static_cast<size_t>(effect.kind)]);
    fields.known("request", effect.request).known("job", effect.job).known("by_caller", effect.by_caller);
    fields.known("joins", effect.joins).known("nbytes", effect.nbytes).known("need", effect.need);
    fields.known("rest", effect.rest).known("arena", effect.arena).known("stream", effect.stream);
    fields.known("account", effect.account).known("level", effect.level);
    fields.known("seconds", effect.seconds).known("streams", effect.streams).known("returns", effect.returns);
    fields.known("uses", effect.uses).known("moves", effect.moves).known("out", effect.out).known("into", effect.into);
    fields.known("vacated", effect.vacated);
}

}  // namespace asyncmem::scheduler
