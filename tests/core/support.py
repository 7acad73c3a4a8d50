"""A device and a pool just large enough for the core's handles: the memory is a numpy array, nothing ever waits."""

from collections import deque
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from asyncmem.core import Allocator, Batch, Buffer, Core, HeapOptions

MEMORY = 1 << 24


class FakeFence:
    """A fence that is reached at once."""

    def done(self) -> bool:
        return True


class FakeStream:
    """A stream that does nothing.

    Attributes:
        records: How many fences were recorded on it.
        broken: What recording one raises, or None.
    """

    handle = 0
    lasting = True
    native = False

    def __init__(self) -> None:
        self.records = 0
        self.broken: Exception | None = None

    def record(self) -> FakeFence:
        if self.broken is not None:
            raise self.broken
        self.records += 1
        return FakeFence()

    def wait(self, fence: FakeFence) -> None:
        pass

    def capturing(self) -> bool:
        return False


class FakeDevice:
    """Host memory, half of it for small and half for large blocks.

    Attributes:
        named: The numbers by which streams were named.
        records_of_all: How many fences were recorded behind all streams.
    """

    kind = "host"
    name = "fake"
    fence_calls = 0
    checker = None

    def __init__(self, *, host_readable: bool = True, kind: str = "host") -> None:
        self.host_readable = host_readable
        self.kind = kind
        self.dlpack_device = (2, 0) if kind == "cuda" else (1, 0)
        self.default_stream = FakeStream()
        self.named: list[object] = []
        self.records_of_all = 0
        self.memory = np.zeros(MEMORY + 4096, dtype=np.uint8)
        self.base = -(-self.memory.ctypes.data // 4096) * 4096

    def stream_of(self, stream: object) -> FakeStream:
        if isinstance(stream, int):
            self.named.append(stream)
            return FakeStream()
        if not isinstance(stream, FakeStream):
            raise ValueError("not a stream of this device")  # noqa: TRY004  # as a device of ours has it
        return stream

    def record_all(self) -> FakeFence:
        self.records_of_all += 1
        return FakeFence()


class Missed(Exception):  # nothing is wrong
    """A door had nothing for its caller, who goes on to a scheduler. This pool has none."""


class FakePool(Allocator):
    """A pool's hooks.

    Attributes:
        forgotten: Bytes of each buffer that was dropped and never freed, where that is noted.
    """

    def __init__(self, *, host_readable: bool = True, kind: str = "host", options: HeapOptions | None = None) -> None:
        self.device = FakeDevice(host_readable=host_readable, kind=kind)
        self.core = Core(self.device, self, **(options or {}))  # type: ignore[arg-type]  # as much of a device as needed
        self.core.add_segment(self.device.base, MEMORY // 2, 0, 0)
        self.core.add_segment(self.device.base + MEMORY // 2, MEMORY // 2, 1, 0)
        self.core.open = True
        self._attach(self.core)
        self.forgotten: list[int] = []

    def _open_core(self) -> NoReturn:
        raise Missed

    def serve(self) -> None:
        """Have a scheduler, whose effects nobody carries out."""
        self.core.serve(self, lambda _: None, deque(), limit=MEMORY)

    run = _pressure = _beat = own = lambda *_: None

    def grant(self, nbytes: int) -> Buffer:
        """Return a buffer that no door has served."""
        return self.core.adopt(self.core.take(nbytes, 0, anywhere=True), nbytes)

    def held(self) -> list[int]:
        """Return the bytes of each block that somebody holds."""
        return [self.core.info(block).nbytes for _, block in self.core.scheduler.holds()]

    def _forgotten(self, nbytes: int, tag: str | None, site: str) -> None:  # noqa: ARG002
        self.forgotten.append(nbytes)


def assert_all_free(pool: FakePool) -> None:
    """Demand that nothing is live and the heap is sound and whole again."""
    pool.core.check()
    assert pool.core.live() == 0
    pool.core.flush()
    pool.core.merge()
    assert pool.core.counts().free == pool.core.reserved()
    assert pool.core.counts().free_blocks == len(pool.core.segments())


def ranges(buffers: Sequence[Buffer] | Batch) -> list[tuple[int, int]]:
    """The buffers' ranges in address order."""
    return sorted((buffer.address, buffer.address + buffer._block_bytes) for buffer in buffers)
