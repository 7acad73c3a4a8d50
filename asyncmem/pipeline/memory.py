"""Where a feed's memory comes from."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from asyncmem.core import Batch, Buffer, Ready
from asyncmem.errors import InvalidRequest
from asyncmem.pool import AsyncMemoryPool, Budget, Request
from asyncmem.runtime import RuntimeDevice
from asyncmem.runtime import device as runtime_device

if TYPE_CHECKING:
    from asyncmem.devices import Device, Stream

T = TypeVar("T", Buffer, Batch)

Memory: TypeAlias = AsyncMemoryPool | Budget | RuntimeDevice | str
"""A pool, a budget of one, or a device whose pool the whole process shares: "cuda:0", `asyncmem.device("cuda:0")`."""


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
