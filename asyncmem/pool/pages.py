"""Plans for pages, carried out: what the device did is told to the heap step by step, and nothing else is believed.

All that a plan names is held by the heap until it is let go of. So a failure half way leaves nothing to undo: what was
unmapped and mapped until then is known, and free again where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncmem.devices.base import Remapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.core import Core, Turn
    from asyncmem.core.report import Plan
    from asyncmem.devices import Device, Stream
    from asyncmem.devices.base import Span


@dataclass(frozen=True, slots=True)
class Change:
    """What is to become of pages.

    Attributes:
        plans: One for each place that gets memory, or gives some back.
        decided: When, in seconds of the supply's clock.
        stock: What is mapped beside it, ahead of need, or None. Whoever waits can do without.
    """

    plans: Sequence[Plan]
    decided: float
    stock: Plan | None = None

    @property
    def fresh(self) -> int:
        """Bytes that the device is to give."""
        return sum(nbytes for plan in self.all() for _, nbytes in plan.fresh)

    @property
    def more(self) -> int:
        """Bytes that the device is to give beyond those that it gets back before."""
        back = sum(move.nbytes for plan in self.plans for move in plan.moves if not move.to)
        return max(0, self.fresh - back)

    @property
    def ahead(self) -> int:
        """Bytes of it that nobody waits for."""
        return sum(nbytes for _, nbytes in self.stock.fresh) if self.stock else 0

    def all(self) -> list[Plan]:
        """Answer all plans, what is ahead of need last."""
        return [*self.plans, self.stock] if self.stock else [*self.plans]

    def out(self) -> list[tuple[int, Span]]:
        """Answer what is unmapped, each with its space, by address: neighbours go in one call."""
        moves = [(move.segment, (move.address, move.nbytes)) for plan in self.plans for move in plan.moves]
        return sorted(moves, key=lambda move: move[1])

    def into(self) -> list[tuple[int, Span]]:
        """Answer what is mapped: what has only moved comes first, so that it gets what was unmapped."""
        moved = [(plan.segment, (one.to, one.nbytes)) for plan in self.plans for one in plan.moves if one.to]
        return moved + [(plan.segment, span) for plan in self.all() for span in plan.fresh]


class Pages:
    """The ranges of addresses of one pool, and the memory behind them.

    Args:
        core: The heap, which gets a space for each of its two arenas.
        turn: The pool's; taken wherever the heap is told.
        spread: Bytes of each range.

    Raises:
        OutOfMemoryError: The device has not so many addresses.
        DeviceError: The device failed. Nothing is left in either case.
    """

    def __init__(self, core: Core, device: Device, turn: Turn, spread: int) -> None:
        self._core = core
        self._device = device
        self._turn = turn
        self._unclean: list[Change] = []  # mapped, and being filled with zeros as far as the host knows
        self.spaces: dict[int, Span] = {}
        try:
            for arena in (0, 1):
                address = device.reserve(spread)
                self.spaces[core.add_space(address, spread, arena, device.page)] = address, spread
        except BaseException:
            self.close()
            raise

    @property
    def held_back(self) -> int:
        """Bytes that nobody may have before it is known that they are zero."""
        return sum(change.fresh for change in self._unclean)

    def close(self) -> None:
        """Give the ranges back. Nothing is mapped there.

        Raises:
            DeviceError: The device did not take one back; it and the rest are left for the next time.
        """
        for number, (address, nbytes) in list(self.spaces.items()):
            self._device.unreserve(address, nbytes)
            self._core.remove_space(number)
            del self.spaces[number]

    def carry_out(self, change: Change) -> Remapped:
        """Unmap and map (blocks), and tell the heap how far that came; the change is still to be let go of."""
        out, into = change.out(), change.into()
        need = len(into) - len(change.stock.fresh if change.stock else ())
        done = self._device.remap([span for _, span in out], [span for _, span in into[:need]])
        if done.error is None and need < len(into):
            ahead = self._device.remap([], [span for _, span in into[need:]])
            done = Remapped(done.unmapped, need + ahead.mapped)  # nobody fails for what nobody waits for
        with self._turn:
            for space, (address, nbytes) in out[: done.unmapped]:
                self._core.set_bare(space, address, nbytes)
            for space, (address, nbytes) in into[: done.mapped]:
                self._core.set_mapped(space, address, nbytes)
        return done

    def let_go(self, change: Change) -> None:
        """Let the heap have it all again, joined with what it was cut from (with the turn held)."""
        for plan in change.all():
            for move in plan.moves:
                self._core.let_go(move.segment, move.address, move.nbytes)
            if plan.nbytes:
                self._core.let_go(plan.segment, plan.address, plan.nbytes)

    def clear(self, change: Change, mapped: int, stream: Stream) -> None:
        """Fill with zeros what of the first `mapped` pages is new, and wait for it (blocks).

        Raises:
            DeviceError: Whether they are filled cannot be known: the change is held back until `wash` has seen it.
        """
        fresh = {span for plan in change.all() for span in plan.fresh}
        new = [span for _, span in change.into()[:mapped] if span in fresh]
        if not new:
            return
        try:
            for address, nbytes in new:
                self._device.fill(address, nbytes, 0, stream)
            stream.record().block()
        except BaseException:
            with self._turn:
                self._unclean.append(change)
            raise

    def wash(self, stream: Stream) -> None:
        """Wait for what could not be waited for before (blocks), and let go of it."""
        if not self._unclean:
            return
        stream.record().block()
        with self._turn:
            while self._unclean:
                self.let_go(self._unclean.pop())
