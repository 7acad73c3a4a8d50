"""Copies of the code under test with just one rule of stream order broken each.

`Retire` is broken by subclasses. The heap is broken from outside, by what it is told and what it answers, so the same
breakage applies to the compiled heap and to its twin.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

from asyncmem.devices import Device, Fence
from asyncmem.engine.retire import Entry, Heap, Retire


@dataclass(frozen=True)
class Mutant:
    """One broken rule: a heap or a `Retire` that does not keep it."""

    retire: type[Retire] = Retire
    heap: Callable[[type], type] = lambda kind: kind


class SkipsTheFenceOfATake(Retire):
    """A stream takes another's memory and waits for nobody."""

    def discharge(self, taker: int, entries: Iterable[Entry]) -> None:
        pass


class WaitsForAStaleFence(Retire):
    """Any fence that the other stream has recorded will do, also one from before the last use (rmm #2489)."""

    def _late_fence(self, index: int, epoch: int) -> Fence | None:
        fences = self._fences.get(index)
        return fences[-1][1] if fences else super()._late_fence(index, epoch)


class RecordsBeforeClosing(Retire):
    """The fence is recorded while its epoch is still open, so that a free in between counts as covered."""

    def __init__(self, heap: Heap, device: Device, *, late_fences: bool = True) -> None:
        self._early: dict[int, Fence] = {}
        super().__init__(cast("Heap", _RecordsFirst(heap, self._record_early)), device, late_fences=late_fences)

    def _record_early(self, index: int) -> None:
        stream = self.streams[index]
        self._early[index] = self._device.record_all() if stream is None else stream.record()

    def _record(self, index: int, epoch: int) -> Fence:
        queue = self._fences.setdefault(index, deque())
        queue.append((epoch, self._early[index]))
        self._heap.publish(index, epoch)
        return self._early[index]


class _RecordsFirst:
    def __init__(self, heap: Heap, record: Callable[[int], None]) -> None:
        self._heap = heap
        self._record = record

    def __getattr__(self, name: str) -> object:
        return getattr(self._heap, name)

    def close_epoch(self, stream: int) -> int:
        self._record(stream)
        return self._heap.close_epoch(stream)


class IgnoresOtherUsersAtTheFree(Retire):
    """Only the home stream counts when a block is freed, also if another stream used it."""

    def entries_for(self, users: Iterable[int]) -> list[Entry]:  # noqa: ARG002  # that is the mistake
        return []


class FencesTheWrongStreamForUnnamedUsers(Retire):
    """A consumer that named no stream is taken for one on the default stream."""

    def everywhere(self) -> int:
        return 0


class LetsOthersUseWithoutWaiting(Retire):
    """`use_on` notes the user and does not make it wait for home."""

    def use_on(self, home: int, other: int) -> None:
        pass


class HandsOverWithoutWaiting(Retire):
    """The new home begins before the old one is done."""

    def hand_over(self, block: int, other: int) -> None:
        self._heap.set_home(block, other)


class TakesRecordedForDone(Retire):
    """Polling does not ask the fences."""

    def _advance(self, index: int, queue: deque[tuple[int, Fence]]) -> int:
        count = len(queue)
        while queue:
            self._heap.mark_done(index, queue.popleft()[0])
        return count


class GivesSegmentsBackEarly(Retire):
    """A segment leaves the pool while work on it is running; streams that wait do not help then."""

    def pending(self, entries: Iterable[Entry]) -> list[Fence]:  # noqa: ARG002  # that is the mistake
        return []

    def settle(self, entries: Iterable[Entry], timeout: float | None = None) -> bool:  # noqa: ARG002  # likewise
        return True


def forgets_on_merge(kind: type) -> type:
    """A block that depends on several streams, as merged ones do, reports all but one of them."""

    class Forgetful(kind):  # type: ignore[misc]  # either heap
        def take_foreign(self, *args: object, **options: object) -> object:
            found = super().take_foreign(*args, **options)
            return found and (found[0], found[1][:1])

    return Forgetful


def reuses_early(kind: type) -> type:
    """Memory of other streams is handed out as if it were clean."""

    class Hasty(kind):  # type: ignore[misc]  # either heap
        def take(self, nbytes: int, stream: int) -> int:
            found = super().take(nbytes, stream) or super().take_foreign(nbytes, stream, late=True)
            return found if isinstance(found, int) else found[0] if found else 0

    return Hasty


def overlooks_a_stream(kind: type) -> type:
    """What the default stream does to memory is never reported."""

    class Blind(kind):  # type: ignore[misc]  # either heap
        def take_foreign(self, *args: object, **options: object) -> object:
            found = super().take_foreign(*args, **options)
            return found and (found[0], [entry for entry in found[1] if entry[0] != 0])

    return Blind


def keeps_the_earlier_epoch(kind: type) -> type:
    """Of two epochs of one stream the earlier survives a merge."""

    class Early(kind):  # type: ignore[misc]  # either heap
        def take_foreign(self, *args: object, **options: object) -> object:
            found = super().take_foreign(*args, **options)
            return found and (found[0], [(stream, max(1, epoch - 1)) for stream, epoch in found[1]])

    return Early


MUTANTS = {
    "fence skipped on a take": Mutant(SkipsTheFenceOfATake),
    "stale fence covers a later take": Mutant(WaitsForAStaleFence),
    "fence recorded before its epoch is closed": Mutant(RecordsBeforeClosing),
    "free on another stream ignored": Mutant(IgnoresOtherUsersAtTheFree),
    "unnamed user taken for the default stream": Mutant(FencesTheWrongStreamForUnnamedUsers),
    "use_on without a wait": Mutant(LetsOthersUseWithoutWaiting),
    "hand_over without a wait": Mutant(HandsOverWithoutWaiting),
    "recorded taken for done": Mutant(TakesRecordedForDone),
    "segment given back early": Mutant(GivesSegmentsBackEarly),
    "dependency dropped on merge": Mutant(heap=forgets_on_merge),
    "memory reused early": Mutant(heap=reuses_early),
    "earlier epoch kept on merge": Mutant(heap=keeps_the_earlier_epoch),
    "uses of one stream overlooked": Mutant(heap=overlooks_a_stream),
}
