"""Which pools lie on one ground, and which segments there ever are."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight.exports.ground import Ground, Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from asyncmem.insight.records import Records

_PAGE: Final = 2 << 20


def grounds_of(records: Records) -> list[Ground]:
    """Answer the ground of each pool, with its segments.

    Those of a CUDA device share one, for its addresses are of one kind. Where it is not known in which segments a
    pool's buffers lie, because it reserves by pages or because the beginning is lost, the ground is fixed, and its
    segments are the ranges in which buffers lie at any time.
    """
    names = records.names.pools
    shared = [name.device.removeprefix("cuda:") for name in names]
    numbers = [int(number) if number.isdecimal() else None for number in shared]
    further = count(1 + max((number for number in numbers if number is not None), default=-1))
    devices = {number: Ground(number) for number in numbers if number is not None}
    found = []
    for pool, number in enumerate(numbers):
        rows = records.rows[records.rows["pool"] == pool]
        segments = list(_places(rows[rows["kind"] == Kind.GREW], pool))
        blocks = rows[(rows["kind"] == Kind.ALLOCATED) | (rows["kind"] == Kind.HELD)]
        fixed = not _all_in(blocks["address"], segments)
        ground = Ground(next(further), fixed=fixed) if fixed or number is None else devices[number]
        ground.known[pool] = list(_ranges(blocks, pool)) if fixed else segments
        if fixed:
            for place in ground.known[pool]:
                ground.begin_with(place)
        found.append(ground)
    return found


def _places(rows: NDArray[np.void], pool: int) -> Iterator[Place]:
    for address, nbytes in zip(rows["address"].tolist(), rows["nbytes"].tolist(), strict=True):
        yield Place(address, nbytes, pool)


def _all_in(addresses: NDArray[np.uint64], segments: list[Place]) -> bool:
    if any(one.address == 0 for one in segments):
        return False
    ordered = sorted(segments)
    starts = np.array([one.address for one in ordered], np.uint64)
    ends = np.maximum.accumulate(np.array([one.end for one in ordered], np.uint64)) if ordered else starts
    at = np.searchsorted(starts, addresses, side="right")
    return bool((at > 0).all() and (addresses < ends[at - 1]).all()) if len(addresses) else True


def _ranges(blocks: NDArray[np.void], pool: int) -> Iterator[Place]:
    """Answer the pages that blocks lie in, those side by side as one range."""
    blocks = blocks[np.argsort(blocks["address"], kind="stable")]
    starts = blocks["address"].astype(np.int64) // _PAGE * _PAGE
    ends = -(-(blocks["address"].astype(np.int64) + blocks["nbytes"].astype(np.int64)) // _PAGE) * _PAGE
    ends = np.maximum.accumulate(ends)
    apart = np.flatnonzero(starts[1:] > ends[:-1]) + 1
    for first, last in zip([0, *apart.tolist()], [*apart.tolist(), len(blocks)], strict=True):
        if last > first:
            start = int(starts[first])
            yield Place(start, int(ends[last - 1]) - start, pool)
