"""`python -m benchmarks.inside`: libraries inside of a lease, beside each on its own memory, on one GPU.

Both ways of each row are measured in turns, in one process. What is decided when a process starts has others: torch's
expandable segments, and Numba's memory manager.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import click

from asyncmem import AsyncMemoryPool, Lease
from asyncmem.figures import format_duration, format_size

MIB, GIB = 1 << 20, 1 << 30
ROUNDS, EMPTIES, STARTS = 31, 10_000, 3
LAYERS, WIDTH, HEADS, WORDS, LENGTH, BATCH = 12, 768, 12, 50257, 1024, 8  # GPT-2's, the smallest

Inside = Callable[[], AbstractContextManager[object]]


def clock(run: Callable[[], object], inside: Inside) -> float:
    """Return the seconds of a run inside of a block, in which it has run before."""
    torch = _torch()
    with inside():
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def in_turns(own: Callable[[], float], ours: Callable[[], float], rounds: int = ROUNDS) -> tuple[float, float]:
    """Return the medians of both ways."""
    pairs = [(own(), ours()) for _ in range(rounds)]
    return statistics.median(one for one, _ in pairs), statistics.median(one for _, one in pairs)


def say(row: str, own: float, ours: float) -> None:
    """Print a row."""
    click.echo(f"{row}: {format_duration(own)} alone, {format_duration(ours)} inside, {ours / own:.3f} x")


def each(call: Callable[[], object]) -> Callable[[], float]:
    """Return what measures the seconds of a call that allocates, and of dropping what it returns."""

    def run() -> float:
        call()
        start = time.perf_counter()
        for _ in range(EMPTIES):
            call()
        return (time.perf_counter() - start) / EMPTIES

    return run


def empties() -> Callable[[], None]:
    """Return the allocation and the free of a tensor, many times over."""
    torch = _torch()

    def run() -> None:
        empty, kind = torch.empty, torch.uint8
        for _ in range(EMPTIES):
            empty(MIB, dtype=kind, device="cuda")

    return run


def training_step() -> Callable[[], None]:
    """Return a step of a transformer of the size of GPT-2, with random weights, whose gradients go after it."""
    torch = _torch()
    nn = torch.nn
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), _layers(), nn.Linear(WIDTH, WORDS)).cuda()
    words = torch.randint(WORDS, (BATCH, LENGTH), device="cuda")

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def served_batch() -> Callable[[], None]:
    """Return the forward pass of such a batch."""
    torch = _torch()
    model = _layers().cuda().bfloat16().eval()
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        with torch.inference_mode():
            model(x)

    return run


def _layers() -> Any:  # noqa: ANN401  # as for torch
    nn = _torch().nn
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def peak(run: Callable[[], object], inside: Inside) -> int:
    """Return the most bytes that torch reserves during a run, beyond what it holds before."""
    torch = _torch()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_reserved()
    with inside():
        run()
        torch.cuda.synchronize()
    most: int = torch.cuda.max_memory_reserved()
    return most - before


def _torch() -> Any:  # noqa: ANN401  # it has no types where it is not installed
    import torch

    return torch


def torch_rows(pool: AsyncMemoryPool) -> None:
    """Measure torch: an allocation, a step and a batch, and what a step reserves."""
    torch = _torch()
    import asyncmem.interop.torch as interop

    @contextmanager
    def leased() -> Iterator[None]:
        with pool.lease(24 * GIB) as lease, interop.use(lease):
            yield

    torch.empty(1, device="cuda")
    for name, run in (("torch.empty", empties()), ("training step", training_step()), ("served batch", served_batch())):
        own, ours = in_turns(partial(clock, run, nullcontext), partial(clock, run, leased))
        count = EMPTIES if name == "torch.empty" else 1
        say(name, own / count, ours / count)
    step = training_step()
    step()
    reserved = peak(step, nullcontext), peak(step, leased)
    grown = int(_elsewhere("expandable", PYTORCH_ALLOC_CONF="expandable_segments:True"))
    click.echo(
        f"reserved by a training step: {format_size(reserved[0])} alone, {format_size(reserved[1])} inside, "
        f"{format_size(grown)} with expandable segments"
    )
    start = time.perf_counter()
    for _ in range(1000):
        with leased():
            pass
    click.echo(f"lease and block, empty: {format_duration((time.perf_counter() - start) / 1000)}")


def cupy_rows(lease: Lease) -> None:
    """Measure an allocation of CuPy, and an array."""
    import cupy

    import asyncmem.interop.cupy as interop

    def inside(run: Callable[[], float]) -> float:
        with interop.use(lease):
            return run()

    calls = {"CuPy's alloc": lambda: cupy.cuda.alloc(MIB), "cupy.empty": lambda: cupy.empty(MIB, cupy.uint8)}
    for name, call in calls.items():
        run = each(call)
        say(name, *in_turns(run, partial(inside, run)))


def cuda_core_row(lease: Lease) -> None:
    """Measure a buffer of cuda.core."""
    from cuda import core

    device = core.Device(0)
    device.set_current()
    stream, resource = device.create_stream(), lease.as_memory_resource()
    own = each(lambda: device.allocate(MIB, stream=stream).close(stream))
    say("cuda.core", *in_turns(own, each(lambda: resource.allocate(MIB, stream=stream).close(stream))))


def numba_row() -> None:
    """Measure an array of Numba, in processes by turns."""
    ours = {"NUMBA_CUDA_MEMORY_MANAGER": "asyncmem.interop.numba"}
    own, inside = in_turns(lambda: float(_elsewhere("numba")), lambda: float(_elsewhere("numba", **ours)), STARTS)
    say("Numba", own, inside)


def _numba_here() -> float:
    from numba import cuda

    cuda.current_context()
    run = each(lambda: cuda.device_array(MIB, "uint8"))
    if os.environ.get("NUMBA_CUDA_MEMORY_MANAGER") is None:
        return run()
    import asyncmem.interop.numba as interop

    with AsyncMemoryPool("cuda:0", limit=GIB) as pool, pool.lease(GIB) as lease, interop.use(lease):
        return run()


def _expandable_here() -> int:
    step = training_step()
    step()
    return peak(step, nullcontext)


def _elsewhere(what: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.inside", "--alone", what]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, check=True, text=True)  # noqa: S603
    return done.stdout.split()[-1]


LIBRARIES = ("torch", "cupy", "cuda.core", "numba")
ALONE: dict[str, Callable[[], float]] = {"expandable": _expandable_here, "numba": _numba_here}


@click.command()
@click.argument("libraries", nargs=-1, type=click.Choice(LIBRARIES))
@click.option("--alone", type=click.Choice(sorted(ALONE)), hidden=True)
def main(libraries: tuple[str, ...], alone: str | None) -> None:
    """Compare libraries inside of a lease with each on its own memory."""
    if alone:
        click.echo(ALONE[alone]())
        return
    with AsyncMemoryPool("cuda:0", limit=32 * GIB) as pool:
        for one in libraries or LIBRARIES:
            if one == "torch":
                torch_rows(pool)
            elif one == "numba":
                numba_row()
            else:
                with pool.lease(GIB) as lease:
                    (cupy_rows if one == "cupy" else cuda_core_row)(lease)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.inside")
