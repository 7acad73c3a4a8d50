"""A lease: one contiguous range, promised now, whose inner allocations never wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from asyncmem.errors import BufferReleased, InvalidRequest
from asyncmem.pool.graph import graph_of
from asyncmem.pool.share import RequestTerms, Share
from asyncmem.units import format_size, parse_size

if TYPE_CHECKING:
    from asyncmem.core import Buffer
    from asyncmem.pool.ports import Opened
    from asyncmem.units import Size


class Lease(Share):
    """A share of a pool that is one range of memory, held by whoever entered it. Made by `pool.lease(...)`.

    Inside the block every allocation is served at once from the range, or fails at once with `OutOfMemoryError` when
    it is above the range's largest hole; it waits only where `spillable` memory of the lease moves for it. Freed bytes
    return to the lease. At the end of the block its free bytes return to the pool, and buffers still held become
    ordinary buffers of the pool.
    """

    may_wait = False
    is_lease = True

    def __init__(
        self, parent: Share, size: Size, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self._size = parse_size(size)
        if self._size == 0:
            raise InvalidRequest("size", size, "more than 0 bytes")
        super().__init__(f"{parent.name}/lease", parent)
        self._terms = RequestTerms(stream=stream, tag=tag, priority=priority, timeout=timeout)
        self._entered = self._ended = False
        self._place = 0
        self._hold = 0
        self._served_by: Opened | None = None  # the pool, or its fallback

    def __repr__(self) -> str:
        state = "ended" if self._ended else "held" if self._entered else "not entered"
        return f"<asyncmem.Lease of {format_size(self._size)}: {state}>"

    @property
    def nbytes(self) -> int:
        """Bytes that were promised."""
        return self._size

    @property
    def address(self) -> int:
        """Where the range begins."""
        return self._place

    @property
    def level(self) -> str:
        """What errors call it."""
        return f"a lease of {format_size(self._size)}"

    @property
    def _opened(self) -> Opened:
        if self._ended:
            raise BufferReleased(self._size, action="allocating from a lease")
        if not self._entered:
            raise InvalidRequest("lease", self, 'a lease that was entered: "async with pool.lease(...) as lease"')
        assert self._served_by is not None
        return self._served_by

    def own_limit(self) -> int:
        """Answer the length of the range in bytes."""
        return self._size

    def capacity(self) -> int:
        """Answer the length of the range: what bounds the pool bounded the lease as a whole already."""
        return self._size

    def largest_hole(self) -> int:
        """Answer the largest request that would be granted now, in bytes."""
        return self._core.largest(self._arena)

    async def __aenter__(self) -> Self:
        """Wait for the range; the current task counts as its owner until the block ends.

        Cancelled: nothing was promised.
        """
        if self._entered or self._ended:
            raise InvalidRequest("lease", self, "a lease that was not entered before; ask the pool for another")
        parent = self.parent
        assert parent is not None
        return self._enter(await parent.allocate_async(self._size, **self._terms))

    async def __aexit__(self, *_: object) -> None:
        """Give the free parts back at once; buffers still held stay valid."""
        self._exit()

    def __enter__(self) -> Self:
        """Take the range at once, from any thread; see `allocate` for what its timeout may be."""
        parent = self.parent
        assert parent is not None
        return self._enter(parent.allocate(self._size, **self._terms))

    def __exit__(self, *_: object) -> None:
        """Give the free parts back at once; buffers still held stay valid."""
        self._exit()

    def _enter(self, found: Buffer) -> Self:
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
        self._place, whole = found.address, found.size
        found._let_go()
        block = found._disown()
        self._hold = core.hold(block)
        parent = self.parent
        assert parent is not None
        account = core.add_account(-1, whole)
        outer = parent._account if parent._core is core else 0
        arena = core.open_lease(block)
        core.scheduler.open_share(account, up=-1, part_of=outer, arena=arena, waits=False, bypass=opened.options.bypass)
        self._attach(core, account, arena)
        self._entered = True
        opened.begin_share(self, account)
        return self

    def _exit(self) -> None:
        if self._ended:
            return
        self._ended = True
        opened = self._served_by
        assert opened is not None
        core = opened.core
        core.release(self._hold)
        account, arena = self._account, self._arena
        self._attach(None)
        opened.end_share(account, arena)
