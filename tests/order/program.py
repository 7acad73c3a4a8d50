"""Programs on several streams over a heap, its `Retire` and the simulated device, whose checker is the judge.

A program keeps the user's side of the bargain, also where several streams share a block, so whatever the checker finds
is the fault of the code under test. Each block is written as soon as it is taken: a wait that is missing shows at once.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from asyncmem.core import Retire
from asyncmem.devices import Segment, Simulated, SimulatedStream
from asyncmem.errors import DeviceError, OutOfMemoryError

from .heap import Entry, Heap

SEGMENT = 16 * 4096
SIZES = (512, 1024, 4096, 4096, 12_288, 30_000)
STREAMS = 3


class FullHeap(Heap, Protocol):
    """What a program needs of the core besides epochs."""

    def take(self, nbytes: int, stream: int) -> int: ...
    def put_back(self, block: int, entries: Sequence[Entry]) -> int: ...
    def add_segment(self, address: int, nbytes: int, arena: int, stream: int) -> int: ...
    def empty_segments(self) -> list[tuple[int, int, int, tuple[Entry, ...]]]: ...
    def remove_segment(self, segment: int) -> tuple[Entry, ...]: ...
    def flush(self, stream: int = -1) -> int: ...
    def merge(self) -> int: ...
    def live(self) -> int: ...
    def check(self) -> None: ...


class RacingHeap:
    """The heap of a program in which somebody else frees just before and just after each epoch is closed.

    That is what other threads may do at any time; here they do it every time, and in every run alike.
    """

    def __init__(self, heap: FullHeap, somebody_frees: Callable[[int], None]) -> None:
        self._heap = heap
        self._somebody_frees = somebody_frees

    def __getattr__(self, name: str) -> object:
        return getattr(self._heap, name)

    def close_epoch(self, stream: int) -> int:
        self._somebody_frees(stream)
        epoch = self._heap.close_epoch(stream)
        self._somebody_frees(stream)
        return epoch


@dataclass
class Block:
    """A live block: who may still use it, and whether several streams read it at once."""

    index: int
    address: int
    nbytes: int
    users: set[int] = field(default_factory=set)
    shared: bool = False


class Program:
    """One history. `step` does one thing, `finish` frees everything and gives all memory back."""

    def __init__(
        self,
        heap: FullHeap,
        make: type[Retire] = Retire,
        *,
        device: type[Simulated] = Simulated,
        late_fences: bool = True,
        fence_every: int = 1,
    ) -> None:
        self.device = device(6 * SEGMENT)
        self.heap: FullHeap = cast("FullHeap", RacingHeap(heap, self.somebody_frees))
        self.retire = make(self.heap, self.device, late_fences=late_fences, fence_every=fence_every)
        self.streams: list[SimulatedStream] = [self.device.default_stream]
        self.streams += [self.device.create_stream(f"stream {number}") for number in range(1, STREAMS)]
        self.indices = [self.retire.register(stream) for stream in self.streams]
        self.unnamed = self.device.create_stream("unnamed")  # a consumer that never tells the pool its stream
        self.blocks: list[Block] = []
        self.busy: Block | None = None
        self.segments: dict[int, Segment] = {}
        self.foreign_takes = 0

    def step(self, name: str, which: int, where: int, how: int) -> None:
        """Do what `name` says; the numbers pick a block, a stream and a variant."""
        stream = self.indices[where % STREAMS]
        if name in ON_BLOCKS:
            if self.blocks:
                self.busy = self.blocks[which % len(self.blocks)]
                ON_BLOCKS[name](self, self.busy, stream, how)
                self.busy = None
        else:
            ALONE[name](self, stream, how)

    def run(self, seed: int, steps: int, *, without: str = "") -> None:
        """Do `steps` random things, none of them the one named by `without`, then finish."""
        choice = random.Random(seed)
        weights = {name: weight for name, weight in WEIGHTS.items() if name != without}
        for name in choice.choices(list(weights), list(weights.values()), k=steps):
            self.step(name, choice.randrange(1 << 16), choice.randrange(1 << 16), choice.randrange(1 << 16))
        self.finish()

    def finish(self) -> None:
        """End with nothing live, nothing reserved, and a heap that is whole."""
        while self.blocks:
            self.free(self.blocks[0], 0, 0)
        self.trim(0, 0)
        self.heap.check()
        assert self.heap.live() == 0
        assert self.device.reserved == 0
        assert not self.segments

    def allocate(self, stream: int, how: int) -> None:
        """Take a block as a pool does: from the caches or own memory, from other streams, or from the device."""
        nbytes = SIZES[how % len(SIZES)]
        index = self.heap.take(nbytes, stream) or self.take_foreign(nbytes, stream, how)
        if not index and self.grow(stream):
            index = self.heap.take(nbytes, stream)
        if index:
            block = Block(index, self.heap.info(index).address, self.heap.info(index).nbytes)
            self.blocks.append(block)
            self.touch(block, stream, write=True)

    def take_foreign(self, nbytes: int, stream: int, how: int) -> int:
        """Look for what other streams have used, and order the stream behind it."""
        found = self.heap.take_foreign(nbytes, stream, late=self.retire.late_fences and how % 2 == 0)
        if found is None:
            return 0
        block, entries = found
        try:
            self.retire.discharge(stream, entries)
        except DeviceError:
            self.heap.put_back(block, entries)
            return 0
        self.foreign_takes += 1
        return block

    def grow(self, stream: int) -> bool:
        try:
            segment = self.device.allocate_segment(SEGMENT, stream=self.retire.streams[stream])
        except OutOfMemoryError:
            return False
        self.segments[self.heap.add_segment(segment.address, segment.nbytes, 0, stream)] = segment
        return True

    def work(self, block: Block, stream: int, how: int) -> None:
        """Launch work on a stream that may use the block; writes only where one stream has it alone."""
        allowed = [self.heap.info(block.index).stream, *sorted(block.users)]
        self.touch(block, allowed[stream % len(allowed)], write=not block.shared and how % 2 == 0)

    def use_on(self, block: Block, other: int, _how: int) -> None:
        """Let another stream read the block beside its home, which only reads from now on."""
        try:
            self.retire.use_on(self.heap.info(block.index).stream, other)
        except DeviceError:
            return
        if other != self.heap.info(block.index).stream:
            block.users.add(other)
            block.shared = True
            self.touch(block, other, write=False)

    def hand_over(self, block: Block, other: int, _how: int) -> None:
        """Move the block to another stream, which writes it at once if nobody else reads it."""
        try:
            self.retire.hand_over(block.index, other)
        except DeviceError:
            return
        self.touch(block, other, write=not block.shared)

    def free(self, block: Block, _stream: int, _how: int) -> None:
        """Free on the home stream, behind the users that were named."""
        self.blocks.remove(block)
        self.heap.free(block.index, self.retire.entries_for(block.users - {self.heap.info(block.index).stream}))

    def free_on(self, block: Block, other: int, how: int) -> None:
        """Free on another stream, which was ordered by the user's own wait and has used the block last."""
        if block.shared or other == self.heap.info(block.index).stream:
            return
        self.follow(self.stream(other), block, write=how % 2 == 0)
        block.users.add(other)
        self.free(block, other, how)

    def free_unnamed(self, block: Block, stream: int, how: int) -> None:
        """Free a block that a consumer used without naming its stream."""
        if block.shared:
            return
        self.follow(self.unnamed, block, write=how % 2 == 0)
        block.users.add(self.retire.everywhere())
        self.free(block, stream, how)

    def follow(self, stream: SimulatedStream, block: Block, *, write: bool) -> None:
        """Use the block on a stream that the user has ordered behind its home, without help of the code under test."""
        self.device.timeline.wait(stream.handle, *self.device.timeline.record(self._home(block).handle))
        self._launch(stream, block, write=write)

    def fence(self, stream: int, _how: int) -> None:
        """Hurry a stream's frees, as a worker does."""
        try:
            self.retire.fence(stream)
        except DeviceError:
            return

    def poll(self, _stream: int, how: int) -> None:
        """Let time pass and look which fences are done."""
        self.device.advance(how % 8 * 1e-3)
        try:
            self.retire.poll()
        except DeviceError:
            return

    def fault(self, _stream: int, how: int) -> None:
        """Let one of the coming calls fail."""
        self.device.fail(("record", "wait", "query", "record_all")[how % 4], 1 + how % 3)

    def merge(self, stream: int, how: int) -> None:
        """Empty the caches and merge neighbours across streams."""
        self.heap.flush(-1 if how % 2 else stream)
        self.heap.merge()
        self.heap.check()

    def trim(self, _stream: int, _how: int) -> None:
        """Give every empty segment back to the device."""
        self.heap.flush()
        self.heap.merge()
        for number, _address, _nbytes, _entries in self.heap.empty_segments():
            entries = self.heap.remove_segment(number)
            self._settle(entries)
            self.device.free_segment(self.segments.pop(number))

    def somebody_frees(self, stream: int) -> None:
        """Use and free a block of that stream, which is none of the one that is being worked on."""
        for block in self.blocks:
            if block is not self.busy and not block.users and self.heap.info(block.index).stream == stream:
                self.touch(block, stream, write=True)
                self.blocks.remove(block)
                self.heap.free(block.index)
                return

    def stream(self, index: int) -> SimulatedStream:
        """Return the stream of that index."""
        return self.device.stream_of(self.retire.streams[index])

    def touch(self, block: Block, stream: int, *, write: bool) -> None:
        """Launch work of a millisecond."""
        self._launch(self.stream(stream), block, write=write)

    def _home(self, block: Block) -> SimulatedStream:
        return self.stream(self.heap.info(block.index).stream)

    def _settle(self, entries: tuple[Entry, ...]) -> None:
        while True:
            try:
                assert self.retire.settle(entries)
            except DeviceError:
                continue  # each fault comes once
            return

    @staticmethod
    def _launch(stream: SimulatedStream, block: Block, *, write: bool) -> None:
        item = (block.address, block.nbytes)
        stream.launch(1e-3, reads=[] if write else [item], writes=[item] if write else [])


ON_BLOCKS: dict[str, Callable[[Program, Block, int, int], None]] = {
    "work": Program.work,
    "use_on": Program.use_on,
    "hand_over": Program.hand_over,
    "free": Program.free,
    "free_on": Program.free_on,
    "free_unnamed": Program.free_unnamed,
}
ALONE: dict[str, Callable[[Program, int, int], None]] = {
    "allocate": Program.allocate,
    "fence": Program.fence,
    "poll": Program.poll,
    "fault": Program.fault,
    "merge": Program.merge,
    "trim": Program.trim,
}
WEIGHTS = {
    "allocate": 30,
    "work": 8,
    "free": 16,
    "free_on": 5,
    "free_unnamed": 1,
    "use_on": 4,
    "hand_over": 4,
    "fence": 4,
    "poll": 6,
    "fault": 1,
    "merge": 2,
    "trim": 1,
}
