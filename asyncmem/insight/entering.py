"""`AroundPools`: what looks at pools for the length of a block is entered by ``async with`` as it is by ``with``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from asyncmem.pool import AsyncMemoryPool


class AroundPools:
    """Something that begins and ends without blocking, once its pools are open."""

    _pools: tuple[AsyncMemoryPool, ...]

    def __enter__(self) -> Self:
        """Begin."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Open the pools without blocking the loop, and begin as ``with`` does."""
        for pool in self._pools:
            await pool.open()
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End as ``with`` does."""
        self.__exit__(kind, error, trace)
