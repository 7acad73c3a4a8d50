# What a pool was told about its memory, as the scheduler takes it.

cdef extern from "scheduler/policy.hpp" namespace "asyncmem::scheduler" nogil:
    cdef struct Policy:
        uint64_t limit
        bint limited, paged, direct
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


cdef Policy _policy_in(dict settings) except *:
    """Read a policy from settings by the names of its fields; the heap's own settings are among them."""
    cdef Policy policy = Policy(
        no_limit, False, False, False, 1, 0, 64 << 20, 1 << 20, 0, True, 0, 0, 0.0, 0.0, float("inf"), True, 2.0,
        0xFFFFFFFFFFFFFFFF, False, 0.1, 0.1, True, True, float("inf"), Tuning(1 << 20, True, 256, 64 << 20, 1024, 256 << 20))
    settings = dict(settings)
    policy.limit = _limit(settings.pop("limit", None))
    policy.limited = settings.pop("limited", policy.limited)
    policy.paged = settings.pop("paged", policy.paged)
    policy.direct = settings.pop("direct", policy.direct)
    policy.granularity = _whole(settings.pop("granularity", policy.granularity), "granularity")
    policy.page = _whole(settings.pop("page", policy.page), "page")
    policy.segment_size = _whole(settings.pop("segment_size", policy.segment_size), "segment_size")
    policy.small_limit = _whole(settings.get("small_limit", policy.small_limit), "small_limit")
    policy.ready = _whole(settings.pop("ready", policy.ready), "ready")
    policy.late_fences = settings.pop("late_fences", policy.late_fences)
    overlap = settings.pop("overlap", 0)
    if isinstance(overlap, float):
        policy.overlap_share = overlap
    else:
        policy.overlap_bytes = _whole(overlap, "overlap")
    policy.overlap_least = _whole(settings.pop("overlap_least", policy.overlap_least), "overlap_least")
    policy.patience = settings.pop("patience", policy.patience)
    policy.patience_share = settings.pop("patience_share", policy.patience_share)
    policy.take_back = settings.pop("take_back", policy.take_back)
    policy.bypass = settings.pop("bypass", policy.bypass)
    most = settings.pop("max_waiting", None)
    policy.max_waiting = 0xFFFFFFFFFFFFFFFF if most is None else _whole(most, "max_waiting")
    policy.fallback = settings.pop("fallback", policy.fallback)
    policy.quiet_after = settings.pop("quiet_after", policy.quiet_after)
    policy.merge_threshold = settings.pop("merge_threshold", policy.merge_threshold)
    policy.defragment = settings.pop("defragment", policy.defragment)
    policy.adaptive = settings.pop("adaptive", policy.adaptive)
    shrink_after = settings.pop("shrink_after", None)
    policy.shrink_after = float("inf") if shrink_after is None else shrink_after
    policy.tuning = _tuned(policy.tuning, settings)
    return policy
