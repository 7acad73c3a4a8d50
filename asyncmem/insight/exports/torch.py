"""Records as a snapshot of PyTorch's memory, which its viewer and other programs that read those accept.

The pickle has plain data alone, and no numbers or lengths of eight bytes: the viewer's own unpickler knows no more.

A viewer begins with what is there at the end, and undoes the history from its last entry on. Each block must then lie
in a segment at every step, whereas records of several threads may say so a moment later: the segment after the first
block in it, or the old segment's end after the new one's beginning at the same address. Such are put right.
"""

from __future__ import annotations

import pickle
import re
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from typing import Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncmem.core import GRANULE, Kind
from asyncmem.insight.groups import parts
from asyncmem.insight.names import Site
from asyncmem.insight.records import Records
from asyncmem.text import printable

PROTOCOL: Final = 4
"""Of the pickle. The viewer refuses a later one."""

_shown: Final = partial(printable, most=None)
_STREAMS: Final = 1 << 16
_SETTINGS: Final = {
    "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
    "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
}  # fmt: skip
_SMALL: Final = 2 << 20  # segments up to so many bytes are called small
_PAGE: Final = 2 << 20
_NUMBERED: Final = re.compile(r"(?:cuda:)?([0-9]{1,3})")
"""Devices with a number; a snapshot has a list for each below the largest."""

Entry: TypeAlias = dict[str, Any]
What: TypeAlias = dict[str, Any]
"""What is said alike of every entry about a block."""

_UNKNOWN: Final[What] = {"stream": 0, "frames": [], "compile_context": "N/A", "user_metadata": ""}


class Extent(NamedTuple):
    """A range of addresses, at least one, of a segment or a block."""

    address: int
    nbytes: int
    pool: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class _Ranges:
    """Ranges that do not overlap, each with what is said of it."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # in order
        self._by_start: dict[int, tuple[Extent, What]] = {}

    def add(self, extent: Extent, what: What) -> None:
        insort(self._starts, extent.address)
        self._by_start[extent.address] = extent, what

    def remove(self, address: int) -> tuple[Extent, What]:
        del self._starts[bisect_left(self._starts, address)]
        return self._by_start.pop(address)

    def at(self, address: int) -> Extent | None:
        """Return the range that begins there."""
        return self._by_start[address][0] if address in self._by_start else None

    def over(self, extent: Extent) -> list[tuple[Extent, What]]:
        """Return those that have an address in common with a range, in order."""
        first, last = bisect_right(self._starts, extent.address), bisect_left(self._starts, extent.end)
        found = [self._by_start[start] for start in self._starts[max(first - 1, 0) : last]]
        return [one for one in found if one[0].end > extent.address]

    def __iter__(self) -> Iterator[Extent]:
        return (self._by_start[start][0] for start in self._starts)


class AddressSpace:
    """One device, or one pool that lies apart.

    Attributes:
        number: The device's number in the snapshot.
        known: All segments that each pool ever has, in their order.
        fixed: Whether those are there all the time, whatever comes and goes.
        now: When the next entry happens, in microseconds since 1970.
        entries: The history.
    """

    def __init__(self, number: int, *, fixed: bool = False) -> None:
        self.number = number
        self.known: dict[int, list[Extent]] = {}
        self.fixed = fixed
        self.now = 0
        self.entries: list[Entry] = []
        self._come: Counter[int] = Counter()  # how many of those known have come, by pool
        self._segments = _Ranges()
        self._blocks = _Ranges()

    def grow(self, extent: Extent, *, before: bool = False) -> None:
        """Add a segment, now or from the beginning; it may be there already."""
        self._come[extent.pool] += 1
        if not self.fixed and self._segments.at(extent.address) != extent:
            self.add_segment(extent, before=before)

    def trim(self, extent: Extent) -> None:
        """Remove a segment, unless it has blocks: then it has come again."""
        there = self._segments.at(extent.address) == extent
        if there and not self.fixed and not self._blocks.over(extent):
            self._segments.remove(extent.address)
            self._note("segment_free", extent, _UNKNOWN)

    def take(self, extent: Extent, what: What, *, before: bool = False) -> None:
        """Add a block, now or from the beginning. What lay there is gone, whether or not its free was recorded."""
        if not self._segments.over(extent._replace(nbytes=1)):
            # The segment that comes next there, or else the one that was there last.
            known, come = self.known[extent.pool], self._come[extent.pool]
            order = [*known[come:], *reversed(known[:come])]
            self.add_segment(next(one for one in order if one.address <= extent.address < one.end), before=before)
        for gone, _ in self._blocks.over(extent):
            if before:
                self._blocks.remove(gone.address)
            else:
                self.free(gone)
        self._blocks.add(extent, what)
        if not before:
            self._note("alloc", extent, what)

    def free(self, extent: Extent) -> None:
        """Free a block; the event has the details of its allocation."""
        if self._blocks.at(extent.address):
            freed, what = self._blocks.remove(extent.address)
            self._note("free_requested", freed, what)
            self._note("free_completed", freed, what)

    def refuse(self, nbytes: int, free: int, what: What) -> None:
        """Note a request that was refused for lack of memory."""
        self.entries.append({"action": "oom", "device_free": free, "size": nbytes, "time_us": self.now, **what})

    def add_segment(self, extent: Extent, *, before: bool) -> None:
        """Put a segment there, in the place of others that lie there."""
        for old, _ in self._segments.over(extent):
            for block, _ in self._blocks.over(old):
                self.free(block)
            self.trim(old)
        self._segments.add(extent, _UNKNOWN)
        if not before:
            self._note("segment_alloc", extent, _UNKNOWN)

    def segments(self) -> Iterator[Entry]:
        """Return what there is now."""
        for segment in self._segments:
            blocks = list(tiles(segment, self._blocks.over(segment)))
            live = sum(one["size"] for one in blocks if one["state"] != "inactive")
            yield {
                "device": self.number, "address": segment.address, "total_size": segment.nbytes, "allocated_size": live,
                "active_size": live, "requested_size": sum(one["requested_size"] for one in blocks), "stream": 0,
                "segment_type": "small" if segment.nbytes <= _SMALL else "large",
                "segment_pool_id": (0, segment.pool), "is_expandable": False, "frames": [], "blocks": blocks,
            }  # fmt: skip

    def _note(self, action: str, extent: Extent, what: What) -> None:
        entry = {"action": action, "addr": extent.address, "size": extent.nbytes, "time_us": self.now}
        self.entries.append(entry | what)


def tiles(segment: Extent, held: list[tuple[Extent, What]]) -> Iterator[Entry]:
    """Lay blocks and what is free between them side by side, from end to end."""
    at = segment.address
    limits = [extent.address for extent, _ in held] + [segment.end]
    for (extent, what), limit in zip(held, limits[1:], strict=True):
        if extent.address > at:
            yield _tile(at, extent.address - at)
        nbytes = min(-(-extent.nbytes // GRANULE) * GRANULE, limit - extent.address)
        asked = min(extent.nbytes, nbytes)
        yield _tile(extent.address, nbytes) | {
            "requested_size": asked, "state": "active_allocated", "frames": what["frames"],
        }  # fmt: skip
        at = extent.address + nbytes
    if at < segment.end:
        yield _tile(at, segment.end - at)


def _tile(address: int, nbytes: int) -> Entry:
    return {"address": address, "size": nbytes, "requested_size": 0, "state": "inactive", "frames": []}


def spaces_of(records: Records) -> list[AddressSpace]:
    """Return the address space of each pool, with its segments.

    Those of a CUDA device share one, for its addresses are of one kind. Where it is not known in which segments a
    pool's buffers lie, because it reserves by pages or because the beginning is lost, the space is fixed, and its
    segments are the ranges in which buffers lie at any time.
    """
    names = records.names.pools
    numbers = [int(at[1]) if (at := _NUMBERED.fullmatch(name.device)) else None for name in names]
    further = count(1 + max((number for number in numbers if number is not None), default=-1))
    devices = {number: AddressSpace(number) for number in numbers if number is not None}
    found = []
    rows_of = dict(parts(records.rows[records.rows["nbytes"] > 0], "pool"))  # what has no bytes lies nowhere
    for pool, number in enumerate(numbers):
        rows = rows_of.get(pool, records.rows[:0])
        grown = rows[rows["kind"] == Kind.GREW]
        blocks = rows[(rows["kind"] == Kind.ALLOCATED) | (rows["kind"] == Kind.HELD)]
        segments = [Extent(address, nbytes, pool) for address, nbytes in grown[["address", "nbytes"]].tolist()]
        fixed = not _all_in(blocks["address"], segments)
        space = AddressSpace(next(further), fixed=fixed) if fixed or number is None else devices[number]
        space.known[pool] = segments
        for extent in _ranges(blocks, pool) if fixed and len(blocks) else ():
            space.add_segment(extent, before=True)
        found.append(space)
    return found


def _all_in(addresses: NDArray[np.uint64], segments: list[Extent]) -> bool:
    if any(one.address == 0 for one in segments):
        return False
    ordered = sorted(segments)
    starts = np.array([one.address for one in ordered], np.uint64)
    ends = np.maximum.accumulate(np.array([one.end for one in ordered], np.uint64)) if ordered else starts
    at = np.searchsorted(starts, addresses, side="right")
    return bool((at > 0).all() and (addresses < ends[at - 1]).all()) if len(addresses) else True


def _ranges(blocks: NDArray[np.void], pool: int) -> Iterator[Extent]:
    """Return the pages that blocks lie in, those side by side as one range."""
    blocks = blocks[np.argsort(blocks["address"], kind="stable")]
    starts = blocks["address"].astype(np.int64) // _PAGE * _PAGE
    ends = -(-(blocks["address"].astype(np.int64) + blocks["nbytes"].astype(np.int64)) // _PAGE) * _PAGE
    ends = np.maximum.accumulate(ends)
    first = np.flatnonzero(np.append(True, starts[1:] > ends[:-1]))
    lengths = np.maximum.reduceat(ends, first) - starts[first]
    return (Extent(start, nbytes, pool) for start, nbytes in zip(starts[first].tolist(), lengths.tolist(), strict=True))


def write_torch(records: Records, file: BinaryIO) -> None:
    """Write what `torch.cuda.memory._dump_snapshot` would: history, segments, and what lies in them at the end."""
    pickle.dump(snapshot(records), file, protocol=PROTOCOL)


def snapshot(records: Records) -> dict[str, Any]:
    """Return the same as an object.

    A pool's device has its number where that is a CUDA device. Pools of other devices, and pools of which it is not
    known where their segments lie, have the numbers behind those, one each.
    """
    by_pool = spaces_of(records)
    _carry_out(records, by_pool)
    spaces = sorted(set(by_pool), key=lambda one: one.number)
    traces: list[list[Entry]] = [[] for _ in range(1 + max((one.number for one in spaces), default=0))]
    for space in spaces:
        traces[space.number] = space.entries
    return {
        "segments": [segment for one in spaces for segment in one.segments()],
        "device_traces": traces,
        "allocator_settings": dict(_SETTINGS),
        "external_annotations": [],
    }


def _carry_out(records: Records, by_pool: list[AddressSpace]) -> None:
    """Carry out in the address spaces what happened, in its order."""
    rows, names = records.rows, records.names
    reserved: Counter[int] = Counter()

    @cache
    def spelled(line: Site) -> dict[str, Any]:
        return {"filename": _shown(line.file), "line": line.line, "name": _shown(line.function)}

    @cache  # the same list for all of a site, so that the file has it once
    def frames(site: int) -> list[dict[str, Any]]:
        return [spelled(line) for line in names.frames(site)]

    began = (rows["time_ns"] == rows["time_ns"][:1]).tolist()
    times = ((rows["time_ns"] + round(records.wall * 1e9) - records.began) // 1000).tolist()
    columns = (rows[name].tolist() for name in ("kind", "pool", "address", "nbytes", "stream", "site", "tag"))
    for time, early, kind, pool, address, nbytes, stream, site, tag in zip(times, began, *columns, strict=True):
        if not nbytes:
            continue  # it lies nowhere
        space, extent = by_pool[pool], Extent(address, nbytes, pool)
        space.now = time
        what = {
            "stream": stream and pool * _STREAMS + stream, "frames": frames(site),
            "compile_context": "N/A", "user_metadata": _shown(names.tag(tag) or ""),
        }  # fmt: skip
        match kind:
            case Kind.GREW:
                reserved[pool] += nbytes
                space.grow(extent, before=early)
            case Kind.TRIMMED:
                reserved[pool] -= nbytes
                space.trim(extent)
            case Kind.ALLOCATED | Kind.HELD:
                space.take(extent, what, before=early and kind == Kind.HELD)
            case Kind.FREED:
                space.free(extent)
            case Kind.OUT_OF_MEMORY:
                space.refuse(nbytes, max(names.pools[pool].limit - reserved[pool], 0), what)
