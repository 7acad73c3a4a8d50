"""Data of the host on its way to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Generator

    from asyncmem.pool import Copy
    from asyncmem.pool.latch import Latch


@final
class Transfer:
    """A copy that has started, or will once a thread has read its data: await it, or `block()` a thread.

    The data must stay as it is until then. Cancelling the await stops nothing. Made by `DoubleBuffer.prefetch_next`.
    """

    __slots__ = ("__weakref__", "_reading")

    def __init__(self, reading: Latch[Copy]) -> None:
        self._reading = reading

    def __repr__(self) -> str:
        return f"<asyncmem.pipeline.Transfer: {'done' if self.done() else 'under way'}>"

    def done(self) -> bool:
        """Say whether all of it is there, or it has failed."""
        try:
            copy = self._reading.result()
        except Exception:  # noqa: BLE001 -- whoever waits for it gets the error
            return True
        return copy is not None and copy.done()

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (blocks) until all of it is there; False when `timeout` seconds passed first.

        Raises:
            DeviceError: It failed, or the device is lost.
        """
        copy = self._reading.block(timeout)
        return copy is not None and copy.block(timeout)

    def __await__(self) -> Generator[object, object, None]:
        """Wait on asyncio, uvloop or trio until all of it is there.

        Raises:
            DeviceError: It failed, or the device is lost.
        """
        copy = yield from self._reading.wait().__await__()
        assert copy is not None
        yield from copy.__await__()

    async def ordered(self) -> None:
        """Wait only until later work of the stream that copies comes behind the data by itself. Raises as the await."""
        copy = await self._reading.wait()
        if copy is not None and not copy.ordered:
            await copy

    def block_until_ordered(self) -> None:
        """Wait for the same on this thread (blocks)."""
        copy = self._reading.block()
        if copy is not None and not copy.ordered:
            copy.block()
