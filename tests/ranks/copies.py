"""Two stages that only copy, on a device that is named: in one process, or as the rank that is given. A program."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import asyncmem
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel, StepContext
from asyncmem.ranks import Ranks

NBYTES, MICRO_BATCHES = 3000, 5


class Copier:
    """Adds one to all bytes that come, on the way forward and on the way back, and notes what has come."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    async def forward(self, item: Any, context: StepContext[Any]) -> asyncmem.Buffer:
        context.save(item)
        return await self.step(item, context, 10 * context.micro_batch)

    async def backward(self, gradient: Any, saved: tuple[Any], context: StepContext[Any]) -> asyncmem.Buffer:
        if isinstance(saved[0], asyncmem.Buffer):
            await self.read(saved[0], context)
        return await self.step(gradient, context, 100 + context.micro_batch)

    async def step(self, item: Any, context: StepContext[Any], first: int) -> asyncmem.Buffer:
        value = await self.read(item, context) if isinstance(item, asyncmem.Buffer) else first
        answer = await context.allocate(NBYTES, use="output")
        await answer.copy_from(bytes([value + 1]) * NBYTES, stream=context.stream)
        return answer

    async def read(self, item: asyncmem.Buffer, context: StepContext[Any]) -> int:
        content = bytearray(NBYTES)
        await item.copy_to(content, stream=context.stream)
        (value,) = set(content)
        self.seen.append(value)
        return value


async def main(device: str, key: str | None = None, rank: int = 0) -> None:
    """Run twice, and print what the stages of this process have seen, and the results."""
    own = range(2) if key is None else range(rank, rank + 1)
    copiers = [Copier(), Copier()]
    stages = [ParallelStage(one.forward, one.backward, saved=0, output=NBYTES) for one in copiers]
    async with asyncmem.AsyncMemoryPool(device, limit="1 MiB") as pool:
        pools = [pool if at in own else None for at in range(2)]
        for _ in range(2):
            if key is None:
                results = await PipelineParallel(stages, pools).run(range(MICRO_BATCHES))
            else:
                async with Ranks(key, rank, 2) as ranks:
                    results = await PipelineParallel(stages, pools, link=ranks).run(range(MICRO_BATCHES))
                key += "again"
            for result in results:
                content = bytearray(NBYTES)
                await result.copy_to(content)
                copiers[1].seen += set(content)
                result.free()
        assert pool.stats().allocated_bytes == 0
    for at in own:
        sys.stdout.write(f"{copiers[at].seen}\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], *map(int, sys.argv[3:])))
