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
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, TypeAlias

import numpy as np

from asyncmem.core import GRANULE, Kind
from asyncmem.insight.groups import parts
from asyncmem.text import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.names import Site
    from asyncmem.insight.records import Records

PROTOCOL: Final = 4
"""Of the pickle. The viewer refuses a later one."""

_shown: Final = partial(printable, most=None)
_STREAMS: Final = 1 << 16
_SETTINGS: Final = {
    "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
    "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
}  # fmt: skip
_SMALL: Final = 2 << 20
"""Segments up to so many bytes are called small."""
_PAGE: Final = 2 << 20
_NUMBERED: Final = re.compile(r"(?:cuda:)?([0-9]{1,3})")
"""Devices with a number; a snapshot has a list for each below the largest."""


Entry: TypeAlias = dict[str, Any]
What: TypeAlias = dict[str, Any]
"""What is said alike of every entry about a block."""

UNKNOWN: Final[What] = {"stream": 0, "frames": [], "compile_context": "N/A", "user_metadata": ""}


class Extent(NamedTuple):
    """A range of addresses."""

    address: int
    nbytes: int
    pool: int

    @property
    def end(self) -> int:
        return self.address + self.nbytes


class Block(NamedTuple):
    """What is live."""

    extent: Extent
    segment: int
    """Where the segment begins that it lies in."""
    what: What
    """What is said of it."""


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
        self._addresses: list[int] = []  # of the segments that there are, in order
        self._segments: dict[int, Extent] = {}
        self._inside: dict[int, list[int]] = {}  # where blocks begin, in order, by segments
        self._blocks: dict[int, Block] = {}

    def begin_with(self, extent: Extent) -> None:
        """Have a segment that was there from the beginning."""
        self._come[extent.pool] += 1
        if self._segments.get(extent.address) != extent:
            self._add(extent)

    def grow(self, extent: Extent) -> None:
        """Have a segment come; it may be there already."""
        self._come[extent.pool] += 1
        if not self.fixed and self._segments.get(extent.address) != extent:
            self._add(extent)
            self._note("segment_alloc", extent, UNKNOWN)

    def trim(self, extent: Extent) -> None:
        """Have a segment go; one with blocks in it has come again."""
        if not self.fixed and self._segments.get(extent.address) == extent and not self._inside[extent.address]:
            self._addresses.remove(extent.address)
            del self._segments[extent.address]
            self._note("segment_free", extent, UNKNOWN)

    def take(self, extent: Extent, what: What, *, before: bool = False) -> None:
        """Have a block taken, or be there from the beginning. What lay there is gone, whether or not that was told."""
        segment = self._segment_at(extent.address) or self._make_segment_for(extent, before=before)
        inside = self._inside[segment.address]
        for gone in self._blocks_over(extent, inside):
            if before:
                self._forget(gone)
            else:
                self.free(gone.extent)
        insort(inside, extent.address)
        self._blocks[extent.address] = Block(extent, segment.address, what)
        if not before:
            self._note("alloc", extent, what)

    def free(self, extent: Extent) -> None:
        """Have a block freed. What is said of it is what was said when it was taken."""
        block = self._blocks.get(extent.address)
        if block is not None:
            self._forget(block)
            self._note("free_requested", block.extent, block.what)
            self._note("free_completed", block.extent, block.what)

    def refuse(self, nbytes: int, free: int, what: What) -> None:
        """Have a request refused for which there was no memory."""
        self.entries.append({"action": "oom", "device_free": free, "size": nbytes, "time_us": self.now, **what})

    def segments(self) -> Iterator[Entry]:
        """Return what there is now."""
        for start in self._addresses:
            segment = self._segments[start]
            held = [self._blocks[one] for one in self._inside[start]]
            blocks = list(tiles(segment, held))
            live = sum(one["size"] for one in blocks if one["state"] != "inactive")
            yield {
                "device": self.number, "address": start, "total_size": segment.nbytes, "allocated_size": live,
                "active_size": live, "requested_size": sum(one["requested_size"] for one in blocks), "stream": 0,
                "segment_type": "small" if segment.nbytes <= _SMALL else "large",
                "segment_pool_id": (0, segment.pool), "is_expandable": False, "frames": [], "blocks": blocks,
            }  # fmt: skip

    def _note(self, action: str, extent: Extent, what: What) -> None:
        entry = {"action": action, "addr": extent.address, "size": extent.nbytes, "time_us": self.now}
        self.entries.append(entry | what)

    def _add(self, extent: Extent) -> None:
        for old in list(self._overlapping(extent)):
            for address in tuple(self._inside[old.address]):
                self.free(self._blocks[address].extent)
            self.trim(old)
        insort(self._addresses, extent.address)
        self._inside[extent.address] = []
        self._segments[extent.address] = extent

    def _forget(self, block: Block) -> None:
        inside = self._inside[block.segment]
        del inside[bisect_left(inside, block.extent.address)]
        del self._blocks[block.extent.address]

    def _blocks_over(self, extent: Extent, inside: list[int]) -> list[Block]:
        first, last = bisect_left(inside, extent.address), bisect_left(inside, extent.end)
        found = [self._blocks[one] for one in inside[max(first - 1, 0) : last]]
        return [one for one in found if one.extent.end > extent.address]

    def _segment_at(self, address: int) -> Extent | None:
        at = bisect_right(self._addresses, address)
        found = self._segments[self._addresses[at - 1]] if at else None
        return found if found is not None and address < found.end else None

    def _overlapping(self, extent: Extent) -> Iterator[Extent]:
        first = max(bisect_right(self._addresses, extent.address) - 1, 0)
        last = bisect_right(self._addresses, extent.end - 1)
        there = (self._segments[address] for address in self._addresses[first:last])
        return (one for one in there if one.end > extent.address)

    def _make_segment_for(self, extent: Extent, *, before: bool) -> Extent:
        # The segment that comes next there, or else the one that was there last.
        known, come = self.known[extent.pool], self._come[extent.pool]
        segment = next(
            one for one in [*known[come:], *reversed(known[:come])] if one.address <= extent.address < one.end
        )
        self._add(segment)
        if not before:
            self._note("segment_alloc", segment, UNKNOWN)
        return segment


def tiles(segment: Extent, held: list[Block]) -> Iterator[Entry]:
    """Lay blocks and what is free between them side by side, from end to end."""
    at = segment.address
    limits = [one.extent.address for one in held] + [segment.end]
    for (extent, _, what), limit in zip(held, limits[1:], strict=True):
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
        segments = list(_ranges_of_segments(rows[rows["kind"] == Kind.GREW], pool))
        blocks = rows[(rows["kind"] == Kind.ALLOCATED) | (rows["kind"] == Kind.HELD)]
        fixed = not _all_in(blocks["address"], segments)
        space = AddressSpace(next(further), fixed=fixed) if fixed or number is None else devices[number]
        space.known[pool] = list(_ranges(blocks, pool)) if fixed else segments
        if fixed:
            for extent in space.known[pool]:
                space.begin_with(extent)
        found.append(space)
    return found


def _ranges_of_segments(rows: NDArray[np.void], pool: int) -> Iterator[Extent]:
    for address, nbytes in zip(rows["address"].tolist(), rows["nbytes"].tolist(), strict=True):
        yield Extent(address, nbytes, pool)


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
    apart = np.flatnonzero(starts[1:] > ends[:-1]) + 1
    for first, last in zip([0, *apart.tolist()], [*apart.tolist(), len(blocks)], strict=True):
        if last > first:
            start = int(starts[first])
            yield Extent(start, int(ends[last - 1]) - start, pool)


def write_torch(records: Records, file: BinaryIO) -> None:
    """Write what `torch.cuda.memory._dump_snapshot` would: history, segments, and what lies in them at the end."""
    pickle.dump(snapshot(records), file, protocol=PROTOCOL)


def snapshot(records: Records) -> dict[str, Any]:
    """Return the same as an object.

    A pool's device has its number where that is a CUDA device. Pools of other devices, and pools of which it is not
    known where their segments lie, have the numbers behind those, one each.
    """
    by_pool = spaces_of(records)
    _History(records, by_pool).carry_out()
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


class _History:
    """Carries out in the address spaces what happened, in its order."""

    def __init__(self, records: Records, by_pool: list[AddressSpace]) -> None:
        self._records = records
        self._by_pool = by_pool
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._lines: dict[Site, dict[str, Any]] = {}
        self._reserved = [0] * len(by_pool)

    def carry_out(self) -> None:
        """Carry out all of it."""
        rows = self._records.rows
        columns = (rows[name].tolist() for name in ("kind", "pool", "address", "nbytes", "stream", "site", "tag"))
        began = rows["time_ns"] == rows["time_ns"][:1]
        since = round(self._records.wall * 1e9) - self._records.began
        times = ((rows["time_ns"] + since) // 1000).tolist()
        for time, early, kind, pool, address, nbytes, stream, site, tag in zip(
            times, began.tolist(), *columns, strict=True
        ):
            space = self._by_pool[pool]
            space.now = time
            extent = Extent(address, nbytes, pool)
            if not nbytes:
                continue  # it lies nowhere
            match kind:
                case Kind.GREW | Kind.TRIMMED:
                    self._move(space, extent, came=kind == Kind.GREW, early=early)
                case Kind.ALLOCATED | Kind.HELD:
                    before = early and kind == Kind.HELD
                    space.take(extent, self._what(pool, stream, site, tag), before=before)
                case Kind.FREED:
                    space.free(extent)
                case Kind.OUT_OF_MEMORY:
                    free = max(self._records.names.pools[pool].limit - self._reserved[pool], 0)
                    space.refuse(nbytes, free, self._what(pool, stream, site, tag))

    def _move(self, space: AddressSpace, extent: Extent, *, came: bool, early: bool) -> None:
        self._reserved[extent.pool] += extent.nbytes if came else -extent.nbytes
        if not came:
            space.trim(extent)
        elif early and not space.fixed:
            space.begin_with(extent)
        else:
            space.grow(extent)

    def _what(self, pool: int, stream: int, site: int, tag: int) -> What:
        names = self._records.names
        frames = self._frames.get(site)
        if frames is None:  # the same list for all of a site, so that the file has it once
            lines = names.frames(site)
            frames = [self._spelled(one) for one in lines]
            self._frames[site] = frames
        return {
            "stream": stream and pool * _STREAMS + stream, "frames": frames,
            "compile_context": "N/A", "user_metadata": _shown(names.tag(tag) or ""),
        }  # fmt: skip

    def _spelled(self, line: Site) -> dict[str, Any]:
        return self._lines.setdefault(
            line, {"filename": _shown(line.file), "line": line.line, "name": _shown(line.function)}
        )
