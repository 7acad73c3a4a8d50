"""Libraries share one pool on a card: `python tests/soak/libraries.py --seconds 1800`.

Four threads and two event loops, each with a pool that two of the threads use as well, allocate by torch, CuPy,
cuda.core, Numba and RMM, as far as they are installed, in leases, in budgets and in the pool itself. Tasks are
cancelled at random, a thread captures graphs meanwhile, and each value is read back. It ends with an error where a word
is wrong, where nothing has moved for a minute, or where memory is left at the end. Every half minute it says how far it
is, and SIGTERM ends it early, as the time does: several runs, each with a seed of its own, count as one long one.
Numba takes part with `NUMBA_CUDA_MEMORY_MANAGER=asyncmem.interop.numba`.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

import asyncmem
from asyncmem import AsyncMemoryPool

MIB = 1 << 20
LIMITS = (1024 * MIB, None)  # of each loop's pool; memory that moves before its uses are done does so without one
THREADS, LOOPS, TASKS = 4, len(LIMITS), 8
STUCK = 60  # seconds without a step
SAY = 30  # seconds until it says again how far it is

Step = Callable[[Any, int, int], int]
"""Allocate so many bytes from a share, write a value, and return how many words were read back wrong."""


def torch_step() -> Step:
    """Make torch's."""
    torch, interop = import_module("torch"), import_module("asyncmem.interop.torch")

    def step(share: Any, nbytes: int, value: int) -> int:
        with interop.use(share, timeout=wait_of(share)):
            x = torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")
            y = x + 1
            del x
            wrong = int(torch.count_nonzero(y != (value + 1) % 256))
            del y
        return wrong

    return step


def graph_step() -> Step:
    """Make one that captures a graph by torch, and replays it."""
    torch, interop = import_module("torch"), import_module("asyncmem.interop.torch")

    def step(share: Any, nbytes: int, value: int) -> int:
        x = torch.zeros(nbytes // 4, dtype=torch.int32, device="cuda")
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with interop.use(share, timeout=wait_of(share)), torch.cuda.stream(side):
            _ = (x + 1).sum()
            side.synchronize()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                y = (x + 1).sum()
            x.fill_(value)
            graph.replay()
            wrong = int(int(y) != (value + 1) * x.numel())
        side.synchronize()
        del y, _, graph
        return wrong

    return step


def cupy_step() -> Step:
    """Make CuPy's."""
    cupy, interop = import_module("cupy"), import_module("asyncmem.interop.cupy")

    def step(share: Any, nbytes: int, value: int) -> int:
        with interop.use(share, timeout=wait_of(share)), cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.full(nbytes, value, dtype=cupy.uint8)
            wrong = int((x + cupy.uint8(1) != (value + 1) % 256).sum())
            del x
            stream.synchronize()
        return wrong

    return step


def cuda_core_step() -> Step:
    """Make cuda.core's."""
    core = import_module("cuda.core")
    device = core.Device(0)
    device.set_current()
    pinned = core.LegacyPinnedMemoryResource()

    def step(share: Any, nbytes: int, value: int) -> int:
        core.Device(0).set_current()
        stream = core.Device(0).create_stream()
        buffer = share.as_memory_resource(timeout=wait_of(share)).allocate(nbytes, stream=stream)
        host = pinned.allocate(nbytes, stream=stream)
        buffer.fill(value, stream=stream)
        buffer.copy_to(host, stream=stream)
        buffer.close(stream)
        stream.sync()
        wrong = int((np.from_dlpack(host).view(np.uint8) != value).sum())
        host.close()
        return wrong

    return step


def numba_step() -> Step:
    """Make Numba's, where it has our memory manager."""
    if os.environ.get("NUMBA_CUDA_MEMORY_MANAGER") != "asyncmem.interop.numba":
        raise ImportError("it has another memory manager")
    cuda, interop = import_module("numba.cuda"), import_module("asyncmem.interop.numba")

    def step(share: Any, nbytes: int, value: int) -> int:
        with interop.use(share, timeout=wait_of(share)):
            x = cuda.to_device(np.full(nbytes, value, np.uint8))
            wrong = int((x.copy_to_host() != value).sum())
            del x
        return wrong

    return step


def rmm_step() -> Step:
    """Make RMM's."""
    rmm, interop = import_module("rmm"), import_module("asyncmem.interop.rmm")
    streams = import_module("rmm.pylibrmm.stream")

    def step(share: Any, nbytes: int, value: int) -> int:
        stream = streams.Stream()
        buffer = rmm.DeviceBuffer(size=nbytes, stream=stream, mr=interop.memory_resource(share, timeout=wait_of(share)))
        buffer.copy_from_host(bytes([value]) * nbytes, stream)
        wrong = int((buffer.copy_to_host(stream=stream) != value).sum())
        del buffer
        stream.synchronize()
        return wrong

    return step


MAKERS = {
    "torch": torch_step,
    "graphs": graph_step,
    "cupy": cupy_step,
    "cuda.core": cuda_core_step,
    "numba": numba_step,
    "rmm": rmm_step,
}


def wait_of(share: Any) -> float | None:
    """Return how long to wait: not in a lease, nor on a loop's thread."""
    return None if isinstance(share, asyncmem.Lease) else 30


class Soak:
    """One run, until a time."""

    def __init__(self, pools: list[AsyncMemoryPool], seconds: float, seed: int) -> None:
        self.pools, self.seed = pools, seed
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.steps: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.makers: dict[str, Step] = {}
        for name, make in MAKERS.items():
            try:
                self.makers[name] = make()
            except ImportError as error:
                say(f"{name} does not take part: {error}")

    def goes_on(self) -> bool:
        """Return whether there is time left, and nothing was wrong."""
        return time.monotonic() < self.end and not self.wrong

    def step(self, name: str, share: Any, draw: random.Random, most: int) -> None:
        """Make one step of a library, and note what came of it."""
        faulthandler.dump_traceback_later(STUCK, exit=True)
        wrong = self.makers[name](share, draw.randrange(4096, most), draw.randrange(256))
        self.steps[name] += 1
        if wrong:
            self.wrong.append(f"{name}: {wrong} words, by {share!r}")

    def work(self, number: int) -> None:
        """Do a thread's part: leases, a budget and the pool in turn; the first thread also captures graphs."""
        draw, pool = random.Random(self.seed * 100 + number), self.pools[number % LOOPS]
        names = sorted(set(self.makers) - {"graphs"})
        while self.goes_on():
            name = draw.choice(names)
            if number == 0 and "graphs" in self.makers and draw.random() < 0.2:
                name = "graphs"
            kind = draw.randrange(3)
            if kind == 0 or name == "graphs":
                with pool.lease(192 * MIB, tag=name, timeout=30) as lease:
                    self.step(name, lease, draw, 16 * MIB)
            elif kind == 1:
                with pool.budget(f"thread {number}", limit=256 * MIB) as budget:
                    self.step(name, budget, draw, 16 * MIB)
            else:
                self.step(name, pool, draw, 16 * MIB)

    def loop(self, number: int) -> None:
        """Do a loop's part."""
        asyncio.run(self.serve(self.pools[number], random.Random(self.seed * 100 + 50 + number)))

    async def serve(self, pool: AsyncMemoryPool, draw: random.Random) -> None:
        """Keep some tasks going, each with a lease, and cancel one now and then."""
        names = sorted(set(self.makers) - {"graphs"})

        async def request() -> None:
            nbytes, priority = draw.choice((192, 256, 320)) * MIB, draw.randrange(3)
            async with pool.lease(nbytes, tag="task", priority=priority) as lease:
                await asyncio.sleep(draw.random() / 100)
                self.step(draw.choice(names), lease, draw, 16 * MIB)
                await asyncio.sleep(draw.random() / 100)

        running: set[asyncio.Task[None]] = set()
        while self.goes_on():
            running |= {asyncio.create_task(request()) for _ in range(TASKS - len(running))}
            if draw.random() < 0.3:
                draw.choice(sorted(running, key=id)).cancel()
                self.steps["cancelled"] += 1
            done, running = await asyncio.wait(running, timeout=draw.random() / 50, return_when="FIRST_COMPLETED")
            for one in done:
                with suppress(asyncio.CancelledError):
                    one.result()
        await asyncio.gather(*running, return_exceptions=True)

    def run(self) -> None:
        """Run all, and raise what one of them has raised."""
        errors: list[BaseException] = []

        def guarded(part: Callable[[int], None], number: int) -> None:
            try:
                part(number)
            except BaseException as error:  # noqa: BLE001 -- the caller raises it
                errors.append(error)
                self.end = 0

        parts = [(self.work, i) for i in range(THREADS)] + [(self.loop, i) for i in range(LOOPS)]
        threads = [threading.Thread(target=guarded, args=part) for part in parts]
        for one in threads:
            one.start()
        told = self.began
        for one in threads:
            while one.is_alive():
                one.join(1)
                if time.monotonic() > told + SAY:
                    told = time.monotonic()
                    say(self.so_far())
        faulthandler.cancel_dump_traceback_later()
        if errors:
            raise errors[0]

    def so_far(self) -> str:
        """Return what has been done, and what was wrong."""
        took = time.monotonic() - self.began
        return f"seed {self.seed}, {took:.0f} s: {dict(sorted(self.steps.items()))}; wrong: {self.wrong or 'nothing'}"

    def stop(self, *_: object) -> None:
        """End early."""
        self.end = 0

    def left(self) -> int:
        """Return the bytes that are live although all has ended, once what is told later has been told."""
        if "torch" in self.makers:
            import_module("torch").cuda.synchronize()
            import_module("asyncmem.interop.torch").give_back()
        until = time.monotonic() + 10
        while (left := sum(one.stats().allocated_bytes for one in self.pools)) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        return left


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201 -- a command of the developer's


def main() -> None:
    """Run it for so many seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pools = [AsyncMemoryPool("cuda:0", limit=limit, name=f"loop {number}") for number, limit in enumerate(LIMITS)]
    soak = Soak(pools, options.seconds, options.seed)
    signal.signal(signal.SIGTERM, soak.stop)
    soak.run()
    left = soak.left()
    for one in pools:
        one.check()
        one.close()
    say(f"{soak.so_far()}; {left} bytes left")
    sys.exit(bool(left or soak.wrong))


if __name__ == "__main__":
    main()
