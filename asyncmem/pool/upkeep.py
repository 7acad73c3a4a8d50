"""Care of a pool's memory when nobody waits for it: growing ahead, merging, giving back, and checking."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from asyncmem.errors import DeviceError
from asyncmem.pool.alarm import alarm
from asyncmem.pool.home import running_home
from asyncmem.stats import SegmentInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.flow import Flow

_ARENAS = ("small", "large")
_BEAT = 0.004  # seconds between looks at the pages of a pool in use
_TIGHT_BEAT = 0.0005  # and near its limit, where somebody is about to wait for what is done
_QUIET = 16  # looks after which nothing was freed that end them; what is freed after that is seen late
_MERGE_RATIO = 32  # live blocks for each free, up to which all are looked at for neighbours to join


class Upkeep:
    """The parts of a pool's work that no request asks for."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._core = flow.core
        self._supply = flow.supply
        self._ahead = False
        self._awake = False  # the worker looks after pages every few milliseconds
        self._quiet = 0
        # Frees so far: at the last look, at the last merge, and at the last one that found nothing under way.
        self._frees = self._merged = self._settled = 0

    def wake(self) -> None:
        """Have the worker look after pages from now on, for as long as memory is freed (with the turn held)."""
        if not self._awake:
            self._awake = True
            self._flow.owe(partial(self._flow.submit, _nothing))

    def beat(self) -> float | None:
        """Look after pages; answer in how many seconds to do so again, or None where nothing happens any more.

        Caches keep memory from being moved, and what one stream freed is all streams' only once it is joined. That is
        seen to here, by the clock, and not when pages are short: so blocks lie as if no page were ever taken back.
        """
        if not self._supply.by_pages:
            return None
        self._awake = False
        with self._flow.turn:
            gained = self._core.flush()
        self._supply.fence_frees()  # behind what lay in caches, too
        frees = self._core.account(0).frees
        quiet = frees == self._frees and not self._flow.retire.counts().open_fences
        self._quiet = self._quiet + 1 if quiet else 0
        over = self._quiet >= _QUIET
        self._frees = frees
        with self._flow.turn:
            if len(self._core.stream_objects) > 1 and self._may_join(quiet=quiet):
                gained += self._core.merge()
                self._merged = frees
                self._settled = frees if quiet else self._settled
            if gained and len(self._flow.queue):
                self._flow.changed()
            self._awake = self._awake or not over
        return None if over else _TIGHT_BEAT if self._supply.is_tight() else _BEAT

    def _may_join(self, *, quiet: bool) -> bool:
        # What waited for different streams when it was looked at last, and waits for none now, is joined once.
        if quiet:
            return self._settled != self._frees
        return (self._frees - self._merged) * _MERGE_RATIO >= self._core.counts().live_blocks

    def grow_ahead(self) -> None:
        """Send for growth when free memory has fallen below the headroom (with the turn held)."""
        if self._ahead or self._flow.busy or self._flow.closed is not None:
            return
        growth = self._supply.growth_ahead()
        if growth is not None:
            self._ahead = True
            errand = self._flow.ladder.grow_ahead(growth)
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
            self._flow.submit(self.give_up)

    def give_up(self) -> None:
        """Give back all that is free (blocks); where the device refuses, warn of it."""
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
        """Merge free neighbours of different streams, when enough is in pieces for it (with the turn held)."""
        options = self._flow.options
        free = self._core.free_bytes()
        if not options.defragment or len(self._flow.queue) or free == 0:
            return
        threshold = 0.0 if self._flow.squeeze.on else options.merge_threshold
        if 1 - self._core.largest() / free > threshold and self._core.merge():
            self._flow.tally.rungs["merge"] += 1

    def release_the_rest(self) -> None:
        """Have what the last buffer of a closed pool held given back."""
        self._flow.pool.house.run_last(self._release)

    def _release(self) -> None:
        pool = self._flow.pool
        try:
            pool.house.release()
        except DeviceError as error:
            # The worker goes on: whoever closes the pool may still wait for it, and hears of this by that.
            alarm(f"pool {pool.name!r} is closed, and its memory could not go back: {error}", RuntimeWarning)

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
                _hold(budget.queue.empty or budget in flow.standing, f"nobody looks at who waits in {budget.name!r}")
                budget.check(waiting)


def _nothing() -> None:
    """Stand for a job: what matters is what the worker does after it."""


def _hold(truth: bool, text: str) -> None:
    if not truth:
        raise AssertionError(text)
