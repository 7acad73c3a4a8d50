"""Models for pipeline parallelism: stages that only take time on simulated devices, and what they run on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Latencies, Simulated
from asyncmem.devices.simulated.stream import SimulatedStream
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel, StepContext
from asyncmem.testing import SteppedPool

from .support import MIB

FORWARD, BACKWARD = 1.0, 2.0
SAVED, OUTPUT = 4 * MIB, MIB

Hook = Callable[[StepContext], Awaitable[object]]


class Layer:
    """A stage that takes seconds of its device; what it reads and writes, the device checks."""

    def __init__(self, at: int, last: int, hook: Hook | None = None) -> None:
        self.at = at
        self.last = last
        self.hook = hook
        self.live = self.most_live = 0

    async def forward(self, item: Any, context: StepContext) -> Buffer | int:
        saved = await context.allocate(SAVED, use="saved")
        answer = None if self.at == self.last else await context.allocate(OUTPUT, use="output")
        if self.hook is not None:
            await self.hook(context)
        reads = [item] if self.at else []
        stream_of(context).launch(FORWARD, reads=reads, writes=[saved, *([answer] if answer else [])])
        context.save(saved, *reads)
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return context.micro_batch * 10 if answer is None else answer

    async def backward(self, gradient: Any, saved: tuple[Buffer, ...], context: StepContext) -> Buffer | None:
        answer = await context.allocate(OUTPUT, use="output") if self.at else None
        if self.hook is not None:
            await self.hook(context)
        reads = [*saved, *([gradient] if gradient else [])]
        stream_of(context).launch(BACKWARD, reads=reads, writes=[answer] if answer else [])
        self.live -= 1
        return answer

    def stage(self) -> ParallelStage:
        output = 0 if self.at == self.last else OUTPUT
        return ParallelStage(self.forward, self.backward, saved=SAVED, output=output)


def stream_of(context: StepContext) -> SimulatedStream:
    return cast("SimulatedStream", context.stream)


def layers(count: int, hook: Hook | None = None) -> list[Layer]:
    return [Layer(at, count - 1, hook) for at in range(count)]


def stages(model: Sequence[Layer]) -> list[ParallelStage]:
    return [one.stage() for one in model]


def machine(count: int, peer_rate: int | None = None) -> list[Simulated]:
    """Devices beside each other, whose calls take no time."""
    devices: list[Simulated] = []
    for index in range(count):
        beside = devices[0] if devices else None
        devices.append(Simulated(latencies=Latencies.zero(), index=index, beside=beside, peer_rate=peer_rate))
    return devices


@asynccontextmanager
async def parallel(
    model: Sequence[Layer],
    *,
    devices: Sequence[Simulated] | None = None,
    kind: type[AsyncMemoryPool] = SteppedPool,
    limits: Sequence[int] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[PipelineParallel, list[AsyncMemoryPool]]]:
    """A runner with a device and a pool for each stage; the pools have all their memory, so that none need grow."""
    devices = devices or machine(len(model))
    pools = [
        kind(
            device,
            limit=limit,
            segment_size=limit,
            pregrow=limit,
            stall_after=None,
            peers=[other for other in devices if other is not device],
        )
        for device, limit in zip(devices, limits or [128 * MIB] * len(devices), strict=True)
    ]
    try:
        for pool in pools:
            await pool.open(wait=True)
        yield PipelineParallel(stages(model), pools, **options), pools
    finally:
        for pool in pools:
            await pool.aclose()
