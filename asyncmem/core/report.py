"""What the heap says about itself. The compiled heap and its plain twin answer with the same tuples."""

import enum
from typing import Final, NamedTuple, TypedDict


class HeapOptions(TypedDict, total=False):
    """What a heap can be told, at birth and at run time. Sizes are bytes; the caps bound what caches keep."""

    small_limit: int
    strategy: str
    stream_cache_blocks: int
    stream_cache_bytes: int
    shared_cache_blocks: int
    shared_cache_bytes: int


class HeapCorrupted(AssertionError):
    """A promise of the heap does not hold; the text names the invariant and the address. Trust nothing any more."""

    __module__ = "asyncmem.core"


class HeapCounts(NamedTuple):
    """Gauges and counters of a whole heap. Sizes are bytes; counters run from the heap's birth."""

    reserved: int
    """Bytes in segments, and mapped in spaces: always live + free + cached + lifted."""
    live: int
    """Bytes of granted blocks, rounded to granules; an open lease counts whole."""
    free: int
    """Bytes in the free index, leases' insides not counted."""
    cached: int
    """Bytes in the stream caches and the shared cache together."""
    lifted: int
    """Bytes in spaces that are held back while memory is mapped or unmapped."""
    empty: int
    """Bytes of segments that are one free block: what could go back to the driver at once."""
    peak_live: int
    """Most bytes ever live at once since the last reset_peaks()."""
    peak_cached: int
    """Most bytes ever reserved and not live at once since the last reset_peaks()."""
    peak_reserved: int
    """Most bytes ever reserved at once since the last reset_peaks()."""
    allocations: int
    """Takes that were granted, those inside leases included."""
    frees: int
    """Blocks freed."""
    stream_hits: int
    """Takes served by the stream's own cache."""
    shared_hits: int
    """Takes served by the shared cache."""
    placed: int
    """Takes served by placement in mapped memory."""
    foreign: int
    """Takes that had to discharge another stream's entries."""
    misses: int
    """Takes that found no memory (one request may miss several times)."""
    refusals: int
    """Takes refused by an account's limit."""
    barred: int
    """Fast takes turned away by a closed gate."""
    splits: int
    """Blocks cut in two."""
    merges: int
    """Neighbours joined."""
    live_blocks: int
    """Blocks granted, leased ones included."""
    free_blocks: int
    """Blocks in the free index, those inside leases included."""
    cached_blocks: int
    """Blocks in the caches."""
    segments: int
    """Segments added and not removed, and spaces that have memory."""
    streams: int
    """Streams known."""
    accounts: int
    """Accounts in use, the pool's own included."""
    leases: int
    """Leases open."""
    touched: int
    """Most nodes that any one take examined: bounded, whatever the number of blocks."""


class Piece(NamedTuple):
    """A handle that is mapped, or a segment that is one free block."""

    segment: int
    """The segment, or the space that the handle is mapped in."""
    address: int
    """Where it starts."""
    nbytes: int
    """Its size; a handle is unmapped as a whole."""
    entries: tuple[tuple[int, int], ...]
    """(stream, epoch) of the uses that are not known to be done."""


class Move(NamedTuple):
    """A handle that leaves its address, and where it goes."""

    segment: int
    """The space it is mapped in."""
    address: int
    """Where it is mapped."""
    nbytes: int
    """How large it is."""
    to: int
    """The address to map it at as well, in the plan's space; 0 where it is released."""
    uses: tuple[tuple[int, int], ...]
    """(stream, epoch) of what is to be done before it is unmapped where it was; none where it is released."""


class Plan(NamedTuple):
    """How a request gets memory in a space. All that it names is lifted: no other request takes it until it is let go.

    The moves come first, of which some release memory, then the new handles, so that there is never more memory than
    before and after.
    """

    segment: int
    """The space that the request is to be served in, or an ordinary segment where nothing is to be done."""
    address: int
    """Where; once this is let go, `take_foreign` serves the request here, and owes what the block still waits for."""
    nbytes: int
    """How many bytes are lifted there, 0 where memory is only given back, or nothing is to be done."""
    moves: tuple[Move, ...]
    """What is mapped elsewhere, and unmapped where it was."""
    fresh: tuple[tuple[int, int], ...]
    """(address, bytes) of each new handle."""


class AccountCounts(NamedTuple):
    """One account's state. Sizes are bytes."""

    parent: int
    """The account above, -1 for none."""
    limit: int | None
    """Most rounded bytes that may be live, None for no limit."""
    live: int
    """Rounded bytes charged to it and to the accounts below it."""
    requested: int
    """The same bytes as they were asked for."""
    peak: int
    """Most bytes ever live at once since the last reset_peaks()."""
    allocations: int
    """Takes granted."""
    frees: int
    """Blocks freed."""
    blocks: int
    """Blocks that are live."""
    stream_hits: int
    """Takes served by a stream's own cache."""
    shared_hits: int
    """Takes served by the shared cache."""
    placed: int
    """Takes served by placement."""


class SegmentCounts(NamedTuple):
    """One segment's state. Sizes are bytes."""

    segment: int
    """Its id in the heap."""
    address: int
    """Where it starts."""
    nbytes: int
    """Its size."""
    arena: int
    """0 for small blocks, 1 for large ones."""
    live: int
    """Bytes granted."""
    free: int
    """Bytes in the free index."""
    cached: int
    """Bytes in caches."""
    live_blocks: int
    """Blocks granted."""
    largest: int
    """Size of its largest free block."""


class BlockInfo(NamedTuple):
    """One block as the walk over a heap finds it."""

    address: int
    """Where it starts."""
    nbytes: int
    """Its rounded size."""
    state: str
    """ "live", "free", "cached" or "leased"."""
    arena: int
    """0 small, 1 large, 2 and above the inside of a lease."""
    stream: int
    """Home stream while live or leased, else 0."""
    account: int
    """Who is charged while live or leased, else 0."""
    entries: tuple[tuple[int, int], ...]
    """(stream, epoch) that a block not in use waits for, sorted by stream; those already done may still be listed."""


class Kind(enum.IntEnum):
    """What a record tells."""

    ALLOCATED = 0
    """A buffer was handed out."""
    FREED = 1
    """A buffer's memory came back."""
    UNDONE = 2
    """An allocation came to nothing, and counts as never made."""
    HELD = 3
    """A buffer was there when recording began."""
    GREW = 4
    """Memory came from the device."""
    TRIMMED = 5
    """Memory went back to the device."""
    WAITED = 6
    """A request that had waited behind other holders of memory left the queue."""
    PRESSURE = 7
    """The pool's pressure changed."""
    OUT_OF_MEMORY = 8
    """A request was refused because there is no such memory."""
    CLOSED = 9
    """The pool was closed; `nbytes` were live then."""


class Level(enum.IntEnum):
    """What served an allocation."""

    MISS = 0
    """Nothing at once: it stood in the queue, for growth or for others to free."""
    STREAM_CACHE = 1
    """The cache of its own stream."""
    SHARED_CACHE = 2
    """The cache that all streams share."""
    MAPPED = 3
    """Free memory that the pool had."""
    FOREIGN = 4
    """Memory of another stream, which its own was made to wait for."""


LOG_ROW: Final = [
    ("time_ns", "<i8"), ("nbytes", "<u8"), ("address", "<u8"), ("span_ns", "<i8"), ("number", "<u8"),
    ("site", "<u4"), ("task", "<u4"), ("tag", "<u2"), ("thread", "<u2"), ("stream", "<u2"),
    ("kind", "u1"), ("level", "u1"),
]  # fmt: skip
"""The fields of a row, as `numpy.dtype` takes them.

`number` tells which allocation it is about; `span_ns` is what came before it: for an allocation from asking to
granting, for a free since the allocation, for the rest what it took. A wait has its priority for an `address`: 0, -1,
1, -2, ... are 0, 1, 2, 3, ... there."""


class LogPart(NamedTuple):
    """A part of what a heap took and freed, in its order."""

    rows: bytes
    """One after the other, laid out as `LOG_ROW` says."""
    lost: int
    """Rows that went before they were read, so far."""
    cut: bool
    """Whether memory ran out, and later rows are missing."""


class RetireCounts(NamedTuple):
    """What the order of streams has cost so far, in driver calls and fences."""

    records: int
    """Fences recorded."""
    waits: int
    """Times that a stream was made to wait for a fence."""
    queries: int
    """Times that a fence was asked whether it is done."""
    late_fences: int
    """Fences recorded only when another stream took the memory; they cover later work too."""
    failed_records: int
    """Fences that could not be recorded at a free; polling tries again."""
    open_fences: int
    """Fences not yet seen done."""


class ReplaySample(NamedTuple):
    """A replay at one moment; sizes in bytes."""

    time_us: float
    """Microseconds on the program's clock, with all that it waited so far."""
    requested: int
    """Live, as it was asked for."""
    live: int
    """Live, rounded to granules."""
    reserved: int
    """What is from the driver."""
    largest_hole: int
    """The largest stretch of memory that is in no use."""


class ReplayWaste(NamedTuple):
    """What was reserved and in no use when the most was reserved."""

    nbytes: int
    """All of it."""
    largest: int
    """The largest stretch."""
    squares: float
    """The sum of the squares of all stretches."""
    stranded: tuple[int, ...]
    """By stream: what waits for its unfinished work or lies in its cache, so that no other may take it at once."""


class ReplayTally(NamedTuple):
    """What became of a program that was replayed. Sizes are bytes, times microseconds where no other unit is named."""

    completed: bool
    """Whether every request was served; the first that was not ends the replay."""
    failed_step: int
    """Where it ended, if it did not complete,"""
    failed_bytes: int
    """and what was asked for there."""
    peak_requested: int
    """The most that was live at once, as it was asked for."""
    peak_live: int
    """The most that was live at once, rounded to granules."""
    peak_reserved: int
    """The most that was reserved at once."""
    takes: int
    """Blocks granted."""
    frees: int
    """Blocks freed."""
    misses: int
    """Requests that found nothing ready."""
    foreign: int
    """Requests for which a stream had to wait for another."""
    waits: int
    """How often the program waited for a fence,"""
    wait_us: float
    """and how long in all."""
    calls: tuple[int, ...]
    """Driver calls, by their place in the costs."""
    driver_us: float
    """What they cost in all."""
    end_us: float
    """The program's clock at the end."""
    waste: ReplayWaste
    """At the peak that `survey_at` names."""
    samples: tuple[ReplaySample, ...]
    """One a `sample_us`."""
    loop_ns: float
    """Nanoseconds that the replay took on this machine,"""
    empty_loop_ns: float
    """and that the same loop takes without a heap."""
