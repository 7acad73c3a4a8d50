"""A device and a pool just large enough for the core's handles: the memory is a numpy array, nothing ever waits."""

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from asyncmem.core import Allocator, Batch, Buffer, Core, HeapOptions

MEMORY = 1 << 24


class FakeStream:
    """A stream that does nothing."""

    handle = 0


class FakeDevice:
    """Host memory, half of it for small and half for large blocks."""

    kind = "host"
    name = "fake"

    def __init__(self, *, host_readable: bool = True, kind: str = "host") -> None:
        self.host_readable = host_readable
        self.kind = kind
        self.dlpack_device = (2, 0) if kind == "cuda" else (1, 0)
        self.default_stream = FakeStream()
        self.memory = np.zeros(MEMORY + 4096, dtype=np.uint8)
        self.base = -(-self.memory.ctypes.data // 4096) * 4096


class Missed(Exception):  # nothing is wrong
    """A door had nothing for its caller, who goes on to a scheduler. This pool has none."""


class FakePool(Allocator):
    """A pool's hooks, each of which notes that it was called."""

    def __init__(self, *, host_readable: bool = True, kind: str = "host", options: HeapOptions | None = None) -> None:
        self.device = FakeDevice(host_readable=host_readable, kind=kind)
        self.core = Core(self.device, self, **(options or {}))  # type: ignore[arg-type]  # as much of a device as needed
        self.core.add_segment(self.device.base, MEMORY // 2, 0, 0)
        self.core.add_segment(self.device.base + MEMORY // 2, MEMORY // 2, 1, 0)
        self.core.open = True
        self._attach(self.core)
        self.calls: list[tuple[str, object]] = []
        self.refuse_stream: Exception | None = None

    def _open_core(self) -> NoReturn:
        raise Missed

    def serve(self) -> None:
        """Have a scheduler, which is given no effects to carry out."""
        self.core.serve(lambda _: None, limit=MEMORY)

    def grant(self, nbytes: int) -> Buffer:
        """Return a buffer that no door has served."""
        return self.core.adopt(self.core.take(nbytes, 0, anywhere=True), nbytes)

    def held(self) -> list[int]:
        """Return the bytes of each block that somebody holds."""
        return [self.core.size(block) for _, block in self.core.scheduler.holds()]

    def _free_noted(self, buffer: Buffer, stream: object) -> None:
        self.calls.append(("free_noted", stream))
        if self.refuse_stream is not None:
            raise self.refuse_stream
        buffer._release()

    def _use_on(self, buffer: Buffer, stream: object) -> None:
        self.calls.append(("use_on", stream))
        buffer.notes = Site()

    def _lend(self, buffer: Buffer, stream: int | None) -> None:
        self.calls.append(("lend", stream))
        buffer.notes = Site()

    def _hand_over(self, buffer: Buffer, stream: object) -> None:
        index = self.core.register_stream(stream)  # type: ignore[arg-type]  # any hashable will do for a stream here
        self.core.set_home(buffer._block, index)

    def _forgotten(self, buffer: Buffer) -> None:
        self.calls.append(("forgotten", buffer.nbytes))

    def called(self, name: str) -> list[object]:
        """What a hook was called with, in order."""
        return [argument for call, argument in self.calls if call == name]


class Site:
    """Notes on a buffer that know where it was made."""

    site = "here.py:1"


def assert_all_free(pool: FakePool) -> None:
    """Demand that nothing is live and the heap is sound and whole again."""
    pool.core.check()
    assert pool.core.live() == 0
    pool.core.flush()
    pool.core.merge()
    assert pool.core.free_bytes() == pool.core.reserved()
    assert pool.core.counts().free_blocks == len(pool.core.segments())


def ranges(buffers: Sequence[Buffer] | Batch) -> list[tuple[int, int]]:
    """The buffers' ranges in address order."""
    return sorted((buffer.address, buffer.address + buffer.size) for buffer in buffers)
