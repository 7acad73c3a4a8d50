"""Bytes of the host get to a buffer in parts that are worth a thread's while."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.pipeline import Prefetcher, staging
from asyncmem.pipeline.staging import parts_of

from .feeds import LIMIT, TimedDevice, all_free, read


def lengths(*pieces: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Cut pieces of some offsets and lengths into parts of 10 bytes, and return theirs."""
    parts = parts_of([(offset, memoryview(bytes(nbytes))) for offset, nbytes in pieces], 10)
    return [[(offset, source.nbytes) for offset, source in part] for part in parts]


def test_long_pieces_are_cut_and_short_ones_come_together() -> None:
    """Every byte once, in order."""
    assert lengths((0, 25)) == [[(0, 10)], [(10, 10)], [(20, 5)]]
    assert lengths((0, 4), (256, 4), (512, 4), (768, 4)) == [[(0, 4), (256, 4), (512, 4)], [(768, 4)]]
    assert lengths((0, 4), (256, 12)) == [[(0, 4), (256, 10)], [(266, 2)]]
    assert lengths((0, 0), (256, 10), (512, 0)) == [[(256, 10)]]
    assert lengths() == []


def test_parts_have_the_bytes_that_belong_to_their_places() -> None:
    """Of pieces of all lengths around that of a part."""
    rng = np.random.default_rng(1)
    pieces = [(512 * number, rng.bytes(number)) for number in range(40)]
    target = bytearray(512 * 40)
    for part in parts_of([(offset, memoryview(source)) for offset, source in pieces], 10):
        for at, cut in part:
            target[at : at + cut.nbytes] = cut
    for offset, source in pieces:
        assert target[offset : offset + 512] == source.ljust(512, b"\0")


def test_threads_read_one_batch_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though there is no second one that they could read: two threads are in the reading of the same."""
    meeting = threading.Barrier(2, timeout=30)
    really_read = staging._read

    def read_together(*arguments: object) -> None:
        meeting.wait()
        really_read(*arguments)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(staging, "_read", read_together)
    data = np.arange(2 * staging.AT_ONCE // 4, dtype=np.float32)
    with AsyncMemoryPool(TimedDevice(locked=True), limit=4 * LIMIT) as pool:
        with Prefetcher(pool, ahead=1, workers=2).wrap([data] * 3) as found:
            for array in found:
                np.testing.assert_array_equal(read(array), data)
                del array
        all_free(pool)
        all_free(pool.pinned)
