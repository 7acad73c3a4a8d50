// What a pool was told about getting, keeping and giving back memory. Times are seconds, sizes bytes.
#pragma once

#include <cstdint>
#include <limits>

#include "heap.hpp"

namespace asyncmem::scheduler {

struct Policy {
    uint64_t limit = no_limit;           // the most that may be reserved
    bool limited = false;                // the user chose it
    bool paged = false;                  // memory comes by pages; else in segments
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
    double dear = 0.05;                  // of the pool's life moves of pages may take; then new memory is first
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

}  // namespace asyncmem::scheduler
