"""Memory by pages: ranges of addresses that stay, below which memory comes, moves and goes.

Each of the heap's two arenas has a range of its own, reserved when the pool opens. Where a request misses, the heap
says which addresses it would get, and which idle memory to put there; new memory is taken below the most that there
ever was, where too little is idle, or where moves have taken too much of the time. Memory is idle once the host has
seen done what was last freed on it, so a fence is recorded behind frees at each miss, and on a slow beat for as long as
the pool has grown lately.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncmem.core.report import Plan
from asyncmem.devices.base import Remapped
from asyncmem.engine.grow import Room
from asyncmem.errors import DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.pool.supply import Order, Supply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncmem.core import Core, Turn
    from asyncmem.devices import Device
    from asyncmem.devices.base import Span
    from asyncmem.engine.retire import Entry, Retire
    from asyncmem.options import PoolOptions
    from asyncmem.pool.waiting import Waiting

_TIMES: Final = 4  # a range's size by the device's: addresses are spread more than memory
_LATELY: Final = 1.0  # seconds for which fences are recorded ahead of need after the pool has grown
_BEAT: Final = 0.004  # seconds between them
_DEAR: Final = 0.03  # the share of a pool's life that moves may take, with all that somebody waits for them
_GRACE: Final = 0.02  # seconds that they may take in any case; beyond both new memory comes first
_REST: Final = 0.25  # seconds after which what is above a lowered limit is offered to a device again that has failed


def pages(device: Device, options: PoolOptions) -> bool:
    """Say whether a pool's memory comes by pages. A memory checker hears of segments only."""
    kind = device.segment_kinds[0] if options.segments == "auto" else options.segments
    return kind == "virtual" and device.page > 0 and device.checker is None


@dataclass(frozen=True, slots=True)
class Paged(Order):
    """Growth by pages; `nbytes` of it are new memory. What the plans name is held by the heap until it is done.

    Attributes:
        plans: One for each place that gets memory.
        since: When that was planned, by `time.perf_counter()`.
    """

    plans: Sequence[Plan]
    since: float = field(default_factory=time.perf_counter)

    def out(self) -> list[tuple[int, Span]]:
        """Answer what is unmapped, each with its space."""
        return [(move.segment, (move.address, move.nbytes)) for plan in self.plans for move in plan.moves]

    def into(self) -> list[tuple[int, Span]]:
        """Answer what is mapped: what has only moved comes first, so that it gets what was unmapped."""
        moved = [(plan.segment, (one.to, one.nbytes)) for plan in self.plans for one in plan.moves if one.to]
        return moved + [(plan.segment, span) for plan in self.plans for span in plan.fresh]


class PagedSupply(Supply):
    """The supply of a pool whose device has pages. Attributes change under the pool's turn only.

    Attributes:
        waited: Seconds that growth has waited for fences rather than ask for new memory.
    """

    certain = False

    def __init__(self, core: Core, device: Device, retire: Retire, turn: Turn, options: PoolOptions) -> None:
        super().__init__(core, device, retire, turn, options)
        self._page = device.page
        self._late = options.late_fences
        self._patience = options.patience
        self._opened = time.monotonic()
        self._grown = -_LATELY
        self._peak = 0
        self._moving = 0.0
        self.waited = 0.0
        self._rest_until = 0.0
        self._unclean: list[Paged] = []  # mapped, and being filled with zeros as far as the host knows
        self._spaces: dict[int, Span] = {}
        nbytes = _TIMES * max(device.capacity, device.page) // device.page * device.page
        try:
            for arena in (0, 1):
                address = device.reserve(nbytes)
                self._spaces[core.add_space(address, nbytes, arena, device.page)] = address, nbytes
        except BaseException:
            self.end()
            raise

    def reconfigure(self, options: PoolOptions, limit: int) -> None:
        """Go on with other options (with the turn held)."""
        super().reconfigure(options, limit)
        self._late = options.late_fences
        self._patience = options.patience

    def end(self) -> None:
        """Give the ranges back, where nothing is mapped or on its way any more."""
        while not (self._core.reserved() or self.coming or self.leaving) and self._spaces:
            number, (address, nbytes) = self._spaces.popitem()
            self._core.remove_space(number)
            self._device.unreserve(address, nbytes)

    def room(self) -> Room:
        """Answer what stands against growth now; what goes back is reserved until it has gone."""
        return Room(self.limit, self._core.reserved(), self.coming)

    def kinds(self) -> dict[int, str]:
        """Answer the kind of each of the heap's segments."""
        return dict.fromkeys(self._spaces, "virtual")

    def mapped(self) -> int:
        """Add up the memory that the device has given."""
        return sum(handle.nbytes for handle in self._core.handles())

    # -- deciding --------------------------------------------------------------------------------------------------

    def order_for(self, waiting: Waiting) -> Order | None:
        """Decide where a request's memory comes from; None where only waiting for fences, or for others, can help."""
        return self._count_pages(self._plan_for(waiting))

    def fences_for(self, waiting: Waiting) -> Sequence[Entry]:
        """Answer the uses of idle memory after which there is enough for a request; nothing where there are none."""
        found = self._plan_for(waiting)
        if isinstance(found, Paged):
            self._let_go(found)
            return ()
        return found

    def patience_for(self, waiting: Waiting) -> tuple[Sequence[Entry], float] | None:
        """Answer what to wait for, and how long at most, before new memory is asked for; None for nothing."""
        patience = self._patience
        most = patience.seconds - waiting.age
        if patience.share < math.inf:
            most = min(most, patience.share * (time.monotonic() - self._opened) - self.waited)
        if most <= 0 or (waiting.inline and waiting.home is not None):
            return None
        found = self._plan_for(waiting, modest=True)
        if isinstance(found, Paged):
            self._let_go(found)
            return None
        return (found, most) if found else None

    def can_order(self, sizes: Sequence[int]) -> bool:
        """Say whether `order` might answer one."""
        return self._left() + self._free() >= sum(sizes)

    def order(self, sizes: Sequence[int], stream: int) -> Order | None:
        """Decide on growth that nobody waits for; None where memory is there already, or must not be taken."""
        found = self._plan_pieces(sizes, stream, foreign=False, ahead=True)
        if isinstance(found, Paged) and not found.nbytes:
            self._let_go(found)
            return None
        return self._count_pages(found)

    def _count_pages(self, found: Paged | Sequence[Entry]) -> Order | None:
        if not isinstance(found, Paged) or not found.plans:
            return None
        self.coming += found.nbytes
        return found

    def order_part(self, sizes: Sequence[int], stream: int) -> Order | None:  # noqa: ARG002  # each part is planned for
        """Answer None: what is planned is never more than what is lacking."""
        return None

    def _plan_for(self, waiting: Waiting, *, modest: bool = False) -> Paged | Sequence[Entry]:
        self.fence_frees()
        apart = self.overlap > 0 and not waiting.pressed and waiting.capture is None and self._slack() >= 0
        foreign = waiting.capture is None and not apart
        found = self._plan_pieces(waiting.pieces, waiting.stream, foreign=foreign, modest=modest)
        if isinstance(found, Paged) and not found.plans and foreign:
            # All that is lacking is a way to the memory: it is another stream's, and cannot be waited for.
            found = self._plan_pieces(waiting.pieces, waiting.stream, foreign=False, modest=modest)
        return found

    def _left(self) -> int:
        left = self.room().left() or 0
        return left if self.refused is None else min(left, max(0, self.refused - self._page))

    def _plan_pieces(
        self, sizes: Sequence[int], stream: int, *, foreign: bool, modest: bool = False, ahead: bool = False
    ) -> Paged | Sequence[Entry]:
        # Addresses do not depend on where memory is, so pieces are taken one after the other as they will be taken in
        # the end, and planned for where memory is lacking. What was taken goes back as it was.
        core, need = self._core, sum(sizes)
        left = self._left()
        # Moves save memory and cost time. A program that makes them go round and round is better off with more memory.
        dear = self._moving > _GRACE + _DEAR * (time.monotonic() - self._opened)
        room = left if ahead or dear else min(left, max(0, self._peak - core.reserved() - self.coming))
        most = 0 if modest else left - room
        plans: list[Plan] = []
        taken: list[tuple[int, Sequence[Entry]]] = []
        waits: Sequence[Entry] | None = None
        for nbytes in sorted(filter(None, sizes), reverse=True):
            block = self._take(nbytes, stream, foreign=foreign) if len(sizes) > 1 else None
            if block is not None:
                taken.append(block)
                continue
            plan = core.plan(nbytes, stream, -1, room, most, foreign, self._late)
            if not isinstance(plan, Plan):
                waits = list(plan)
                break
            plans.append(plan)
            if plan.nbytes > nbytes:
                break  # the rest of its last page is for the next piece, which is planned once that is there
            room += sum(move.nbytes for move in plan.moves if not move.to)
            fresh = sum(size for _, size in plan.fresh)
            room, most = max(0, room - fresh), most - max(0, fresh - room)
        for one, entries in reversed(taken):
            core.put_back(one, entries)
        order = Paged(0, need, self.growth.arena(max(sizes)), stream, plans)
        if waits is not None:
            self._let_go(order)
            return waits
        idle = [plan for plan in plans if not plan.moves and not plan.fresh]
        if idle:
            self._let_go(Paged(0, need, order.arena, stream, idle))
            plans = [plan for plan in plans if plan.moves or plan.fresh]
        return Paged(sum(size for plan in plans for _, size in plan.fresh), need, order.arena, stream, plans)

    def _take(self, nbytes: int, stream: int, *, foreign: bool) -> tuple[int, Sequence[Entry]] | None:
        block = self._core.take(nbytes, stream)
        if block:
            return block, ()
        return self._core.take_foreign(nbytes, stream, late=self._late) if foreign else None

    def _let_go(self, order: Paged, *, filled: bool = False) -> None:
        # What came to nothing joins what it was cut from; what has been filled stays fit for who asked for it.
        stream = order.stream if filled else -1
        for plan in order.plans:
            for move in plan.moves:
                self._core.let_go(move.segment, move.address, move.nbytes)
            if plan.nbytes:
                self._core.let_go(plan.segment, plan.address, plan.nbytes, stream)

    # -- carrying out ----------------------------------------------------------------------------------------------

    def fill(self, order: Order) -> None:
        """Carry out an order (blocks), and tell the heap how far that came.

        Raises:
            OutOfMemoryError: The device has too little for what was to be new.
            DeviceError: The device failed.
        """
        assert isinstance(order, Paged)
        started = time.perf_counter()
        done, clean = Remapped(0, 0), True
        try:
            self._wash()
            self._need_spare(order)
            done = self._remap(order)
            clean = False
            self._clear(order, done)
            clean = True
        finally:
            with self._turn:
                self.coming -= order.nbytes
                if isinstance(done.error, OutOfMemoryError):
                    self.refused = order.nbytes
                self._note(order, done)
                if order.out():
                    self._moving += time.perf_counter() - order.since
                if clean:
                    self._let_go(order, filled=True)
                else:
                    self._unclean.append(order)
                self.growth.observe(time.perf_counter(), self._core.live(), time.perf_counter() - started)
        # What was only not given back is the device's to try again.
        if done.error is not None and done.mapped < len(order.into()):
            raise done.error

    def _need_spare(self, order: Paged) -> None:
        if order.nbytes == 0:
            return
        self.memory = memory = self._device.memory()
        # What others have taken meanwhile counts as much as the limit: some of the device stays free for them.
        if memory.free - self.min_free < order.nbytes:
            with self._turn:
                self.refused = order.nbytes
            facts = OutOfMemoryFacts(asked=order.nbytes, device=self._device.name, device_free=memory.free)
            raise OutOfMemoryError(facts)

    def _remap(self, order: Paged) -> Remapped:
        return self._device.remap([span for _, span in order.out()], [span for _, span in order.into()])

    def _clear(self, order: Paged, done: Remapped) -> None:
        fresh = {span for plan in order.plans for span in plan.fresh}
        new = [span for _, span in order.into()[: done.mapped] if span in fresh]
        if not self.zero or not new:
            return
        stream = self._retire.streams[self.quiet()]
        assert stream is not None
        for address, nbytes in new:
            self._device.fill(address, nbytes, 0, stream)
        stream.record().block()

    def _wash(self) -> None:
        # What could not be waited for is held back until it can be.
        if self._unclean:
            stream = self._retire.streams[self.quiet()]
            assert stream is not None
            stream.record().block()
            with self._turn:
                while self._unclean:
                    self._let_go(self._unclean.pop())

    def _note(self, order: Paged, done: Remapped) -> None:
        for space, (address, nbytes) in order.out()[: done.unmapped]:
            self._core.set_bare(space, address, nbytes)
        for space, (address, nbytes) in order.into()[: done.mapped]:
            self._core.set_mapped(space, address, nbytes)
        self.grows += done.mapped > 0
        self._grown = time.monotonic()
        self._peak = max(self._peak, self._core.reserved())

    def wait(self, entries: Sequence[Entry], timeout: float | None = None) -> None:
        """Wait on this thread (blocks) until the host has seen uses of idle memory done, or for so many seconds.

        Raises:
            DeviceError: The device is lost, or a fence could not be recorded.
        """
        started = time.monotonic()
        try:
            self._retire.settle(entries, timeout)
        finally:
            if timeout is not None:
                with self._turn:
                    self.waited += time.monotonic() - started

    def fence_frees(self) -> None:
        """Record fences behind what was freed on handles since the last; where that fails, a later miss does it."""
        for index in self._core.unfenced():
            with suppress(DeviceError):
                self._retire.fence(index)
        with suppress(DeviceError):
            self._retire.poll()

    def beat(self) -> float | None:
        """Record fences ahead of need, and answer the seconds until the next time; None while nothing has grown."""
        if time.monotonic() - self._grown > _LATELY:
            return None
        self.fence_frees()
        return _BEAT

    # -- giving back -----------------------------------------------------------------------------------------------

    def detach(self, wanted: int | None = None, keep: int = 0) -> Callable[[], int] | None:
        """Answer the errand that gives idle memory back, what has been idle the longest first; None where none is idle.

        Args:
            wanted: As many bytes, or a little more; None for all.
            keep: Leave at least so many bytes reserved.
        """
        if wanted is not None and time.monotonic() < self._rest_until:
            return None  # it would fail again, and nobody asks for it by name
        idle = self._core.idle()[0] + sum(order.nbytes for order in self._unclean)
        spare = self._core.reserved() - keep - self.leaving
        nbytes = min(idle, spare) if wanted is None else min(idle, spare, wanted)
        if nbytes <= 0:
            return None
        self.leaving += nbytes
        return partial(self._reclaim, nbytes)

    def detach_for(self, need: int) -> Callable[[], int] | None:
        """Answer the errand that gives idle memory back, where all of it together would do for a request.

        Memory moves in whole pieces, and one that lies across the border of what a request gets stays where it is.
        """
        idle = self._core.idle()[0]
        return self.detach() if idle and self._left() + idle >= need else None

    def retry(self) -> int:
        """Give back what the device did not take: nothing, because it tries that again itself."""
        return 0

    def _reclaim(self, nbytes: int) -> int:
        order = Paged(0, 0, 0, 0, ())
        done = Remapped(0, 0)
        try:
            self._wash()
            _, uses = self._core.idle()
            self._retire.settle(uses)
            with self._turn:
                plan = self._core.reclaim(nbytes)
            if plan is not None:
                order = Paged(0, 0, 0, 0, (plan,))
                done = self._remap(order)
        except BaseException:
            self._rest_until = time.monotonic() + _REST
            raise
        finally:
            with self._turn:
                self.leaving -= nbytes
                for space, (address, length) in order.out()[: done.unmapped]:
                    self._core.set_bare(space, address, length)
                self._let_go(order)
                self.trims += done.unmapped > 0
                self.refused = None
        if done.error is not None:
            self._rest_until = time.monotonic() + _REST
            raise done.error
        return sum(length for _, (_, length) in order.out()[: done.unmapped])
