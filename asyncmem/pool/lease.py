"""A lease: one contiguous range, promised now, whose inner allocations never wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from asyncmem.errors import BufferReleased, InvalidRequest
from asyncmem.figures import format_size
from asyncmem.pool.graph import graph_of
from asyncmem.pool.share import RequestTerms, Share
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from asyncmem.core import Buffer
    from asyncmem.pool.ports import Opened
    from asyncmem.units import Size


class Lease(Share):
    """A share of a pool: one range of memory, held by the task or thread that entered it. Made by `pool.lease(...)`.

    Inside the block every allocation is served at once from the range, or fails at once with `OutOfMemoryError` when
    it exceeds the largest hole of the range; it waits only while `spillable` memory of the lease moves for it. Freed
    bytes return to the lease. At the end of the block its free bytes return to the pool, budgets inside are closed, and
    buffers still held become ordinary buffers of the pool.
    """

    _may_wait = False
    _is_lease = True

    def __init__(
        self, parent: Share, size: Size, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._size = parse_size(size)
        if self._size == 0:
            raise InvalidRequest("size", size, "more than 0 bytes")
        super().__init__(f"{parent.name}/lease", parent)
        self._source = parent
        self._terms = RequestTerms(stream=stream, tag=tag, priority=priority, timeout=timeout)
        self._place = 0

    def __repr__(self) -> str:
        state = "ended" if self._ended else "held" if self._served_by is not None else "not entered"
        return f"<asyncmem.Lease of {format_size(self._size)}: {state}>"

    @property
    def nbytes(self) -> int:
        """The bytes of the range."""
        return self._size

    @property
    def address(self) -> int:
        """The first address of the range."""
        return self._place

    @property
    def _level(self) -> str:
        """What errors call it."""
        return f"a lease of {format_size(self._size)}"

    @property
    def _opened(self) -> Opened:
        if self._ended:
            raise BufferReleased(self._size, action="allocating from a lease")
        if self._served_by is None:
            raise InvalidRequest("lease", self, 'a lease that was entered: "async with pool.lease(...) as lease"')
        return self._served_by

    def _own_limit(self) -> int:
        """Return the length of the range in bytes."""
        return self._size

    def capacity(self) -> int:
        """Return the length of the range: what bounds the pool bounded the lease as a whole already."""
        return self._size

    def largest_hole(self) -> int:
        """Return the largest request that would be granted now, in bytes."""
        return self._core.largest(self._arena)

    async def __aenter__(self) -> Self:
        """Wait for the range; the current task counts as its owner until the block ends.

        Cancelled: nothing was promised.
        """
        self._need_new()
        return self._enter(await self._source.allocate_async(self._size, **self._terms))

    def __enter__(self) -> Self:
        """Take the range at once, from any thread; see `allocate` for what its timeout may be."""
        self._need_new()
        return self._enter(self._source.allocate(self._size, **self._terms))

    def _need_new(self) -> None:
        if self._served_by is not None:
            raise InvalidRequest("lease", self, "a lease that was not entered before; ask the pool for another")

    def _enter(self, found: Buffer) -> Self:
        if self._served_by is not None:  # by another task or thread, meanwhile
            found.free()
            self._need_new()
        core = found._core
        opened: Opened = core.pool  # type: ignore[assignment]  # the core tells none of its type
        self._served_by = opened
        if graph_of(found) is not None:
            found.free()
            raise InvalidRequest(
                "lease", self, "a stream that is not being captured: a graph's memory outlives its lease"
            )
        if core.device.checker is not None:
            core.device.checker.close_block(found.address)  # each piece of the range is told of by itself
        self._place = found.address
        self._begin_lease(found, self._source, opened.options.bypass)
        opened.shares[self._account] = self
        return self


async def reserve_ranges(parent: Share, sizes: Sequence[int], tag: str, until: ExitStack) -> list[Lease]:
    """Wait for ranges of memory, all or none, so that none is held during the wait; return their leases.

    Args:
        parent: Where the memory comes from.
        sizes: The lengths of the ranges in bytes.
        tag: A label for reports.
        until: Ends the leases.

    Cancelled: nothing was taken.
    """
    leases = [parent.lease(nbytes) for nbytes in sizes]
    if leases:
        batch = await parent.allocate_batch(sizes, tag=tag)
        for lease, buffer in zip(leases, batch, strict=True):
            until.push(lease._enter(buffer))
    return leases
