"""Which addresses a request gets that finds no memory, and which memory is put there."""

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from typing_extensions import override

from asyncmem.core.report import Move, Plan
from tests.reference.blocks import Block, Entries, joined, listed
from tests.reference.place import Search
from tests.reference.spaces import Handle, Space, Spaces
from tests.reference.takes import MAX_SIZE, REACHES

UNREADY: Final = 32
"""Handles in a row that are not ready, after which none is expected to be."""
EVERYTHING: Final = 2**63 - 1
Reaches: TypeAlias = tuple[tuple[str, int], ...]


class Picking:
    """The choice of idle handles for one plan, outside the range that the plan is for."""

    def __init__(self, heap: "Plans", segment: int = -1, kept: range = range(0), early: int | None = None) -> None:
        self.heap, self.segment, self.kept, self.early = heap, segment, kept, early
        idle = [one for one in heap.all_handles.values() if heap.idle(one) is not None and not self.is_kept(one)]
        self.rest = sorted(idle, key=lambda handle: (handle.freed, handle.address))
        self.later: list[Handle] = []

    def next(self, gap: int = 0) -> Handle | None:
        """Return the ready handle that has been idle the longest, each once.

        What fits in a gap of so many bytes is ready as soon as only the stream `early` still uses it.
        """
        for _ in range(UNREADY):
            if not self.rest:
                return None
            handle = self.rest.pop(0)
            if self.heap.ready(handle, self.early if handle.nbytes <= gap else None):
                return handle
            self.later.append(handle)
        return None

    def is_kept(self, handle: Handle) -> bool:
        """Return whether a handle lies in the range that the plan is for."""
        below, above = handle.address + handle.nbytes <= self.kept.start, handle.address >= self.kept.stop
        return handle.segment == self.segment and not (below or above)

    def waits(self, nbytes: int) -> Entries:
        """Return what to wait for so that handles of so many bytes more are ready, if there are so many."""
        entries: Entries = {}
        for handle in (*self.later, *self.rest):
            entries = joined(entries, self.heap.undone(handle.uses))
            nbytes -= handle.nbytes
            if nbytes <= 0:
                return entries
        return {}


class Anew(NamedTuple):
    """The free block before the end, the one of addresses that were never used, and how many granules of that."""

    last: Block | None
    end: Block
    more: int


class Spot(NamedTuple):
    """How many bytes a request lacks at an address, and how large the free range there is; the least is best."""

    missing: int
    size: int
    address: int


class Plans(Spaces):
    """Plans for requests that miss, and for giving memory back."""

    def plan(
        self, nbytes: int, stream: int, arena: int = -1, room: int = 0, most: int = EVERYTHING,
        foreign: bool = True, late: bool = True, parts: int = 16, early: bool = True,
    ) -> Plan | tuple[tuple[int, int], ...]:  # fmt: skip
        """Return a Plan for a request, or the entries that make it possible once they are done."""
        self.need_stream(stream)
        if not 0 < nbytes <= MAX_SIZE:
            raise ValueError("size must be from 1 to 2**47 bytes")
        if parts < 1:
            raise ValueError("parts must be at least 1")
        size = self.rounded(nbytes)
        arena = self.natural_arena(size) if arena < 0 else arena
        if arena not in self.arenas:
            raise ValueError("unknown arena")
        segment = next((n for n in self.spaces if self.segments_by_id[n].arena == arena), None)
        if segment is None:
            return ()
        reaches = searches(foreign=foreign, late=late)
        block = self.find_addresses(size, stream, arena, reaches)
        spot = self.cheapest(segment, size, stream, anew=True) if block is None and self.around else None
        anew = None if block or self.around else self.new_addresses(segment, size, stream, reaches)
        block = self.block_of(segment, block, spot, anew)
        if block is None:
            return ()
        if block.segment != segment:
            return Plan(block.segment, block.address, 0, (), ())
        window = self.window(segment, block.address if spot is None else spot.address, size)
        picking = Picking(self, segment, window, stream if early else None)
        chosen, fresh, beyond = self.fill(picking, segment, window, 0 if parts == 1 else size // parts, room)
        if beyond > most:
            return listed(picking.waits(beyond - most))
        moves = tuple(self.lift_handle(handle, to) for handle, to in chosen)
        if anew is not None:
            self.extend(anew, stream, reaches)
        self.lift_window(segment, window, stream if spot else None)
        return Plan(segment, window.start, len(window), moves, tuple(fresh))

    def block_of(self, segment: int, found: Block | None, spot: Spot | None, anew: Anew | None) -> Block | None:
        """Return the block that a request begins in, or that its new addresses are behind."""
        if spot is not None:
            return self.block_around(segment, spot.address)
        return found if anew is None else anew.last or anew.end

    def lift_window(self, segment: int, window: range, own: int | None) -> None:
        """Lift what lies in a window, all of it for the stream `own` at once, if one is named."""
        for part in list(self.chain(self.segments_by_id[segment].first)):
            end = min(part.address + part.granules * self.granule, window.stop)
            start = max(part.address, window.start)
            if start >= end:
                continue
            self.lift(part, start, end - start)
            if own is not None:
                held = self.block_around(segment, start)
                held.entries = {stream: epoch for stream, epoch in held.entries.items() if stream == own}

    def cheapest(self, segment: int, size: int, stream: int, *, anew: bool) -> Spot | None:
        """Return where the least memory is missing, in the smallest range that is as good, and the lowest of those."""
        found = []
        for run in self.runs(segment, stream, anew=anew):
            last = run[-1]
            start, end = run[0].address, last.address + last.granules * self.granule
            space, at_end = self.spaces[segment], last.state == "bare" and last.after is None
            places = self.places(space, start, end, size, at_end=at_end)
            found += [Spot(space.lacks(at, size), end - start, at) for at in places if start <= at <= end - size]
        return min(found, default=None)

    def runs(self, segment: int, stream: int, *, anew: bool) -> Iterator[list[Block]]:
        """Go through the blocks side by side that are bare, or free and for the stream at once; one of them is bare."""
        run: list[Block] = []
        for block in (*self.chain(self.segments_by_id[segment].first), None):
            if block is not None and (
                (block.state == "bare" and (anew or block.after is not None))
                or (block.state == "free" and self.eligible(block, stream, "done"))
            ):
                run.append(block)
                continue
            if any(one.state == "bare" for one in run):
                yield run
            run = []

    @staticmethod
    def places(space: Space, start: int, end: int, size: int, *, at_end: bool) -> set[int]:
        """Return the addresses that are looked at: the ends of a range, and those of stretches with memory."""
        page = space.page
        found = {start} if at_end else {start, (end - size) // page * page}
        pages = space.pages(start, min(end, max(space.handles, default=start) + page) - start)
        for at in pages:
            if at in space.handles and (at == pages[0] or at - page not in space.handles):
                found.add(max(at, start))
            if at in space.handles and at + page not in space.handles:
                found.add((at + page - size) // page * page)
        return found

    @override
    def has_spot(self, _size: int, _stream: int, _arena: int) -> bool:
        arena = self.natural_arena(_size) if _arena < 0 else _arena
        segment = next((n for n in self.spaces if self.segments_by_id[n].arena == arena), None)
        found = self.cheapest(segment, _size, _stream, anew=False) if self.around and segment is not None else None
        return found is not None

    def has_addresses(self, nbytes: int, stream: int, arena: int = -1, foreign: bool = True, late: bool = True) -> bool:
        """Return whether a plan would find addresses among those that were used before."""
        self.need_stream(stream)
        size = self.rounded(nbytes)
        arena = self.natural_arena(size) if arena < 0 else arena
        found = self.find_addresses(size, stream, arena, searches(foreign=foreign, late=late))
        return found is not None or self.has_spot(size, stream, arena)

    def find_addresses(self, size: int, stream: int, arena: int, reaches: Reaches) -> Block | None:
        """Return the block that placement would serve if memory were behind all that is free."""
        for bound, window in reaches:
            if bound == "any" and self.has_spot(size, stream, arena):
                break
            found = self.search_arena(arena, Search(size // self.granule, stream, bound, window))
            if found is not None:
                return found
        return None

    def new_addresses(self, segment: int, size: int, stream: int, reaches: Reaches) -> Anew | None:
        """Return what a request needs of the addresses at the end, and what is free before them; none is used yet."""
        *_, end = self.chain(self.segments_by_id[segment].first)
        if end.state != "bare":
            return None
        last = self.last_used(end, stream, reaches)
        have = 0 if last is None else last.granules * self.granule
        more = self.spaces[segment].up(max(0, size - have)) // self.granule
        return Anew(last, end, more) if more <= end.granules else None

    def last_used(self, end: Block, stream: int, reaches: Reaches) -> Block | None:
        """Return the free block right before the end, joined with what lies free before it, if it may serve."""
        last = end.before
        if last is None or last.state != "free" or not self.eligible(last, stream, reaches[-1][0]):
            return None
        self.index_remove(last)
        last.entries = self.undone(last.entries)
        last = self.join(last) if reaches == REACHES else last
        self.index_add(last)
        return last

    def extend(self, anew: Anew, stream: int, reaches: Reaches) -> None:
        """Let the last free block, or a new one, have the addresses that were never used."""
        last, end, more = anew
        if last is not None:
            self.index_remove(last)
        if more:
            if more < end.granules:
                self.cut(end, more)
            end.state = "pending"
            if last is not None:
                self.absorb(last, end)
        found = last or end
        if reaches != REACHES:  # as a segment is born owing the stream that it was grown for
            found.entries = joined(found.entries, {stream: self.epochs[stream].open})
        self.index_add(found)

    def window(self, segment: int, address: int, size: int) -> range:
        """Return what is lifted for a request: up to the end of its last page, if that has no memory."""
        space = self.spaces[segment]
        last = space.pages(address, size)[-1]
        return range(address, address + size if last in space.handles else last + space.page)

    def fill(
        self, picking: Picking, segment: int, window: range, part: int, room: int
    ) -> tuple[list[tuple[Handle, int]], list[tuple[int, int]], int]:
        """Fill each gap, the largest first: which handles move and where to, what is new, how much beyond the room.

        New handles are as large as `part` rounded down to a power of two; one for each gap if that is 0.
        """
        page = self.spaces[segment].page
        largest = max(page, _power_of_two(part)) if part else 2 << 30
        chosen: list[tuple[Handle, int]] = []
        fresh: list[tuple[int, int]] = []
        beyond = 0
        for address, nbytes in sorted(self.gaps(segment, window), key=lambda gap: -gap[1]):
            while nbytes > room and (handle := picking.next(nbytes)) is not None:
                if handle.nbytes <= nbytes:
                    chosen.append((handle, address))
                    address, nbytes = address + handle.nbytes, nbytes - handle.nbytes  # noqa: PLW2901 -- the gap shrinks
                else:
                    chosen.append((handle, 0))
                    room += handle.nbytes
            beyond += max(0, nbytes - room)
            room = max(0, room - nbytes)
            while nbytes:
                size = min(largest, nbytes)
                fresh.append((address, size))
                address, nbytes = address + size, nbytes - size  # noqa: PLW2901 -- the gap shrinks
        return chosen, fresh, beyond

    def gaps(self, segment: int, window: range) -> Iterator[tuple[int, int]]:
        """Go through the stretches without memory, as (address, bytes)."""
        space = self.spaces[segment]
        start = None
        for at in space.pages(window.start, len(window)):
            if at in space.handles and start is not None:
                yield start, at - start
                start = None
            elif at not in space.handles and start is None:
                start = at
        if start is not None:
            yield start, window.stop - start

    def reclaim(self, nbytes: int) -> Plan | None:
        """Return a Plan that gives idle memory back, the oldest first."""
        picking = Picking(self)
        chosen: list[Handle] = []
        while sum(handle.nbytes for handle in chosen) < nbytes and (handle := picking.next()) is not None:
            chosen.append(handle)
        moves = tuple(self.lift_handle(handle, 0) for handle in chosen)
        return Plan(0, 0, 0, moves, ()) if chosen else None

    def plan_split(self, size: int, most: int) -> Plan | None:
        """Return a Plan by which the largest handles that nobody uses come again in parts."""
        if most < 1:
            raise ValueError("there must be a part at least")
        idle = [one for one in self.all_handles.values() if self.idle(one) is not None and self.ready(one, None)]
        large = [one for one in idle if one.nbytes >= 2 * size]
        large.sort(key=lambda one: (-one.nbytes, self.segments_by_id[one.segment].arena, one.address))
        chosen: list[Handle] = []
        fresh: list[tuple[int, int]] = []
        for handle in large:
            if chosen and handle.segment != chosen[0].segment:
                continue
            powers = 1 << max(0, size.bit_length() - 1), 1 << (-(-handle.nbytes // most) - 1).bit_length()
            part, end = max(self.spaces[handle.segment].page, *powers), handle.address + handle.nbytes
            parts = [(at, min(part, end - at)) for at in range(handle.address, end, part)]
            if len(parts) == 1 or len(fresh) + len(parts) > most:
                break
            chosen.append(handle)
            fresh += parts
        if not chosen:
            return None
        return Plan(chosen[0].segment, 0, 0, tuple(self.lift_handle(one, 0) for one in chosen), tuple(fresh))

    def ready(self, handle: Handle, early: int | None) -> bool:
        """Return whether all uses of a handle are done, or only the stream `early` still uses it."""
        return self.undone(handle.uses).keys() <= {early}

    def lift_handle(self, handle: Handle, to: int) -> Move:
        """Lift an idle handle, which goes to an address."""
        block = self.idle(handle)
        assert block is not None
        self.lift(block, handle.address, handle.nbytes)
        return Move(handle.segment, handle.address, handle.nbytes, to, listed(self.undone(handle.uses)))

    def block_around(self, segment: int, address: int) -> Block:
        """Return the block that an address lies in."""
        return next(
            block
            for block in self.chain(self.segments_by_id[segment].first)
            if block.address <= address < block.address + block.granules * self.granule
        )


def searches(*, foreign: bool, late: bool) -> Reaches:
    """Return the searches for addresses that may be used: take()'s own, those behind recorded fences, or all."""
    return REACHES[:1] if not foreign else REACHES if late else REACHES[:-1]


def _power_of_two(nbytes: int) -> int:
    return 1 << nbytes.bit_length() - 1 if nbytes else 0
