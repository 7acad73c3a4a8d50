"""Does a step of training take longer while the worker takes pages back beside it?

The step multiplies, activates and updates in the pool's memory, with another height each time. Meanwhile, or not, a
task on a loop of its own asks for memory, frees it and has the worker give it back, and pauses for 5 ms. Steps with and
without take turns: with 256 MiB a time, and with 2 GiB, about as much as the step works in. A third time they are made
with the driver's calls alone in the pool's place: what they cost the device's work nobody can save.

Such a step keeps the device busy for some 20 ms, of which the host needs a fifth to submit it. A shorter one, which
the host can hardly keep up with, is shown as well: it tells how much the host is held up by threads that run Python
beside it, which costs about the same where these do nothing at all.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from asyncmem import AsyncMemoryPool
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.device.takers import Taker, by_driver, by_pool
from asyncmem.cli.benchmarks.measure import Effort, collector_off
from asyncmem.cli.benchmarks.peers.family import TOGETHER
from asyncmem.cli.benchmarks.peers.peer import Peer
from asyncmem.cli.benchmarks.peers.together import Piece, Tensors, Together
from asyncmem.figures import format_size

QUESTION: Final = "a training-like step while the worker maps pages and takes them back, against one without"
FAMILIES: Final = (TOGETHER,)
LAYERS: Final = 8
WIDTH: Final = 4096
HEIGHTS: Final = (8192, 16384)
SHORT: Final = (2048, 4096)
STEPS: Final = 10
ROUNDS: Final = 12
TAKEN: Final = (256 << 20, 2 << 30)
PEAK: Final = 12 << 30
"""More than is ever needed here: pools exchange segments instead of growing only beyond what they have had before."""


class Training:
    """A stack of layers whose memory, weights too, is a pool's."""

    def __init__(self, torch: ModuleType, pool: AsyncMemoryPool) -> None:
        self.torch = torch
        self.stream = torch.cuda.Stream()
        self.home = pool.device.stream_of(self.stream)
        self.tensors = Tensors(torch, pool, "bfloat16")
        with torch.cuda.stream(self.stream):
            self.weights = [self._random((WIDTH, WIDTH)) for _ in range(LAYERS)]

    def _random(self, shape: tuple[int, int]) -> Piece:
        piece = self.tensors.empty(shape, self.home)
        piece.tensor.normal_(std=WIDTH**-0.5)
        return piece

    def step(self, rows: int) -> None:
        """Go forwards and backwards once; the device may still be at it afterwards."""
        torch, shape = self.torch, (rows, WIDTH)
        with torch.cuda.stream(self.stream):
            kept = [self._random(shape)]
            for weight in self.weights:
                kept.append(self.tensors.empty(shape, self.home))
                torch.matmul(kept[-2].tensor, weight.tensor, out=kept[-1].tensor)
                kept.append(self.tensors.empty(shape, self.home))
                torch.ops.aten.gelu.out(kept[-2].tensor, out=kept[-1].tensor)
            above = kept.pop()
            for weight in reversed(self.weights):
                kept.pop()
                below, change = self.tensors.empty(shape, self.home), self.tensors.empty((WIDTH, WIDTH), self.home)
                torch.matmul(above.tensor, weight.tensor.t(), out=below.tensor)
                torch.matmul(kept.pop().tensor.t(), above.tensor, out=change.tensor)
                weight.tensor.add_(change.tensor, alpha=-1e-6)
                above = below


def measure(peer: Peer, effort: Effort) -> Iterator[Measured]:
    """Time steps with and without, in turn, and compare the medians."""
    assert isinstance(peer, Together)
    for nbytes in TAKEN:
        yield _beside(peer, effort, nbytes, HEIGHTS, f"{format_size(nbytes)} a time")
    yield _beside(peer, effort, TAKEN[-1], SHORT, f"{format_size(TAKEN[-1])} a time, short steps")


def _beside(peer: Together, effort: Effort, nbytes: int, heights: tuple[int, int], case: str) -> Measured:
    draw = random.Random(0)  # noqa: S311 - the same numbers every time are what is wanted
    rows = [draw.randint(*heights) for _ in range(STEPS)]
    with collector_off(), AsyncMemoryPool(peer.device) as pool:
        with pool.allocate(PEAK):
            pass
        asyncio.run(pool.trim())
        training = Training(peer.torch, pool)
        for _ in range(3):
            _steps(training, rows)
        still: list[list[int]] = []
        busy: list[list[int]] = []
        bare: list[list[int]] = []
        lasted = 0.0
        with Taker(by_pool(pool, nbytes)) as taker, Taker(by_driver(peer.torch.cuda.current_device(), nbytes)) as least:
            for _ in range(max(2, round(ROUNDS * effort.share))):
                still.append(_steps(training, rows))
                started = time.perf_counter()
                with taker.open():
                    busy.append(_steps(training, rows))
                lasted += time.perf_counter() - started
                with least.open():
                    bare.append(_steps(training, rows))
        trims = pool.stats().trims
        peer.torch.cuda.synchronize()
        del training
    return Measured(
        row="take_back",
        peer=peer.name,
        case=case,
        min=min(map(sum, busy)) / STEPS,
        median=_usual(busy),
        floor=min(map(sum, still)) / STEPS,
        figures={
            "floor_median_ns": round(_usual(still)),
            "to_floor": round(_usual(busy) / _usual(still), 4),
            "driver_alone": round(_usual(bare) / _usual(still), 4),
            "taken_back_bytes_per_second": round(taker.taken / lasted),
            "trims": trims,
        },
        broken="" if taker.taken else "nothing was taken back",
    )


def _usual(rounds: list[list[int]]) -> float:
    """Answer the mean of the steps of a round, each the median of its repeats.

    Steps are compared with themselves: a median over all would lie between two of them, which differ by a tenth.
    """
    medians: list[float] = [statistics.median(repeats) for repeats in zip(*rounds, strict=True)]
    return sum(medians) / STEPS


def _steps(training: Training, rows: list[int]) -> list[int]:
    times = []
    for height in rows:
        start = time.perf_counter_ns()
        training.step(height)
        training.torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    return times
