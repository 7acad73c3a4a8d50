"""A lease: one contiguous range, promised now, whose inner allocations never wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from asyncmem.errors import BufferReleased, InvalidRequest
from asyncmem.pool.graph import graph_of
from asyncmem.pool.holdings import current_owner
from asyncmem.pool.home import running_home
from asyncmem.pool.notes import Notes
from asyncmem.pool.share import Share
from asyncmem.units import format_size, parse_size

if TYPE_CHECKING:
    from types import TracebackType

    from asyncmem.core import Buffer
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.waiting import Waiting
    from asyncmem.units import Size


class Lease(Share):
    """A share of a pool that is one range of memory, held by whoever entered it. Made by `pool.lease(...)`.

    Inside the block every allocation is served at once from the range, or fails at once with `OutOfMemoryError` when
    it is above the range's largest hole; it waits only where `spillable` memory of the lease moves for it. Freed bytes
    return to the lease. At the end of the block its free bytes return to the pool, and buffers still held become
    ordinary buffers of the pool.
    """

    may_wait = False
    laid_out = False  # whether buffers lie where a plan has them, and nowhere else

    def __init__(
        self, parent: Share, size: Size, *, stream: object, tag: str | None, priority: int, timeout: float | None
    ) -> None:
        self._size = parse_size(size)
        if self._size == 0:
            raise InvalidRequest("size", size, "more than 0 bytes")
        super().__init__(f"{parent.name}/lease", parent)
        self._terms = (stream, tag, priority, timeout)
        self._range = Notes()
        self._ended = False
        self._served_by: Flow | None = None  # the pool's, or that of its fallback

    def __repr__(self) -> str:
        state = "ended" if self._ended else "not entered" if self._range.owner is None else "held"
        return f"<asyncmem.Lease of {format_size(self._size)}: {state}>"

    @property
    def nbytes(self) -> int:
        """Bytes that were promised."""
        return self._size

    @property
    def address(self) -> int:
        """Where the range begins."""
        return self._range.place[0]

    @property
    def flow(self) -> Flow:
        """The pool's machinery.

        Raises:
            InvalidRequest: The block has not been entered.
            BufferReleased: The block has ended.
        """
        if self._ended:
            raise BufferReleased(self._size, action="allocating from a lease")
        if self._range.owner is None:
            raise InvalidRequest("lease", self, 'a lease that was entered: "async with pool.lease(...) as lease"')
        assert self._served_by is not None
        return self._served_by

    def own_limit(self) -> int:
        """Answer the length of the range in bytes."""
        return self._size

    def capacity(self) -> int:
        """Answer the length of the range: what bounds the pool bounded the lease as a whole already."""
        return self._size

    def held_up_at(self, waiting: Waiting) -> Share:  # noqa: ARG002 - there is no other memory that could serve it
        """Answer the lease itself."""
        return self

    def shortage(self, nbytes: int) -> int:
        """Answer how much has to become free here before so many bytes can be had; 1 where they are free in pieces."""
        return max(nbytes - (self._size - self._core.account(self._account).live), 1)

    def largest_hole(self) -> int:
        """Answer the largest request that would be granted now, in bytes."""
        return self._core.largest(self._arena)

    async def __aenter__(self) -> Self:
        """Wait for the range; the current task counts as its owner until the block ends.

        Cancelled: nothing was promised.
        """
        if self._range.owner is not None or self._ended:
            raise InvalidRequest("lease", self, "a lease that was not entered before; ask the pool for another")
        parent = self.parent
        assert parent is not None
        stream, tag, priority, timeout = self._terms
        found = await parent.allocate_async(self._size, stream=stream, tag=tag, priority=priority, timeout=timeout)
        return self._enter(found)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the free parts back at once; buffers still held stay valid."""
        self._exit()

    def __enter__(self) -> Self:
        """Take the range at once, from any thread; see `allocate` for what its timeout may be."""
        parent = self.parent
        assert parent is not None
        stream, tag, priority, timeout = self._terms
        return self._enter(parent.allocate(self._size, stream=stream, tag=tag, priority=priority, timeout=timeout))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the free parts back at once; buffers still held stay valid."""
        self._exit()

    def _enter(self, found: Buffer) -> Self:
        core = found._core
        giver: AsyncMemoryPool = core.pool  # type: ignore[assignment]  # the core tells none of its type
        flow = self._served_by = giver.flow
        if graph_of(found) is not None:
            found.free()
            raise InvalidRequest(
                "lease", self, "a stream that is not being captured: a graph's memory outlives its lease"
            )
        owner = current_owner(running_home(flow.home))
        place = found.address, found.size
        parent = self.parent
        assert parent is not None
        checker = core.device.checker
        with flow.turn:
            if checker is not None:
                checker.close_block(found.address)  # each piece of the range is told of by itself
            account = core.add_account(-1, None)
            self._attach(core, account, core.open_lease(found._disown()))
            self._range.hold(parent if parent._core is core else giver, owner, place)
            flow.shares[account] = self
        return self

    def _exit(self) -> None:
        if self._ended:
            return
        self._ended = True
        flow = self._served_by
        assert flow is not None
        with flow.turn:
            self._range.let_go()
            flow.core.close_lease(self._arena)
            flow.shares.pop(self._account, None)
            flow.spilling.pass_on(self)
            flow.ended_accounts.append(self._account)
            flow.close_accounts()
            self._attach(None)  # shuts the doors
            flow.changed()
