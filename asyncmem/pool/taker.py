"""Taking from what is mapped, in the order of what it costs: own memory, memory that is done, another stream's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.core import Batch
from asyncmem.errors import DeviceError
from asyncmem.pool.notes import notes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncmem.core import Buffer, Core
    from asyncmem.engine.retire import Retire
    from asyncmem.pool.share import Share
    from asyncmem.pool.supply import Supply
    from asyncmem.pool.waiting import Waiting

    Undo = list[tuple[int, Sequence[tuple[int, int]]]]


class Taker:
    """Grants without waiting and without growing. Called with the turn held; makes no call that blocks."""

    def __init__(self, core: Core, retire: Retire, supply: Supply) -> None:
        self._core = core
        self._retire = retire
        self._supply = supply
        self._checker = core.device.checker

    def take(self, waiting: Waiting, *, may_grow: bool = True) -> Buffer | Batch | None:
        """Answer what was asked, or None where the mapped memory has no room for all of it.

        Where `may_grow`, None may also mean: not without making a stream wait, and growth is allowed to avoid that.
        """
        self._core.blame(waiting)
        try:
            capture = waiting.capture
            if capture is not None:
                found = capture.graph.take(waiting, capture.home)
            else:
                found = self._find(waiting.share, waiting, may_grow=may_grow)
                if found is None and waiting.share.has_range and self._core.merge(waiting.share._arena):
                    # The ladder tidies up for requests to the pool. What is free in a range has to serve as it is.
                    found = self._find(waiting.share, waiting, may_grow=may_grow)
        finally:
            self._core.blame(None)
        if found is not None:
            self._note(waiting, found if isinstance(found, Batch) else [found])
        return found

    def take_at(self, waiting: Waiting, address: int) -> Buffer | None:
        """Answer just these bytes of a lease's range, or None where some of them are in use or cannot be waited for."""
        share = waiting.share
        taken = self._retire.take_at(address, waiting.nbytes, waiting.stream, share._account, share._arena)
        if taken is None:
            return None
        self._retire.foreign_takes += bool(taken[1])
        found = self._core.adopt(taken[0], waiting.nbytes, waiting.tag)
        self._note(waiting, [found])
        return found

    def _note(self, waiting: Waiting, found: Iterable[Buffer]) -> None:
        noted = waiting.site is not None or waiting.holder is not None
        if not (noted or self._supply.direct or self._checker is not None):
            return
        for buffer in found:
            note = notes_of(buffer)
            note.site = waiting.site
            if waiting.holder is not None:
                note.hold(waiting.share, waiting.holder, (buffer.address, buffer.size))
            if self._checker is not None and buffer.nbytes:
                self._checker.open_block(buffer.address, buffer.nbytes)

    def poll(self) -> int:
        """Look which fences are done; one that cannot be asked counts as not done."""
        try:
            return self._retire.poll()
        except DeviceError:
            return 0  # a device that is lost says so to whoever grows or frees on it

    def _find(self, share: Share, ask: Waiting, *, may_grow: bool) -> Buffer | Batch | None:
        found = share.grant(ask, anywhere=False)
        if found is not None or (self._core.lacks_pages and not ask.pressed):
            return found
        # Memory of the other size class is only for requests that cannot have a segment of their own, and for batches
        # of both classes, whose own segment is of the larger one.
        own = self._supply.growth.is_of_one_class(ask.pieces) and self._supply.can_order(ask.pieces)
        anywhere = share.may_wait and (ask.pressed or not own)
        if anywhere or self.poll():
            found = share.grant(ask, anywhere=anywhere)
            if found is None and self._core.lacks_pages and not ask.pressed:
                return None
        if found is None and len(self._core.stream_objects) > 1 and not (may_grow and self._supply.keeps_apart(ask)):
            found = self._take_foreign(share, ask, anywhere=anywhere)
            self._retire.foreign_takes += 0 if found is None else len(ask.sizes)
        return found

    def _take_foreign(self, share: Share, ask: Waiting, *, anywhere: bool) -> Buffer | Batch | None:
        taken: Undo = []
        for nbytes in ask.sizes:
            if nbytes and not self._take_one(share, ask.stream, nbytes, taken, anywhere=anywhere):
                for block, entries in reversed(taken):
                    self._core.put_back(block, entries)
                return None
        blocks = iter([block for block, _ in taken])
        found = [next(blocks) if nbytes else 0 for nbytes in ask.sizes]
        if ask.batch:
            return self._core.adopt_many(found, ask.sizes, ask.tag)
        return self._core.adopt(found[0], ask.sizes[0], ask.tag)

    def _take_one(self, share: Share, stream: int, nbytes: int, taken: Undo, *, anywhere: bool) -> bool:
        found = self._retire.take_foreign(nbytes, stream, share._account, share._arena, anywhere)
        if found is not None:
            taken.append(found)
        return found is not None
