"""Segments: getting them from the device, and giving them back.

Each step has two halves. What is decided (how much, whose, what it counts against the limit) happens with the pool's
turn held and takes no time. The device's part blocks, so it runs without the turn, on the worker or on the thread of a
caller who may block.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from asyncmem.core import Kind
from asyncmem.devices import MemoryInfo
from asyncmem.engine.grow import Growth, Room
from asyncmem.engine.retire import DONE
from asyncmem.errors import DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.pool.exchange import Exchange
from asyncmem.pool.lifetime import Lifetime

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from asyncmem.core import Core, Turn
    from asyncmem.devices import Device, Segment, Stream
    from asyncmem.engine.retire import Entry, Retire
    from asyncmem.options import PoolOptions
    from asyncmem.pool.exchange import EmptySegment
    from asyncmem.pool.waiting import Waiting

    Errand = Callable[[], None]


_LATELY = 10_000
"""Allocations that an emptying of the caches has to last for."""
_TIGHT = 64
"""A limit is near of which such a part is left."""
_LITTLE = 1.125
"""What may be reserved, in terms of the most that was live, so that they need not be emptied again."""


class Order(NamedTuple):
    """Growth that has been decided and counts against the limit.

    Attributes:
        nbytes: What to ask the device for.
        need: The least that is of use, asked for when the device refuses more.
        arena: Which part of the heap it is for.
        stream: The core's index of the stream that wants it, in whose order the device gives it.
    """

    nbytes: int
    need: int
    arena: int
    stream: int


class Return(NamedTuple):
    """A segment that has left the heap and still has to go back to the device.

    Attributes:
        segment: What the device gave.
        entries: Uses (stream, epoch) that the host must see done first.
    """

    segment: Segment
    entries: Sequence[tuple[int, int]]


class Supply:
    """What the pool has from its device. Attributes change under the pool's turn only.

    Attributes:
        limit: The most that may be reserved, in bytes.
        ready: Bytes that are kept reserved, whether or not they are used.
        min_free: Bytes of the device that growth leaves to others.
        overlap: How much may be free while streams that could share it go on side by side: bytes, or a share of the
            most that was live.
        coming: Bytes ordered and not here yet.
        leaving: Bytes out of the heap and not yet given back.
        refused: The smallest need that the device refused since something last changed, or None.
        grows: Segments that came.
        trims: Segments that went.
        by_pages: Whether memory comes by pages, so that what is mapped says little of what is free.
        patience: How long growth may wait for fences.
        takes_back: Whether memory in no use serves elsewhere before more than ever is asked for.
        lifetime: What of the pool's life has gone into saving memory.
    """

    by_pages = False
    takes_back = True

    def __init__(self, core: Core, device: Device, retire: Retire, turn: Turn, options: PoolOptions) -> None:
        self._core = core
        self._device = device
        self._retire = retire
        self._turn = turn
        self.direct = options.segments == "direct"
        self.growth = Growth(options.segment_size, options.small_limit, device.granularity, exact=self.direct)
        self._kind = options.segments
        self.zero = options.zero_segments
        self.ready = options.ready
        self.patience = options.patience
        self.lifetime = Lifetime()
        self._exchange = Exchange(core, retire, self.lifetime)
        self._peak = 0  # the most that was reserved
        self.min_free = 0
        self.overlap = core.overlap = options.overlap
        self._quiet: int | None = None
        self._flushed = -_LATELY  # how many allocations there had been when caches were emptied for the last time
        self._making = threading.Lock()
        self.limit = 0
        self.coming = 0
        self.leaving = 0
        self.refused: int | None = None
        self.grows = 0
        self.trims = 0
        self.memory = MemoryInfo(free=device.capacity, total=device.capacity)  # what was last seen; the worker asks
        self.segments: dict[int, Segment] = {}
        self.stranded: list[Return] = []  # what the device did not take back; offered again with the next
        self._in_arena = [0, 0]
        self._arena_of: dict[int, int] = {}
        self._last_stream = 0  # whose request brought the newest segment

    def reconfigure(self, options: PoolOptions, limit: int) -> None:
        """Go on with other options (with the turn held)."""
        self.limit = limit
        self.zero = options.zero_segments
        self.ready = options.ready
        self.patience = options.patience
        self.overlap = self._core.overlap = options.overlap
        self.growth.segment_size = options.segment_size
        self.growth.small_limit = options.small_limit
        self.refused = None

    def is_tight(self) -> bool:
        """Say whether the limit is near."""
        reserved = self._core.reserved()
        return reserved + reserved // _TIGHT > self.limit

    def kinds(self) -> dict[int, str]:
        """Answer the kind of each of the heap's segments."""
        return {number: segment.kind for number, segment in self.segments.items()}

    def mapped(self) -> int:
        """Add up the memory that the device has given."""
        return sum(segment.nbytes for segment in self.segments.values())

    def room(self) -> Room:
        """Answer what stands against growth now."""
        return Room(self.limit, self._core.reserved() + self.leaving, self.coming)

    @property
    def returning(self) -> int:
        """Bytes that somebody is giving back to the device just now."""
        return self.leaving - sum(one.segment.nbytes for one in self.stranded)

    def patience_for(self, waiting: Waiting) -> Errand | None:
        """Answer the wait that comes before more than ever is asked for; None for nothing, or no time."""
        if waiting.capture is not None:
            return None
        most = self._may_wait(waiting)
        order = self._order(waiting.pieces, waiting.stream) if most else None
        uses = () if order is None else self._exchange.uses(order.nbytes, self._over() + order.nbytes)
        return partial(self._wait_patiently, uses, most) if uses else None

    def _may_wait(self, waiting: Waiting) -> float:
        if waiting.inline and waiting.home is not None:
            return 0.0
        return self.lifetime.may_wait(self.patience, waiting.age)

    def see_done(self, uses: Sequence[Entry], timeout: float | None) -> None:
        """Wait on this thread (blocks) until uses of memory are done, or for so many seconds."""
        self._retire.settle(uses, timeout)

    def _wait_patiently(self, uses: Sequence[Entry], timeout: float) -> None:
        started = self.lifetime.clock()
        try:
            self.see_done(uses, timeout)
        finally:
            with self._turn:
                self.lifetime.note_wait(started)

    def growth_for(self, waiting: Waiting) -> Errand | None:
        """Answer the errand that gets memory for all of a request; None where the limit or the device forbids it.

        Before more is reserved than ever, segments go back that are free and done with, and too small to serve.
        """
        order = self._order(waiting.pieces, waiting.stream)
        grow = self._errand(order)
        if order is not None and self._core.empty_segments() and waiting.capture is None and self._over() > 0:
            return partial(self._fill_in_place, order)
        return grow

    def _over(self) -> int:
        """Answer by how much what is ordered will have more reserved than ever; nothing where that does not count."""
        if self.direct or not self.takes_back:
            return 0
        return self._core.reserved() + self.leaving + self.coming - self._peak

    def _fill_in_place(self, order: Order) -> None:
        """Carry out an order (blocks), after segments have gone back for it that can."""
        started = self.lifetime.clock()
        try:
            out = self._out_for(order)
            if out:
                with suppress(DeviceError):  # what the device did not take is offered again
                    self._give_back(out)
        except BaseException:
            with self._turn:
                self.coming -= order.nbytes
            raise
        try:
            self._fill(order)
        finally:
            if out:
                with self._turn:
                    self.lifetime.note_move(started)

    def _out_for(self, order: Order) -> list[Return]:
        self._exchange.look(order.nbytes)
        with self._turn:
            ready = self._exchange.ready(order.nbytes)
            return self._take_out(self._over(), max(0, self.ready - order.nbytes), ready) if ready else []

    def wait_for(self, waiting: Waiting) -> Errand | None:  # noqa: ARG002  # segments are not waited for
        """Answer the wait after which there is enough for a request that growth is refused, or None."""
        return None

    def _errand(self, order: Order | None) -> Errand | None:
        if order is None:
            return None
        self.coming += order.nbytes
        return partial(self._fill, order)

    def _order(self, sizes: Sequence[int], stream: int) -> Order | None:
        """Decide on growth that holds buffers of all these sizes; None where the limit or the device forbids it.

        Growth that is there to keep streams apart adds no more than `overlap` allows.
        """
        need = sum(sizes)
        apart = self.overlap > 0 and self._has_several_streams() and self._free() >= need
        most = need + max(0, self._slack() - self.coming) if apart else None
        return self._plan(need, self.growth.arena(max(sizes)), stream, most)

    def part_for(self, waiting: Waiting) -> Errand | None:
        """Answer growth for the largest part of a request, where the free memory may hold the others."""
        sizes = waiting.pieces
        total, largest = sum(sizes), max(sizes)
        if len(sizes) == 1 or self._core.reserved() - self._core.live() + largest < total:
            return None
        return self._errand(self._plan(largest, self.growth.arena(largest), waiting.stream))

    def can_order(self, sizes: Sequence[int]) -> bool:
        """Say whether growth that holds all of these could be had."""
        return self._plan(sum(sizes), self.growth.arena(max(sizes)), 0) is not None

    def keeps_apart(self, waiting: Waiting) -> bool:
        """Say whether to grow before a stream is made to wait for another: little is free, and growth can be had."""
        # A caller who does not await would have its loop wait for the device, which is worse than a stream that waits.
        on_loop = waiting.inline and waiting.home is not None
        if not waiting.share.may_wait or on_loop or waiting.pressed:
            return False
        return self.overlap > 0 and self._slack() >= 0 and self.can_order(waiting.pieces)

    def should_flush(self, waiting: Waiting) -> bool:
        """Say whether to empty caches before growing: enough is free.

        A program that comes out a little short in each of its rounds would do so every time, and is better off with a
        little more memory: where caches were emptied only lately, growth comes first while it adds little.
        """
        if not self.may_hold(waiting.total) or not self._core.cached_bytes():
            return False
        now = self._core.account(0).allocations
        lately = now - self._flushed < _LATELY
        if lately and self._is_little(waiting.total) and self.can_order(waiting.pieces):
            return False
        self._flushed = now
        return True

    def _is_little(self, nbytes: int) -> bool:
        return self._core.reserved() + self.coming + nbytes <= _LITTLE * self._core.account(0).peak

    def should_tidy(self, waiting: Waiting, *, first: bool = False) -> bool:
        """Say whether to make the most of what is free before growing: there is enough, and more than `overlap`.

        With `first`, enough will do.
        """
        need = waiting.total
        if not self.may_hold(need) or not (first or self._slack() < 0):
            return False
        # One stream's free memory is joined at each free as it is: all that can be gained are its caches.
        return self._has_several_streams() or self._core.cached_bytes() >= need

    def may_hold(self, need: int) -> bool:
        """Say whether so much is free, in whatever pieces."""
        return self._free() >= need

    def shortage(self, need: int) -> int:
        """Answer how much has to become free before so many bytes can be had, 1 where they are free in pieces."""
        most = self.limit if self.refused is None else self._core.reserved()
        return max(need - (most - self._core.live()), 1)

    def _has_several_streams(self) -> bool:
        return len(self._core.stream_objects) > 1

    def _slack(self) -> int:
        most = self.overlap
        if isinstance(most, float):
            most = max(int(most * self._core.account(0).peak), self._core.overlap_least if most else 0)
        return most - self._free()

    def _free(self) -> int:
        return self._core.reserved() - self._core.live()

    def growth_ahead(self) -> Errand | None:
        """Answer growth ahead of need, when less than the headroom is free; None where there is enough."""
        wanted = max(self.growth.headroom(), self.ready - self._core.reserved() - self.coming)
        free = self._core.free_bytes() + self._core.cached_bytes() + self.coming
        return self._errand(self._order([wanted - free], self._last_stream)) if wanted > free else None

    def _plan(self, need: int, arena: int, stream: int, most: int | None = None) -> Order | None:
        if self.refused is not None and need >= self.refused:
            return None
        nbytes = self.growth.plan(need, arena, self._in_arena[arena], self.room(), most)
        return None if nbytes is None else Order(nbytes, min(need, nbytes), arena, stream)

    def _fill(self, order: Order) -> None:
        """Carry out an order (blocks): ask the device, then put the segment into the heap.

        Raises:
            OutOfMemoryError: The device refused, also the least that is of use; the order counts no more.
            DeviceError: The device failed; likewise.
        """
        started = time.perf_counter()
        try:
            order = self._on_a_fit_stream(order)
            segment = self._ask(order)
        except OutOfMemoryError:
            with self._turn:
                self.coming -= order.nbytes
                self.refused = order.need
            raise
        except BaseException:
            with self._turn:
                self.coming -= order.nbytes
            raise
        with self._turn:
            self.coming -= order.nbytes
            self._arrived(segment, order)
            self.growth.observe(time.perf_counter(), self._core.live(), time.perf_counter() - started)
            self.grows += 1
            self.tell(Kind.GREW, segment.nbytes, started, segment.address)

    def tell(self, kind: Kind, nbytes: int, started: float, address: int = 0) -> None:
        """Have it recorded that memory came or went, where that is recorded; `started` is by `time.perf_counter`."""
        if self._core.logged:
            self._core.note(kind, 0, nbytes, address, time.perf_counter() - started)

    def quiet(self) -> int:
        """Answer the index of a stream that is given no work, whose segments are ready for everybody once they come."""
        with self._making:  # two of them would each be waited for as if it were the other
            if self._quiet is None:
                self._quiet = self._retire.register(self._device.create_stream("quiet"))
            return self._quiet

    def _on_a_fit_stream(self, order: Order) -> Order:
        # What is asked in the order of a captured stream becomes a part of the graph, and the legacy default stream,
        # which cannot even be asked then, draws others' captures in. A mere handle may mean another stream by now, and
        # another thread's default stream nobody can submit to.
        stream = self._retire.streams[order.stream]
        try:
            fit = stream is not None and stream.lasting and not (stream.of_one_thread or stream.capturing())
        except DeviceError:
            fit = False
        return order if fit else order._replace(stream=self.quiet())

    def _ask(self, order: Order) -> Segment:
        self.memory = memory = self._device.memory()
        # What others have taken meanwhile counts as much as the limit: some of the device stays free for them.
        spare = memory.free - self.min_free
        if spare < order.need:
            facts = OutOfMemoryFacts(asked=order.need, device=self._device.name, device_free=memory.free)
            raise OutOfMemoryError(facts)
        wishes = [order.nbytes] if spare >= order.nbytes else []
        if order.need < order.nbytes or not wishes:
            wishes.append(order.need)
        stream = self._retire.streams[order.stream]
        segment = self._first_of(wishes, stream)
        try:
            self._make_ready(segment, order, stream or self._device.default_stream)
        except BaseException:
            with self._turn:
                self.leaving += segment.nbytes
                self.stranded.append(Return(segment, [(order.stream, self._core.close_epoch(order.stream))]))
            raise
        return segment

    def _make_ready(self, segment: Segment, order: Order, stream: Stream) -> None:
        if self.zero:
            self._device.fill(segment.address, segment.nbytes, 0, stream)
        if order.stream == self._quiet:
            stream.record().block()

    def _first_of(self, wishes: list[int], stream: Stream | None) -> Segment:
        for nbytes in wishes[:-1]:
            try:
                return self._device.allocate_segment(nbytes, self._kind, stream)
            except OutOfMemoryError:
                continue
        return self._device.allocate_segment(wishes[-1], self._kind, stream)

    def _arrived(self, segment: Segment, order: Order) -> None:
        if self._device.checker is not None:
            self._device.checker.open_segment(segment.address, segment.nbytes)
        number = self._core.add_segment(segment.address, segment.nbytes, order.arena, order.stream)
        self.segments[number] = segment
        self._arena_of[number] = order.arena
        self._in_arena[order.arena] += segment.nbytes
        self._last_stream = order.stream
        self._peak = max(self._peak, self._core.reserved())
        if order.stream == self._quiet:
            self._core.mark_done(order.stream, self._core.close_epoch(order.stream))  # seen by `_make_ready`

    def detach(self, wanted: int | None = None, keep: int = 0) -> Callable[[], int] | None:
        """Take wholly free segments out of the heap, largest first; answer the errand that gives them back, if any.

        Args:
            wanted: Stop once so many bytes are out; None for all.
            keep: Leave at least so many bytes reserved.
        """
        out = self._take_out(wanted, keep)
        return partial(self._give_back, out) if out else None

    def _take_out(self, wanted: int | None, keep: int, among: Container[int] | None = None) -> list[Return]:
        out: list[Return] = []
        for number, _, _, _ in self._chosen(wanted, keep, among):
            try:
                entries = self._core.remove_segment(number)
            except ValueError:  # a thread has taken from it since it was listed: the doors ask for no turn
                continue
            segment = self.segments.pop(number)
            self._in_arena[self._arena_of.pop(number)] -= segment.nbytes
            self.leaving += segment.nbytes
            out.append(Return(segment, entries))
        return out

    def _chosen(self, wanted: int | None, keep: int, among: Container[int] | None) -> Iterator[EmptySegment]:
        spare = self._core.reserved() - keep
        for one in sorted(self._core.empty_segments(), key=lambda one: -one[2]):
            if wanted is not None and wanted <= 0:
                return
            if one[2] <= spare and (among is None or one[0] in among):
                spare -= one[2]
                wanted = None if wanted is None else wanted - one[2]
                yield one

    def detach_for(self, need: int) -> Callable[[], int] | None:
        """Take out what makes room for growth by `need` bytes; nothing where even all of it would not.

        What the device did not take back before is offered again in any case.
        """
        again = self.retry if self.stranded else None
        wanted = self._wanted_for(need)
        return again if wanted == 0 else self.detach(wanted) or again

    def _wanted_for(self, need: int) -> int | None:
        missing = need - (self.room().left() or 0)
        empty = sum(one[2] for one in self._core.empty_segments())
        if empty == 0 or (self.refused is None and empty < missing):
            return 0
        return max(missing, 1) if self.refused is None else None

    def uses_for(self, need: int) -> list[Entry]:
        """Answer what must be done before what `detach_for` takes out can go back to the device."""
        wanted = self._wanted_for(need)
        going = () if wanted == 0 else self._chosen(wanted, 0, None)
        uses = [entry for one in (*self.stranded, *going) for entry in one[-1]]
        return [entry for entry in uses if self._core.entry_state(*entry) != DONE]

    def retry(self) -> int:
        """Offer again what the device did not take back (blocks); answers the bytes."""
        return self._give_back([])

    def fence_frees(self) -> None:
        """Record fences behind what was freed on pages: segments have no use for them."""

    def end(self) -> None:
        """End what is kept beside segments, once everything has been given back (with the turn held)."""

    def _give_back(self, returns: list[Return]) -> int:
        """Give segments back to the device (blocks): after every use of them is seen done.

        Returns:
            Bytes given back.

        Raises:
            DeviceError: The device failed. What it did not take counts as reserved and is offered again next time.
        """
        given = 0
        with self._turn:
            returns, self.stranded = [*self.stranded, *returns], []
        while returns:
            one = returns[-1]
            started = time.perf_counter()
            try:
                self._retire.settle(one.entries)
                if self._device.checker is not None:
                    self._device.checker.close_segment(one.segment.address)
                self._device.free_segment(one.segment)
            except BaseException:
                with self._turn:
                    self.stranded += returns  # to what another thread could not give back meanwhile
                raise
            returns.pop()
            given += one.segment.nbytes
            with self._turn:
                self.leaving -= one.segment.nbytes
                self.refused = None
                self.trims += 1
                self.tell(Kind.TRIMMED, one.segment.nbytes, started, one.segment.address)
        return given
