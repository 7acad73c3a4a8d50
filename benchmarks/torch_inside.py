"""`python -m benchmarks.torch_inside`: torch inside of a lease, beside torch on its own memory, on one GPU.

Both ways of each row are measured in turns, in one process. What torch reserves with expandable segments is measured in
another, since that is decided when it starts.
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
from typing import Any

import click

from asyncmem import AsyncMemoryPool
from asyncmem.figures import format_duration, format_size

GIB = 1 << 30
ROUNDS, EMPTIES = 15, 20_000
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


def in_turns(run: Callable[[], object], own: Inside, ours: Inside) -> tuple[float, float]:
    """Return the medians of both ways."""
    pairs = [(clock(run, own), clock(run, ours)) for _ in range(ROUNDS)]
    return statistics.median(one for one, _ in pairs), statistics.median(one for _, one in pairs)


def empties() -> Callable[[], None]:
    """Return the allocation and the free of a tensor, many times over."""
    torch = _torch()

    def run() -> None:
        empty, kind = torch.empty, torch.uint8
        for _ in range(EMPTIES):
            empty(1 << 20, dtype=kind, device="cuda")

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


@click.command()
@click.option("--expandable", is_flag=True, hidden=True)
def main(*, expandable: bool) -> None:
    """Compare torch inside of a lease with torch on its own memory."""
    if expandable:
        step = training_step()
        step()
        click.echo(peak(step, nullcontext))
        return
    torch = _torch()
    import asyncmem.interop.torch as interop

    pool = AsyncMemoryPool("cuda:0", limit=32 * GIB)
    click.echo(f"torch {torch.__version__} on {torch.cuda.get_device_name()}")

    @contextmanager
    def leased() -> Iterator[None]:
        with pool.lease(24 * GIB) as lease, interop.use(lease):
            yield

    torch.empty(1, device="cuda")
    for name, run in (("torch.empty", empties()), ("training step", training_step()), ("served batch", served_batch())):
        own, ours = in_turns(run, nullcontext, leased)
        count = EMPTIES if name == "torch.empty" else 1
        alone, inside = format_duration(own / count), format_duration(ours / count)
        click.echo(f"{name}: {alone} alone, {inside} inside, {ours / own:.3f} x")
    step = training_step()
    step()
    reserved = peak(step, nullcontext), peak(step, leased)
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "benchmarks.torch_inside", "--expandable"]
    grown = int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)  # noqa: S603
    click.echo(
        f"reserved by a training step: {format_size(reserved[0])} alone, {format_size(reserved[1])} inside, "
        f"{format_size(grown)} with expandable segments"
    )
    start = time.perf_counter()
    for _ in range(1000):
        with leased():
            pass
    click.echo(f"lease and block, empty: {format_duration((time.perf_counter() - start) / 1000)}")
    pool.close()


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.torch_inside")
