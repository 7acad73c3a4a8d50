"""Copies of the code under test with just one rule of stream order broken each.

`Retire` is broken by subclasses. The heap is broken from outside, by what it returns, so that the same breakage applies
to the compiled heap and to its twin; the twin is broken inside as well, where the rules are kept.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self, cast

from asyncmem.core import Retire
from asyncmem.devices import Device, Fence, Stream
from tests.reference import ReferenceHeap
from tests.reference.blocks import Block

from .heap import Entry, Heap


@dataclass(frozen=True)
class Mutant:
    """One broken rule: a heap or a `Retire` that does not keep it."""

    retire: type[Retire] = Retire
    heap: Callable[[type], type] = lambda kind: kind
    fence_every: int = 1


class SkipsTheFenceOfATake(Retire):
    """A stream takes another's memory and waits for nobody."""

    def discharge(self, taker: int, entries: Iterable[Entry]) -> None:
        pass


class WaitsForAStaleFence(Retire):
    """Any fence that the other stream has recorded will do, also one from before the last use (rmm #2489)."""

    def discharge(self, taker: int, entries: Iterable[Entry]) -> None:
        super().discharge(taker, [(stream, self._stale(stream, epoch)) for stream, epoch in entries])

    def _stale(self, stream: int, epoch: int) -> int:
        recorded = (early for early in range(epoch, 0, -1) if self._heap.entry_state(stream, early) == 1)
        return next(recorded, epoch)


class _RecordsOtherwise(Retire):
    """Has every stream record in another way, by its method or through the device's table."""

    def __init__(self, heap: Heap, device: Device, **options: Any) -> None:  # noqa: ARG002  # it has them already
        self._real: dict[int, Callable[[], Fence]] = {}
        self._replace(0, device.default_stream, "record")

    def register(self, stream: Stream) -> int:
        index = super().register(stream)
        self._replace(index, stream, "record")
        return index

    def everywhere(self) -> int:
        index = super().everywhere()
        self._replace(index, self._device, "record_all")
        return index

    def _replace(self, index: int, owner: object, name: str) -> None:
        if index not in self._real:
            self._real[index] = getattr(owner, name)
            setattr(owner, name, lambda: self.record_otherwise(index))

    def record_otherwise(self, index: int) -> Fence:
        raise NotImplementedError


class RecordsBeforeClosing(_RecordsOtherwise):
    """The fence is recorded while its epoch is still open, so that a free in between counts as covered."""

    _early: dict[int, Fence]

    def __new__(cls, heap: Heap, device: Device, **options: Any) -> Self:
        first = _RecordsFirst(heap)
        made = super().__new__(cls, cast("Heap", first), device, **options)  # type: ignore[call-arg]
        made._early = {}
        first.record = made._record_early
        return made

    def _record_early(self, index: int) -> None:
        self._early[index] = self._real[index]()

    def record_otherwise(self, index: int) -> Fence:
        return self._early[index]


class _RecordsFirst:
    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.record: Callable[[int], object] = id

    def __getattr__(self, name: str) -> object:
        return getattr(self._heap, name)

    def close_epoch(self, stream: int) -> int:
        self.record(stream)
        return self._heap.close_epoch(stream)


class IgnoresOtherUsersAtTheFree(Retire):
    """Only the home stream counts when a block is freed, also if another stream used it."""

    def entries_for(self, users: Iterable[int], nbytes: int = 0) -> list[Entry]:  # noqa: ARG002  # that is the mistake
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


class TakesRecordedForDone(_RecordsOtherwise):
    """Fences say that they are done without asking the device."""

    def record_otherwise(self, index: int) -> Fence:
        fence = self._real[index]()
        fence.done = lambda: True  # type: ignore[method-assign]  # that is the mistake
        return fence


class GivesSegmentsBackEarly(Retire):
    """A segment leaves the pool while work on it is running; streams that wait do not help then."""

    def settle(self, entries: Iterable[Entry], timeout: float | None = None) -> bool:  # noqa: ARG002  # that is the mistake
        return True


def reports_one_stream(kind: type) -> type:
    """A block that depends on several streams, as merged ones do, reports one of them."""

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


def names_the_epoch_before(kind: type) -> type:
    """A free that shares its fence joins an epoch whose fence was recorded before the last use."""

    class Outdated(kind):  # type: ignore[misc]  # either heap
        def open_epoch(self, stream: int) -> int:
            return max(1, int(super().open_epoch(stream)) - 1)

    return Outdated


def overlooks_a_stream(kind: type) -> type:
    """What the default stream does to memory is never reported."""

    class Blind(kind):  # type: ignore[misc]  # either heap
        def take_foreign(self, *args: object, **options: object) -> object:
            found = super().take_foreign(*args, **options)
            return found and (found[0], [entry for entry in found[1] if entry[0] != 0])

    return Blind


def reports_the_earlier_epoch(kind: type) -> type:
    """An entry names an epoch before the last use."""

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
    "all dependencies but one dropped": Mutant(heap=reports_one_stream),
    "memory reused early": Mutant(heap=reuses_early),
    "earlier epoch reported": Mutant(heap=reports_the_earlier_epoch),
    "uses of one stream overlooked": Mutant(heap=overlooks_a_stream),
    "shared fence that is too old": Mutant(heap=names_the_epoch_before, fence_every=3),
}


class DropsTheHigherBlocksEntries(ReferenceHeap):
    """A merged block waits only for what its lower part waited for."""

    def absorb(self, low: Block, high: Block) -> None:
        high.entries = {}
        super().absorb(low, high)


class KeepsTheEarlierEpoch(ReferenceHeap):
    """A merged block waits for the earlier of two uses by one stream."""

    def absorb(self, low: Block, high: Block) -> None:
        earlier = {stream: min(epoch, high.entries.get(stream, epoch)) for stream, epoch in low.entries.items()}
        later, high.entries = high.entries, {}
        super().absorb(low, high)
        low.entries = later | earlier


class SplitsOffCleanMemory(ReferenceHeap):
    """The rest of a block that is cut forgets what the whole waited for."""

    def carve(self, block: Block, granules: int) -> None:
        whole = block.granules
        super().carve(block, granules)
        if granules < whole and block.after is not None:
            _clean(self, block.after)


class IsBornClean(ReferenceHeap):
    """A new segment may be used by any stream, though it comes in the order of one."""

    def add_segment(self, address: int, nbytes: int, arena: int, stream: int) -> int:
        number = super().add_segment(address, nbytes, arena, stream)
        _clean(self, self.segments_by_id[number].first)
        return number


class ForgetsNamedUsers(ReferenceHeap):
    """What other streams did to a freed block is not kept with it."""

    def give_back(self, block: Block, extra: dict[int, int]) -> None:
        extra.clear()
        super().give_back(block, extra)


def _clean(heap: ReferenceHeap, block: Block) -> None:
    heap.index_remove(block)
    block.entries = {}
    heap.index_add(block)


BROKEN_HEAPS: dict[str, type[ReferenceHeap]] = {
    "dependency dropped on merge": DropsTheHigherBlocksEntries,
    "earlier epoch kept on merge": KeepsTheEarlierEpoch,
    "dependency dropped on split": SplitsOffCleanMemory,
    "segment born clean": IsBornClean,
    "named users forgotten": ForgetsNamedUsers,
}
