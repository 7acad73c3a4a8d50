"""Care of a pool's memory when nobody waits for it: growing ahead, merging, giving back, and checking."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncmem.errors import DeviceError
from asyncmem.pool.home import running_home
from asyncmem.stats import SegmentInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.flow import Flow

_ARENAS = ("small", "large")


class Upkeep:
    """The parts of a pool's work that no request asks for."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._core = flow.core
        self._supply = flow.supply
        self._ahead = False

    def grow_ahead(self) -> None:
        """Send for growth when free memory has fallen below the headroom (with the turn held)."""
        if self._ahead or self._flow.busy or self._flow.closed is not None:
            return
        order = self._supply.order_ahead()
        if order is not None:
            self._ahead = True
            errand = self._flow.ladder.grow_ahead(order)
            self._flow.owe(partial(self._flow.submit, partial(self._run_ahead, errand)))

    def _run_ahead(self, errand: Callable[[], None]) -> None:
        try:
            errand()
        finally:
            with self._flow.turn:
                self._ahead = False
                self.set_marks()
                self._flow.changed()

    def set_marks(self) -> None:
        """Ask the core to say when free memory falls below the headroom (with the turn held)."""
        self._flow.pressure.free_low = self._supply.growth.headroom()
        self._flow.pressure.look()

    def trim(self, keep: int) -> int:
        """Give wholly free segments back, except `keep` bytes (blocks); answers the bytes."""
        with self._flow.turn:
            self._core.flush()
            self._core.merge()
            give_back = self._supply.detach(keep=keep) or self._supply.retry
        try:
            return give_back()
        finally:
            with self._flow.turn:
                self._flow.changed()

    def empty_cache(self) -> None:
        """Give wholly free segments back: at once, or by the worker where this thread must not block."""
        if running_home(self._flow.home) is None:
            self.trim(0)
        else:
            self._flow.submit(self._trim_all)

    def _trim_all(self) -> None:
        self.trim(0)

    def give_up(self) -> None:
        """Give back all that is free, because others need the device's memory (blocks)."""
        try:
            self.trim(0)
        except DeviceError as error:
            self._flow.fail(None, error)

    def shrink(self) -> None:
        """Have the worker give back what is free above a limit that was lowered (with the turn held)."""
        self._core.flush()
        self._send_back(self._supply.detach(self._core.reserved() - self._supply.limit))

    def give_back_soon(self) -> None:
        """Take free segments out of the heap now and have the worker give them back (with the turn held)."""
        self._send_back(self._supply.detach())

    def _send_back(self, give_back: Callable[[], int] | None) -> None:
        if give_back is not None:
            self._flow.owe(partial(self._flow.submit, partial(self._give_back, self._flow.ladder.trim(give_back))))

    def _give_back(self, errand: Callable[[], None]) -> None:
        try:
            errand()
        finally:
            with self._flow.turn:
                self._flow.changed()  # what has gone back made room for whoever waits to grow

    def defragment(self) -> None:
        """Merge free neighbours of different streams, when enough is in pieces (with the turn held)."""
        options = self._flow.options
        free = self._core.free_bytes()
        if not options.defragment or len(self._flow.queue) or free == 0:
            return
        if 1 - self._core.largest() / free > options.merge_threshold and self._core.merge():
            self._flow.tally.rungs["merge"] += 1

    def release_the_rest(self) -> None:
        """Give back what the last buffer of a closed pool held."""
        house = self._flow.pool.house
        house.run_last(house.release)

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Answer what the pool has from its device."""
        with self._flow.turn:
            kinds = self._supply.kinds()
            return tuple(
                SegmentInfo(
                    address=one.address, nbytes=one.nbytes, kind=kinds.get(one.segment, "?"),
                    arena=_ARENAS[one.arena], live=one.live, largest_hole=min(one.largest, one.free),
                )
                for one in self._core.segments()
                if one.nbytes
            )  # fmt: skip

    def check(self) -> None:
        """Walk every invariant; raises `AssertionError` that names the one which does not hold."""
        self._core.check()
        flow, supply = self._flow, self._supply
        with flow.turn:
            reserved = supply.mapped()
            _hold(reserved == self._core.reserved(), f"segments add up to {reserved}, heap has {self._core.reserved()}")
            _hold(supply.coming >= 0 and supply.leaving >= 0, f"coming {supply.coming}, leaving {supply.leaving}")
            waiting = list(flow.waiters())
            _hold(all(not one.done for one in waiting), "a settled request still stands in a queue")
            _hold(flow.queue.bytes == sum(one.nbytes for one in flow.queue), "the queue's bytes are miscounted")
            for budget in flow.budgets:
                budget.check(waiting)


def _hold(truth: bool, text: str) -> None:
    if not truth:
        raise AssertionError(text)
