"""What a stage allocates from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.pool import Budget

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncmem.core import Batch, Buffer, Ready
    from asyncmem.devices import Stream
    from asyncmem.pool import Request
    from asyncmem.pool.share import Share


class StageShare(Budget):
    """A stage's share of its pipeline's memory: a budget whose buffers are at home on the stage's stream.

    Attributes:
        stream: Where the stage queues its work; None where it named none.
    """

    def __init__(self, parent: Share, name: str, limit: int, stream: Stream | None) -> None:
        """Not made by users; see `Pipeline`."""
        super().__init__(parent, name, limit)
        self.stream = stream

    def allocate(
        self, size: int | str, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Buffer:  # fmt: skip
        """Allocate as `AsyncMemoryPool.allocate` does, on the stage's stream where none is named."""
        on = self.stream if stream is None else stream
        return super().allocate(size, stream=on, tag=tag, priority=priority, timeout=timeout)

    def allocate_async(
        self, size: int | str, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Ready[Buffer] | Request[Buffer]:  # fmt: skip
        """Allocate as `AsyncMemoryPool.allocate_async` does, on the stage's stream where none is named."""
        on = self.stream if stream is None else stream
        return super().allocate_async(size, stream=on, tag=tag, priority=priority, timeout=timeout)

    def allocate_batch(
        self, sizes: Iterable[int | str], *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Ready[Batch] | Request[Batch]:  # fmt: skip
        """Allocate as `AsyncMemoryPool.allocate_batch` does, on the stage's stream where none is named."""
        on = self.stream if stream is None else stream
        return super().allocate_batch(sizes, stream=on, tag=tag, priority=priority, timeout=timeout)

    def try_allocate(self, size: int | str, *, stream: object = None, tag: str | None = None) -> Buffer | None:
        """Allocate as `AsyncMemoryPool.try_allocate` does, on the stage's stream where none is named."""
        return super().try_allocate(size, stream=self.stream if stream is None else stream, tag=tag)
