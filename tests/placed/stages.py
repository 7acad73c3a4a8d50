"""Stages that tests place, importable by workers."""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncmem.arrays import Array
from asyncmem.distributed import current_item
from asyncmem.pipeline import Pipeline, stage

SIZE = 64 * 1024
seen: list[int] = []
"""What the last stage of this process has had, by the items' ids."""
warned: list[str] = []
"""What this process has warned of."""


@dataclass
class Sample:
    """A record."""

    number: int
    pixels: object


def incomplete() -> Sample:
    """Make a record that has lost a part."""
    made = Sample(1, None)
    del made.pixels
    return made


@dataclass
class Homely:
    """A record that can be made in one process only."""

    process: int
    pixels: object

    def __post_init__(self) -> None:
        if self.process != os.getpid():
            raise RuntimeError("far from home")


@stage(credit=SIZE)
async def at_home(item: int | None, pool: Any) -> Homely | None:
    """Make such a record, or nothing of nothing."""
    return None if item is None else Homely(os.getpid(), await pool.empty((SIZE,), "uint8"))


@stage(credit=SIZE)
async def decode(item: int, pool: Any) -> Array:
    """Make an array."""
    x: Array = await pool.empty((SIZE // 4,), "float32")
    x.numpy()[:] = item
    return x


@stage(credit=SIZE, workers=2)
async def double(x: Array, pool: Any) -> Array:
    """Make another of it."""
    y: Array = await pool.empty(x.shape, "float32")
    np.multiply(x.numpy(), 2, out=y.numpy())
    await asyncio.sleep(0.002)
    return y


@stage(credit=0)
async def passes(x: Array, pool: Any) -> Array:
    """Give an array on."""
    del pool
    return x


@stage(credit=0)
async def total(x: Array, pool: Any) -> tuple[int, float]:
    """Make a plain value of it."""
    del pool
    seen.append(current_item().id)
    return current_item().id, float(x.numpy()[0])


def three() -> "Pipeline[int, tuple[int, float]]":
    """Make a pipeline of all of them."""
    return Pipeline(decode, double, total)


def expected(items: int) -> list[tuple[int, float]]:
    """What comes of so many."""
    return [(number, 2.0 * number) for number in range(items)]
