# The options of a pool about its memory, as the scheduler takes them.

cdef extern from "scheduler/request.hpp" namespace "asyncmem::scheduler" nogil:
    cdef struct Policy:
        uint64_t limit
        bint limited, paged, joins, direct
        uint64_t granularity, page, segment_size, small_limit, ready
        bint late_fences
        uint64_t overlap_bytes, overlap_least
        double overlap_share, patience, patience_share
        bint take_back
        double bypass
        uint64_t max_waiting
        bint fallback
        double quiet_after, merge_threshold
        bint defragment, adaptive
        double shrink_after
        Tuning tuning


cdef Policy _defaults  # for what is not said, or None


cdef Policy _policy_in(dict settings) except *:
    """Read a policy from settings by the names of its fields; the heap's own settings are among them."""
    cdef dict values = _defaults
    settings = dict(settings)
    overlap = settings.pop("overlap", 0)
    values["overlap_share" if isinstance(overlap, float) else "overlap_bytes"] = overlap
    for name in list(values):
        value = settings.get(name) if name == "small_limit" else settings.pop(name, None)
        if value is not None:
            values[name] = value
    if not values["granularity"]:
        raise ValueError("granularity must be at least 1")
    values["tuning"] = _tuned(values["tuning"], settings)
    return values
