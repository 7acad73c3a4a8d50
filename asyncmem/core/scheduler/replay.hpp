// A recorded program served by the scheduler over a virtual device in virtual time: how much it reserves, what that costs.
//
// Knows no Python and no files. The program's clock is its recorded time plus all that it waited so far. What the driver
// takes is counted but moves no clock: the device would only be less late for it, and two ways to get memory see the same
// fences done. The same steps and setup return the same figures, but for `loop_ns`.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "request.hpp"

namespace asyncmem::replay {

enum class Call : uint8_t { Create, Map, SetAccess, Unmap, Release, AllocAsync, FreeAsync, Alloc, Free, Record, Wait };
constexpr size_t call_count = 11;
constexpr const char* call_names[call_count] = {
    "cuMemCreate", "cuMemMap",  "cuMemSetAccess", "cuMemUnmap",    "cuMemRelease", "cuMemAllocAsync", "cuMemFreeAsync",
    "cuMemAlloc",  "cuMemFree", "cuEventRecord",  "cuStreamWaitEvent"};

struct Point {
    uint64_t nbytes;
    double us;
};

using Curve = std::vector<Point>;  // of rising size

// Straight lines between the points; the first point's cost below it, and the last line goes on for ever.
inline double cost(const Curve& points, uint64_t nbytes) {
    if (points.empty()) return 0;
    if (points.size() == 1 || nbytes <= points[0].nbytes) return points[0].us;
    size_t i = 1;
    while (i + 1 < points.size() && nbytes > points[i].nbytes) ++i;
    const Point &a = points[i - 1], &b = points[i];
    double slope = (b.us - a.us) / static_cast<double>(b.nbytes - a.nbytes);
    return std::max(0.0, a.us + slope * static_cast<double>(nbytes - a.nbytes));
}

using Costs = std::array<Curve, call_count>;

struct Bill {
    std::array<uint64_t, call_count> calls{};
    double us = 0;

    // What is part of a call that was counted already costs, and counts no more.
    void add(const Costs& costs, Call call, uint64_t nbytes, bool part = false) {
        auto at = static_cast<size_t>(call);
        calls[at] += !part;
        us += cost(costs[at], nbytes);
    }
};

// What the program does, in order: columns of one length.
struct Steps {
    const int32_t* slot;    // number of the allocation
    const int64_t* nbytes;  // -1: free what is in the slot
    const int32_t* stream;
    const int64_t* time_us;
    size_t count = 0;
    uint32_t slots = 0, streams = 1;
};

struct Setup {
    scheduler::Policy policy;  // what it says of the host, waiting and idling has no effect here
    double lag_us = 0;         // how late the device is
    double pace = 1;           // the recorded times are multiplied by it
    Costs costs;
    double sample_us = 0;      // time from one sample to the next; 0 for none
    uint64_t survey_at = 0;    // look at what is in no use when so much is reserved for the first time; 0 for never
};

struct Sample {
    double time_us;
    uint64_t requested, live, reserved, largest_hole;
};

struct Tally {
    bool completed = true;
    uint64_t failed_step = 0, failed_bytes = 0;
    uint64_t peak_requested = 0, peak_live = 0, peak_reserved = 0;
    uint64_t takes = 0, frees = 0, misses = 0, foreign = 0;
    uint64_t waits = 0;
    double wait_us = 0;
    Bill bill;
    double end_us = 0;  // the program's clock at the end
    Waste waste;        // as surveyed
    std::vector<Sample> samples;
    double loop_ns = 0, empty_loop_ns = 0;
};

Tally run(const Steps& steps, const Setup& setup);

}  // namespace asyncmem::replay
