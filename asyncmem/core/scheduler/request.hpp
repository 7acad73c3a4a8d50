// A request: what was asked for, where it stands, and what became of it.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <vector>

#include "heap.hpp"

namespace asyncmem::scheduler {

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
    Granted,   // has its memory, and nobody has taken it yet
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
    bool noted = false;                // it stays for now, and counts among those who wait or grow
    bool told = false;                 // its call has returned: whoever waits for it is told of its end
    bool missed = false;               // mapped memory had none for it when it came
    bool promised = false;             // its bytes count in every share on its way
    bool waited = false;               // it has been behind other holders of memory
    bool grew = false;                 // memory has been made for it
    bool making = false;               // what the last try came to: something is under way for it
    bool pressed = false;              // it takes what it would rather leave: nothing better can be had
    bool patient = false;              // it has waited rather than have more reserved than ever
    bool settled = false;              // captured: the host has waited for free memory for its sake
    bool unordered = false;            // its stream could not be ordered behind others' uses
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
    BlockId block = 0;
    uint64_t address = 0;
    std::vector<Granted> blocks;       // of a batch
    std::vector<std::pair<BlockId, Entries>> owed;  // uses to order its stream behind

    // Its place in a RequestQueue.
    Request* left = nullptr;
    Request* right = nullptr;
    Request* up = nullptr;
    uint32_t weight = 0;
    uint64_t least = 0, most = 0;      // totals in its subtree
    uint32_t count = 0;                // requests in it

    RequestId id = 0;                  // 0: the slot is free
    uint32_t generation = 0;
    uint64_t caller = 0;               // whatever the caller wants to find it by

    bool batch() const { return !pieces.empty(); }
    bool queued() const { return state == State::Waiting || state == State::Growing; }
    bool holds_memory() const { return state == State::Ordering || state == State::Granted; }
};

// All requests by number. Requests never move.
class Requests {
public:
    Request& add() {
        if (free_.empty()) {
            slots_.emplace_back();
            free_.push_back(static_cast<uint32_t>(slots_.size() - 1));
        }
        uint32_t slot = free_.back();
        free_.pop_back();
        Request& request = slots_[slot];
        request.id = uint64_t{++request.generation} << 32 | slot;
        ++count_;
        return request;
    }

    void remove(Request& request) {
        uint32_t slot = static_cast<uint32_t>(request.id), generation = request.generation;
        request = Request{};
        request.generation = generation;
        free_.push_back(slot);
        --count_;
    }

    // The request of that number, or nullptr when it is gone.
    Request* find(RequestId id) {
        uint32_t slot = static_cast<uint32_t>(id);
        return id && slot < slots_.size() && slots_[slot].id == id ? &slots_[slot] : nullptr;
    }

    size_t count() const { return count_; }

    template <typename Look>
    void each(Look&& look) {
        for (Request& request : slots_)
            if (request.id) look(request);
    }

private:
    std::deque<Request> slots_;
    std::vector<uint32_t> free_;
    size_t count_ = 0;
};

}  // namespace asyncmem::scheduler
