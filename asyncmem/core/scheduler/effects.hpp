// What the scheduler wants done. Small records of integers: whoever carries one out tells its end by the event named here.
#pragma once

#include <cstdint>
#include <vector>

#include "request.hpp"

namespace asyncmem::scheduler {

using JobId = uint64_t;

// A segment that has left the heap and has to go back to the device, once its last uses are done.
struct Return {
    uint64_t address, nbytes;
    Entries uses;
};

struct Effect {
    enum class Kind : uint8_t {
        Granted,        // the request has its memory: wake whoever waits, who then calls `claim`
        Order,          // order the request's stream behind its `owed` uses: `ordered` or `unordered`
        Failed,         // the request has failed: wake whoever waits
        Look,           // record fences on `streams`, then ask which fences are done: `looked`
        Grow,           // give `returns` back, then get a segment: `trimmed`, `grew` or `grow_failed`
        Trim,           // give `returns` back: `trimmed`
        Remap,          // unmap `out`, then map `into`: `remapped`
        Wait,           // wait on the host until `uses` are done, for at most `seconds`: `waited`
        Settle,         // wait on the host for all free memory, for captured work: `waited`
        Spill,          // move `nbytes` of what is charged to `account` to the host: `spilled`
        LastResort,     // collect garbage, ask the user: `retry` or `refuse`
        ServeFromHost,  // serve the request from the host's memory: `served_elsewhere` or `refuse`
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
    uint8_t level = 0;
    uint32_t arena = 0, stream = 0, account = 0;
    RequestId request = 0;
    JobId job = 0;           // names it to the event that ends it
    uint64_t nbytes = 0;     // of growth: what to ask for
    uint64_t need = 0;       // of growth: the least that is of use; of remapping: bytes that the device must have to spare
    double seconds = 0;
    std::vector<uint32_t> streams{};
    std::vector<Return> returns{};
    Entries uses{};
    std::vector<Span> out{}, into{};
    size_t moved = 0;        // of `into`: so many of the first get what was unmapped
    size_t ahead = 0;        // so many of the last are ahead of need, and may fail
};

}  // namespace asyncmem::scheduler
