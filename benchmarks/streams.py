"""The row `streams`: the memory and the time of a program that hands its results from stream to stream.

Four streams with a matrix each; 160 rounds, in each of which a chain of matrix products of random height goes through
all four, and the last result is kept among the newest one to six. Kernels run far behind the host, so an allocator that
reuses a block only once the host has seen every stream done with it reserves many times what is live.
"""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.bench.timing import Effort, Timing, collector_off, summary
from benchmarks.allocators import Allocator
from benchmarks.pytorch import AsyncmemAndTorch, PooledTensor, Tensors, TorchEmpty
from benchmarks.suite import Measured, Task

STREAMS: Final = 4
WIDTH: Final = 2048
ROUNDS: Final = 160
MOST_KEPT: Final = 6
RUNS: Final = 5

SPENDING: Final = "overlap"
"""The pool's option that says how much memory may be spent to keep streams from waiting for each other."""
CURVE: Final = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 16.0)
"""Shares of the most that has been live."""


class Program(ABC):
    """The program, over the memory of one allocator."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.streams = [torch.cuda.Stream() for _ in range(STREAMS)]

    @abstractmethod
    def begin(self, rows: int) -> Any:  # noqa: ANN401 - of a package that may be absent
        """Draw a random matrix on the first stream."""

    @abstractmethod
    def step(self, x: Any, index: int, *, twice: bool) -> Any:  # noqa: ANN401 - as above
        """Take x over to a stream, and multiply, activate and add there."""

    def run(self) -> None:
        """Run the program; the device may still be at it afterwards."""
        draw = random.Random(0)  # noqa: S311 - the same numbers every time are what is wanted
        kept = []
        for _ in range(ROUNDS):
            x = self.begin(draw.randint(512, 8192))
            for index in range(STREAMS):
                x = self.step(x, index, twice=draw.random() < 0.5)
            kept.append(x)
            del kept[: -draw.randint(1, MOST_KEPT)]


class TorchProgram(Program):
    """torch's own memory: a fence and `record_stream` at each hop."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__(torch)
        self.weights = [torch.randn(WIDTH, WIDTH, device="cuda") / WIDTH**0.5 for _ in range(STREAMS)]
        self.fence = torch.cuda.Event()
        torch.cuda.synchronize()

    def begin(self, rows: int) -> Any:  # noqa: ANN401 - of a package that may be absent
        with self.torch.cuda.stream(self.streams[0]):
            x = self.torch.randn(rows, WIDTH, device="cuda")
        self._record(0)
        return x

    def step(self, x: Any, index: int, *, twice: bool) -> Any:  # noqa: ANN401 - as above
        stream, torch = self.streams[index], self.torch
        stream.wait_event(self.fence)
        x.record_stream(stream)
        with torch.cuda.stream(stream):
            t = x @ self.weights[index]
            x = torch.nn.functional.gelu(t) + (2 * t if twice else t)
        self._record(index)
        return x

    def _record(self, index: int) -> None:
        self.fence = self.torch.cuda.Event()
        self.fence.record(self.streams[index])


class PoolProgram(Program):
    """A pool's memory: `use_on` at each hop, which also orders the stream behind the one before."""

    def __init__(self, torch: ModuleType, pool: AsyncMemoryPool) -> None:
        super().__init__(torch)
        self.tensors = Tensors(torch, pool)
        self.ours = [pool.device.stream_of(stream) for stream in self.streams]
        self.weights = [self._weight(index) for index in range(STREAMS)]
        torch.cuda.synchronize()

    def _weight(self, index: int) -> PooledTensor:
        with self.torch.cuda.stream(self.streams[index]):
            weight = self.tensors.empty((WIDTH, WIDTH), self.ours[index])
            weight.tensor.normal_(std=WIDTH**-0.5)
        return weight

    def begin(self, rows: int) -> PooledTensor:
        with self.torch.cuda.stream(self.streams[0]):
            x = self.tensors.empty((rows, WIDTH), self.ours[0])
            x.tensor.normal_()
        return x

    def step(self, x: PooledTensor, index: int, *, twice: bool) -> PooledTensor:
        torch, stream, empty = self.torch, self.ours[index], self.tensors.empty
        shape = tuple(x.tensor.shape)
        x.buffer.use_on(stream)
        with torch.cuda.stream(self.streams[index]):
            t = empty(shape, stream)
            torch.matmul(x.tensor, self.weights[index].tensor, out=t.tensor)
            active = empty(shape, stream)
            torch.ops.aten.gelu.out(t.tensor, out=active.tensor)
            added = t
            if twice:
                added = empty(shape, stream)
                torch.mul(t.tensor, 2, out=added.tensor)
            result = empty(shape, stream)
            torch.add(active.tensor, added.tensor, out=result.tensor)
        return result


def streams(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Run the program over torch's memory or the pool's; the pool's with torch's own in turn, then along the curve."""
    with collector_off():
        if isinstance(peer, AsyncmemAndTorch):
            yield from _ours(peer, task.effort)
        elif isinstance(peer, TorchEmpty):
            yield from _torch(peer, task.effort)


def _torch(peer: TorchEmpty, effort: Effort) -> Iterator[Measured]:
    with peer.opened():
        peer.torch.cuda.reset_peak_memory_stats()
        program = TorchProgram(peer.torch)
        _timed(peer.torch, program)
        times = summary([_timed(peer.torch, program) for _ in range(_runs(effort))])
        name = peer.name.replace(TorchEmpty.name, "torch")
        cuda = peer.torch.cuda
        yield _reserved(name, cuda.max_memory_reserved(), cuda.max_memory_allocated())
        yield Measured(row="streams", case="time", peer=name, min=times.ns, median=times.median_ns)


def _ours(peer: AsyncmemAndTorch, effort: Effort) -> Iterator[Measured]:
    torch = peer.torch
    theirs = TorchProgram(torch)
    yield from _one(peer, theirs, {}, "", _runs(effort))
    for share in CURVE:
        yield from _one(peer, theirs, {SPENDING: share}, f", {SPENDING} {share:g}", max(2, _runs(effort) // 2))


def _one(peer: AsyncmemAndTorch, theirs: Program, options: dict[str, Any], case: str, runs: int) -> Iterator[Measured]:
    torch = peer.torch
    with AsyncMemoryPool(peer.device, **options) as pool:
        program = PoolProgram(torch, pool)
        _timed(torch, theirs)
        first = _timed(torch, program)
        pairs = [(_timed(torch, program), _timed(torch, theirs)) for _ in range(runs)]
        stats = pool.stats()
        ours, floor = summary([one for one, _ in pairs]), summary([one for _, one in pairs])
        del program
    yield _reserved(peer.name, stats.peak_reserved, stats.peak_allocated, case)
    yield _time(peer.name, ours, floor, case, first_ns=first, late_fences=stats.late_fences, grows=stats.grows)


def _reserved(name: str, reserved: int, live: int, case: str = "") -> Measured:
    ratio = reserved / live
    figures = {"reserved_bytes": reserved, "live_bytes": live}
    case = f"reserved ÷ live{case}"
    return Measured(row="streams", case=case, peer=name, unit="", min=ratio, median=ratio, figures=figures)


def _time(name: str, ours: Timing, floor: Timing, case: str, **figures: int) -> Measured:
    return Measured(
        row="streams",
        case=f"time{case}",
        peer=name,
        min=ours.ns,
        median=ours.median_ns,
        floor=floor.ns,
        figures={
            "to_torch": round(ours.ns / floor.ns, 4),
            "to_torch_median": round(ours.median_ns / floor.median_ns, 4),
            **figures,
        },
    )


def _timed(torch: ModuleType, program: Program) -> int:
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    program.run()
    torch.cuda.synchronize()
    return time.perf_counter_ns() - start


def _runs(effort: Effort) -> int:
    return max(2, round(RUNS * effort.share))
