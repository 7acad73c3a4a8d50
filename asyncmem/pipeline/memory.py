"""Where a feed's memory comes from, and how bytes of the host get there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from asyncmem.core import Batch, Buffer, Ready
from asyncmem.errors import InvalidRequest
from asyncmem.pool import AsyncMemoryPool, Budget, Copy, Request
from asyncmem.runtime import RuntimeDevice
from asyncmem.runtime import device as runtime_device

if TYPE_CHECKING:
    from asyncmem.devices import Device, Stream

T = TypeVar("T", Buffer, Batch)

Memory: TypeAlias = AsyncMemoryPool | Budget | RuntimeDevice | str
"""A pool, a budget of one, or a device whose pool the whole process shares: "cuda:0", `asyncmem.device("cuda:0")`."""

Piece: TypeAlias = tuple[int, memoryview]
"""Bytes of the host, and where in a buffer they belong."""


def share_of(memory: object) -> AsyncMemoryPool | Budget:
    """Answer the pool or budget that is meant.

    Raises:
        InvalidRequest: It is something else.
    """
    if isinstance(memory, str):
        memory = runtime_device(memory)
    if isinstance(memory, RuntimeDevice):
        memory = memory.pool
    if isinstance(memory, AsyncMemoryPool | Budget):
        return memory
    raise InvalidRequest("pool", memory, "a pool, a budget, or the name of a device")


def pool_of(share: AsyncMemoryPool | Budget) -> AsyncMemoryPool:
    """Answer the pool that a share is a part of."""
    *_, pool = share.lineage()
    assert isinstance(pool, AsyncMemoryPool)
    return pool


def stream_of(device: Device, stream: object) -> Stream:
    """Answer the stream that a user named; None is the device's default stream."""
    return device.default_stream if stream is None else device.stream_of(stream)


class Patience:
    """Requests that threads wait for, until somebody ends them all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[Request[Buffer] | Request[Batch]] = []
        self._over = False

    def wait(self, request: Ready[T] | Request[T]) -> T:
        """Wait on this thread (blocks) for a request, and answer what it is granted.

        Raises:
            RequestCancelled: All have been ended.
            OutOfMemoryError: It can never be granted; likewise the other errors of an await.
        """
        if isinstance(request, Request):
            with self._lock:
                over = self._over
                self._requests.append(request)
            if over:
                request.cancel()
            try:
                request.block()
            finally:
                with self._lock:
                    self._requests.remove(request)
        return request.result()

    def end(self) -> None:
        """Cancel what is waited for, now and from now on."""
        with self._lock:
            self._over = True
            requests = list(self._requests)
        for request in requests:
            request.cancel()


def holds_up(pool: AsyncMemoryPool, pieces: Sequence[Piece]) -> bool:
    """Tell whether copying these to the device would hold up whoever copies, because they are not page-locked."""
    return any(pool.device.copy_holds_up(source, into=True) for _, source in pieces)


def fill(target: Buffer, pieces: Sequence[Piece]) -> list[Copy]:
    """Start copying pieces to where they belong, each by the buffer's home stream."""
    # A piece is bytes, and so is the part of the buffer that it goes to.
    return [target._copy(source.nbytes, source, None, True, offset) for offset, source in pieces]


def fill_by_way_of(staging: Buffer, target: Buffer, pieces: Sequence[Piece]) -> Copy:
    """Read pieces into a page-locked buffer of the target's size (blocks), and start one copy of the whole.

    The staging buffer is freed; its memory follows when the copy is done.
    """
    try:
        for offset, source in pieces:
            # By numpy, which lets go of the interpreter meanwhile.
            np.copyto(staging.view("uint8", source.nbytes, offset).numpy(np.uint8), np.asarray(source))
        return target.copy_from(staging)
    finally:
        staging.free()
