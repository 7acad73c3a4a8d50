"""An inference server on a GPU: a request leases the memory that it will need, and then CuPy and a transformer use it.

A request is a few sound clips. CuPy turns them into features and a transformer of `transformers` (with random weights)
into vectors, in one of a few threads. Ten times more clients than there is memory for wait in the pool's queue: none
fails for memory, one that has waited too long is answered 503, and one that finds the queue full 429.

`python examples/torch_server.py --table` compares that, in turns, with semaphores of every size, on torch's and CuPy's
own memory of the same size. Without a GPU a small model runs on the host, where a lease only counts what torch
allocates itself.
"""

import asyncio
import importlib
import itertools
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

import asyncmem

FRAMES, SAMPLES, BANDS = 256, 400, 80  # a clip has so many frames of so many samples; a feature for each band
PATIENCE, QUEUE = 1.0, 40  # seconds that a request waits for memory at most; and how many may wait
PAUSE = 0.2  # seconds until a client that was turned away comes again
THREADS = 4  # that run the model: enough to keep the GPU busy
TURNS = 3  # of each way in the table
SHARES = (0.5, 0.3, 0.2)  # of requests of each size, from small to large
ROOM = 2.5  # requests of the largest size that there is memory for

Clips = np.ndarray[Any, np.dtype[np.int16]]
Vectors = np.ndarray[Any, np.dtype[np.float32]]
Admission = Callable[[int], AbstractAsyncContextManager[asyncmem.Lease | None]]


class Model:
    """Makes vectors of sound: CuPy prepares, torch computes. On the host numpy prepares."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self.on_gpu = bool(self.torch.cuda.is_available())
        self.library: Any = importlib.import_module("cupy") if self.on_gpu else np
        self.device = "cuda:0" if self.on_gpu else "host"
        self.sizes, width = ((8, 32, 128), 1024) if self.on_gpu else ((1, 2, 4), 64)  # clips of a request
        config = transformers.BertConfig(
            vocab_size=1, hidden_size=width, num_attention_heads=width // 64, num_hidden_layers=width // 64,
            intermediate_size=4 * width,
        )  # fmt: skip
        kind = self.torch.bfloat16 if self.on_gpu else self.torch.float32
        with self.torch.device("cuda" if self.on_gpu else "cpu"):
            self.project = self.torch.nn.Linear(BANDS, width, dtype=kind)
            self.model = transformers.BertModel(config, add_pooling_layer=False).to(kind).eval()
        waves = np.cos(np.outer(np.arange(SAMPLES), np.arange(1, BANDS + 1)) * np.pi / SAMPLES)
        self.waves = self.library.asarray(waves, np.float32)

    def use(self, lease: asyncmem.Lease | None) -> AbstractContextManager[object]:
        """Have both libraries allocate from a lease, on this thread, until the block ends."""
        if lease is None or not self.on_gpu:
            return nullcontext()
        from asyncmem.interop import cupy, torch

        both = ExitStack()
        both.enter_context(torch.use(lease))
        both.enter_context(cupy.use(lease))
        return both

    def run(self, clips: Clips, lease: asyncmem.Lease | None) -> Vectors:
        """Return the vectors of some clips. This blocks until the GPU has computed them."""
        with self.use(lease), self.torch.inference_mode():
            return self.compute(clips)  # a function of its own, so that no array outlives the block

    def compute(self, clips: Clips) -> Vectors:
        """Return the vectors of some clips."""
        frames = self.library.asarray(clips).astype(np.float32) / 32768
        features = self.library.log1p(self.library.square(frames @ self.waves))
        states = self.project(self.torch.from_dlpack(features).to(self.project.weight.dtype))
        vectors: Vectors = self.model(inputs_embeds=states).last_hidden_state.mean(1).float().cpu().numpy()
        return vectors


@dataclass
class Server:
    """Answers requests, once they are admitted."""

    model: Model
    admit: Admission
    threads: ThreadPoolExecutor
    clips: dict[int, Clips]
    answers: list[tuple[int, int, float]] = field(default_factory=list)
    """Of each request: how many clips it had, its status, and the seconds until it was answered."""
    seconds: float = 0.0
    """That it has served."""

    async def answer(self, size: int) -> int:
        """Return the status of a request, as a web server would."""
        try:
            async with self.admit(size) as lease:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self.threads, self.model.run, self.clips[size], lease)
        except asyncmem.TooManyRequests:
            return 429
        except TimeoutError:
            return 503
        except (MemoryError, self.model.torch.OutOfMemoryError):  # CuPy's and asyncmem's are a MemoryError
            return 500
        return 200

    async def be_client(self, number: int, until: float) -> None:
        """Send one request after the other: mostly small ones, and some large."""
        chance = random.Random(number)  # noqa: S311 - repeatable, not secret
        while time.monotonic() < until:
            (size,) = chance.choices(self.model.sizes, SHARES)
            began = time.monotonic()
            status = await self.answer(size)
            self.answers.append((size, status, time.monotonic() - began))
            if status in {429, 503}:
                await asyncio.sleep(PAUSE)


def leases(pool: asyncmem.AsyncMemoryPool, needs: dict[int, int]) -> Admission:
    """Admit a request when there is memory for it."""
    return lambda size: pool.lease(needs[size], timeout=PATIENCE)


def permits(count: int) -> Admission:
    """Admit so many requests at a time, whatever they need, with the same patience and the same queue."""
    semaphore, waiting = asyncio.Semaphore(count), 0

    @asynccontextmanager
    async def admit(_size: int) -> AsyncIterator[None]:
        nonlocal waiting
        if waiting >= QUEUE:
            raise asyncmem.TooManyRequests(pool="semaphore", waiting=waiting, max_waiting=QUEUE, asked=1)
        waiting += 1
        try:
            async with asyncio.timeout(PATIENCE):
                await semaphore.acquire()
        finally:
            waiting -= 1
        try:
            yield
        finally:
            semaphore.release()

    return admit


async def measure(model: Model, clips: dict[int, Clips]) -> dict[int, int]:
    """Return what requests of each size need, by running them in more than that."""
    needs = {}
    async with asyncmem.AsyncMemoryPool(model.device, limit="4 GiB") as pool:
        for size in model.sizes:
            async with pool.lease("4 GiB" if model.on_gpu else 1) as lease:
                for _ in range(2):
                    await asyncio.to_thread(model.run, clips[size], lease)
                needs[size] = lease.stats().peak_allocated * 21 // 20 or clips[size].nbytes * 8  # about that, on a host
    return needs


async def serve(server: Server, clients: int, seconds: float) -> None:
    """Serve many clients for some seconds."""
    await asyncio.gather(*(server.answer(min(server.clips)) for _ in range(QUEUE)))  # each thread's first takes longer
    began = time.monotonic()
    await asyncio.gather(*(server.be_client(number, began + seconds) for number in range(clients)))
    server.seconds += time.monotonic() - began


def row(server: Server) -> list[str]:
    """Return what the table says of a server."""
    waits = sorted(seconds for _, status, seconds in server.answers if status == 200) or [math.nan]
    clips = sum(size for size, status, _ in server.answers if status == 200)
    count = [sum(status == code for _, status, _ in server.answers) for code in (200, 500, 503, 429)]
    late = [f"{waits[int(len(waits) * part)]:.2f} s" for part in (0.5, 0.99)]
    return [f"{count[0] / server.seconds:.1f}", f"{clips / server.seconds:.0f}", *late, *map(str, count[1:])]


async def main() -> None:
    """Serve ten times as many clients as there is memory for, by leases and by semaphores."""
    table = "--table" in sys.argv
    model = Model()
    numbers = np.random.default_rng(0)
    clips = {size: numbers.integers(-9999, 9999, (size, FRAMES, SAMPLES), np.int16) for size in model.sizes}
    seconds, turns = (2.0, TURNS) if table else (1.0, 1)
    threads = {"leases": THREADS, "1 permit": 1}
    if table:
        threads |= {f"{count} permits": count for count in (2, 3, 4, 8, 16)} | {"none": 64}
    needs = await measure(model, clips)
    limit = int(ROOM * max(needs.values()))
    fit = int(limit / sum(needs[size] * share for size, share in zip(model.sizes, SHARES, strict=True)))
    print(f"requests need {[f'{need >> 20} MiB' for need in needs.values()]}; {fit} fit into {limit >> 20} MiB")
    print("| admission | requests/s | clips/s | 50 % in | 99 % in | failed | 503 | 429 |")
    print("|---|---|---|---|---|---|---|---|")
    async with asyncmem.AsyncMemoryPool(model.device, limit=limit, max_waiting=QUEUE) as pool:
        servers: dict[str, Server] = {}
        for _, (name, count) in itertools.product(range(turns), threads.items()):
            if model.on_gpu:
                part = 1.0 if name == "leases" else fraction(model.torch.cuda, limit)
                model.torch.cuda.set_per_process_memory_fraction(part)
            admit = leases(pool, needs) if name == "leases" else permits(count if name != "none" else 1 << 30)
            with ThreadPoolExecutor(count) as workers:
                server = servers.setdefault(name, Server(model, admit, workers, clips))
                server.threads = workers
                await serve(server, 10 * fit, seconds)
        for name, server in servers.items():
            print(f"| {' | '.join([name, *row(server)])} |", flush=True)
        assert all(status != 500 for _, status, _ in servers["leases"].answers)
        assert pool.stats().waits > 0


def fraction(cuda: ModuleType, limit: int) -> float:
    """Return the part of the GPU that torch's own allocator has now, and the limit. CuPy's memory does not count."""
    cuda.empty_cache()
    part: float = (cuda.memory_reserved() + limit) / cuda.get_device_properties(0).total_memory
    return part


if __name__ == "__main__":
    try:
        asyncmem.run(main)
    except ImportError as error:
        print(f"{error}; pip install torch transformers, and cupy-cuda13x for a GPU")
