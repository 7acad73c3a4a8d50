"""What to do for a request that finds no memory: grow, tidy up, give back and grow again, and only then give up.

The rungs, in the order in which they are tried, each counted by its name: *grow* (more from the device), *retire*
(fences that are done), *flush* (caches), *merge* (neighbours of different streams), *wait* (for fences of idle pages),
*trim* (segments go back, to be had in another shape), *spill* (marked buffers move to the host), *collect* (Python's
garbage), *ask* (the user's `on_oom`). Where enough is free, *flush* comes first; where the pool is to be patient, so
does *wait*. A request that a full budget or lease holds up has no use for any but *spill*.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING

from asyncmem.errors import DeviceError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.pool.flow import Flow
    from asyncmem.pool.graph import Captured
    from asyncmem.pool.movable import Movable
    from asyncmem.pool.waiting import Waiting

    Errand = Callable[[], None]

_RETRIES = 16  # how often `on_oom` may ask for another try of one request


class Ladder:
    """The rungs for one pool. What decides holds the turn; what it returns to be called later blocks and does not."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._core = flow.core
        self._supply = flow.supply
        self.rungs = flow.tally.rungs

    def grow_for(self, waiting: Waiting) -> Errand | None:
        """Answer the errand that gets all of a request from the device, or None where the limit forbids it.

        Captured work cannot wait for anything, so before that its request has the host wait for free memory.
        """
        if self._supply.by_pages:
            self._flow.upkeep.wake()
        patient = self._supply.patience.seconds > 0 and not self._flow.captures.in_the_way
        wait = self._supply.patience_for(waiting) if patient else None
        if wait is not None:
            return partial(self._wait, wait, waiting)
        growth = self._supply.growth_for(waiting)
        if waiting.batch and self._supply.by_pages:
            self._flow.pressure.look()  # pieces were taken and put back, past its marks
        if growth is not None:
            waiting.provided = True
            return partial(self._grow, growth, waiting)
        if waiting.capture is not None and not waiting.capture.settled:
            return partial(self._settle, waiting, waiting.capture)
        return None

    def make_room_for(self, waiting: Waiting) -> Errand | None:
        """Answer the errand that turns free memory into what a request needs, or None where only others can help.

        Comes after `tidy`. What is given back makes room for growth that holds the whole request, so the two rungs
        cannot undo each other for ever.
        """
        growth = self._supply.part_for(waiting)
        if growth is not None:
            return partial(self._grow, growth, waiting)
        if self._flow.captures.in_the_way:
            return None
        wait = self._supply.wait_for(waiting)
        if wait is not None:
            return partial(self._wait, wait, waiting)
        uses = self._supply.uses_for(waiting.total) if waiting.inline else ()
        if uses:  # what goes back is waited for without a bound, which is the worker's to do
            bound = waiting.may_block_for
            return None if bound == 0 else partial(self._wait, partial(self._supply.see_done, uses, bound), waiting)
        give_back = self._supply.detach_for(waiting.total)
        return None if give_back is None else partial(self._trim, give_back, waiting)

    def press(self, waiting: Waiting) -> bool:
        """Let a request for which nothing can be had take what it would rather leave; says whether that is new.

        That is memory of the other size class, and another stream's that is not done with it.
        """
        if waiting.pressed or not self._supply.by_pages:
            return False
        waiting.pressed = True
        return True

    def spill_for(self, waiting: Waiting) -> Errand | None:
        """Answer the errand that moves marked memory to the host for a request, or None where that cannot serve it."""
        if not self._flow.may_spill or waiting.capture is not None:
            return None
        share = waiting.share.held_up_at(waiting)
        claimed = self._flow.spilling.claim(share.shortage(waiting.total), share)
        return partial(self._spill, claimed, waiting) if claimed else None

    def tidy(self) -> bool:
        """Make the most of what is mapped, at once; says whether that changed anything."""
        found = {"retire": self._flow.taker.poll(), "flush": self._core.flush(), "merge": self._core.merge()}
        for rung, gain in found.items():
            self.rungs[rung] += gain > 0
        return any(found.values())

    def flush_for(self, waiting: Waiting) -> bool:
        """Empty the caches where that may serve a request; says whether that changed anything.

        Unlike the rest of `tidy` it makes no stream wait for another, so it comes before growth in any case.
        """
        gain = self._core.flush() if self._supply.should_flush(waiting) else 0
        self.rungs["flush"] += gain > 0
        return gain > 0

    def last_errand(self, waiting: Waiting) -> Errand:
        """Answer the last rungs for a request that would fail otherwise: they end in another try or in its error."""
        return partial(self._give_up, waiting)

    def _grow(self, growth: Errand, waiting: Waiting | None) -> None:
        self.rungs["grow"] += 1
        try:
            growth()
        except OutOfMemoryError:
            return  # noted by the supply; the next rung is another errand
        except DeviceError as error:
            self._flow.fail(waiting, error)
        finally:
            if waiting is not None:
                waiting.provided = False

    def _wait(self, wait: Errand, waiting: Waiting) -> None:
        self.rungs["wait"] += 1
        try:
            wait()
        except DeviceError as error:
            self._not_seen(waiting, error)

    def _settle(self, waiting: Waiting, capture: Captured) -> None:
        capture.settled = True
        try:
            self._flow.captures.settle()
        except DeviceError as error:
            self._flow.fail(waiting, error)

    def _trim(self, give_back: Callable[[], int], waiting: Waiting | None) -> None:
        self.rungs["trim"] += 1
        try:
            give_back()
        except DeviceError as error:
            self._not_seen(waiting, error)
        finally:
            with self._flow.turn:
                self._flow.blocking.errand_ended()

    def _not_seen(self, waiting: Waiting | None, error: DeviceError) -> None:
        # A capture only puts off what the host waits to see done: the request waits for its end, and these rungs too.
        if waiting is not None and error.code == DeviceError.CAPTURE_UNSUPPORTED:
            self._flow.captures.in_the_way = True
        else:
            self._flow.fail(waiting, error)

    def _spill(self, claimed: list[Movable], waiting: Waiting) -> None:
        self.rungs["spill"] += 1
        try:
            self._flow.spilling.move(claimed, waiting)
        except DeviceError as error:
            self._flow.fail(waiting, error)

    def _give_up(self, waiting: Waiting) -> None:
        options = self._flow.options
        if self._supply.refused is not None and not waiting.asked_again:
            waiting.asked_again = True
            self._supply.refused = None  # others may have given memory back since
            return
        if options.collect and not waiting.collected:
            waiting.collected = True
            self.rungs["collect"] += 1
            gc.collect()
            return  # what was freed is worth one more try
        if options.on_oom is not None and waiting.tries < _RETRIES:
            waiting.tries += 1
            self.rungs["ask"] += 1
            if options.on_oom(self._flow.facts(waiting)):
                self._supply.refused = None
                return
        with self._flow.turn:
            if not waiting.done:  # it may have been served since
                self._flow.withdraw(waiting, self._flow.out_of_memory(waiting))

    def grow_ahead(self, growth: Errand) -> Errand:
        """Answer the errand for growth that nobody waits for yet."""
        return partial(self._grow, growth, None)

    def trim(self, give_back: Callable[[], int]) -> Errand:
        """Answer the errand that gives memory back when nobody waits."""
        return partial(self._trim, give_back, None)
