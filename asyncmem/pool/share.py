"""What pool, budgets and leases have in common, and budgets."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypedDict, Unpack

from asyncmem.arrays import ALIGN, Array, Layout, extent
from asyncmem.errors import InvalidRequest, PoolClosed
from asyncmem.pool.owners import named_owner
from asyncmem.pool.ports import AnyShare
from asyncmem.pool.snapshot import share_stats, waiter_infos
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncmem.arrays import ArrayBatch
    from asyncmem.core import Buffer
    from asyncmem.pool.lease import Lease
    from asyncmem.pool.placement import ReusePlan
    from asyncmem.pool.planned import PlannedMemory
    from asyncmem.pool.ports import Opened
    from asyncmem.pool.spillable import Spillable
    from asyncmem.stats import PoolStats, WaiterInfo
    from asyncmem.units import Size


class RequestTerms(TypedDict, total=False):
    """What every request may say beside its size; each is described at `allocate_async`."""

    stream: object
    tag: str | None
    priority: int
    timeout: float | None


class Share(AnyShare):
    """A pool or a part of one, as users have it. Not made by users; see `AsyncMemoryPool`, `Budget` and `Lease`."""

    async def empty(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        **terms: Unpack[RequestTerms],
    ) -> Array:
        """Allocate a typed array over a buffer of its own; its contents are whatever was there.

        Args:
            shape: Length of each dimension.
            dtype: Anything numpy takes, or "bfloat16" and the "float8_..." names.
            **terms: `stream`, `tag`, `priority` and `timeout`, as in `allocate_async`.
        """
        dims, nbytes = extent(shape, dtype)
        buffer = await self.allocate_async(nbytes, **terms)
        return buffer.view(dtype, dims)

    async def zeros(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        **terms: Unpack[RequestTerms],
    ) -> Array:
        """Allocate as `empty` does and set all bytes to zero, in the order of the stream."""
        array = await self.empty(shape, dtype, **terms)
        buffer = array.buffer
        if buffer.nbytes:
            buffer.device.fill(buffer.address, buffer.nbytes, 0, buffer.stream)
        return array

    async def empty_batch(
        self,
        specs: Iterable[object],
        dtype: object = "float32",
        *,
        align: Size = ALIGN,
        **terms: Unpack[RequestTerms],
    ) -> ArrayBatch:
        """Allocate many typed arrays over one buffer, all or nothing; their contents are whatever was there.

        They lie one behind the other in the order asked, so what goes through all of them streams through one range.

        Args:
            specs: What each array is: a shape, a pair of shape and dtype, or anything that has a `shape` and a `dtype`
                to be like: arrays of numpy and ours, tensors of torch.
            dtype: The elements of those that are a mere shape, as in `empty`.
            align: Each array begins at a multiple of so many bytes, a power of two up to 512.
            **terms: `stream`, `tag`, `priority` and `timeout`, as in `allocate_async`.

        Raises:
            InvalidRequest: One of the arguments cannot be right.

        Cancelled: nothing was allocated.
        """
        layout = Layout.of(specs, dtype=dtype, align=align)
        buffer = await self.allocate_async(layout.nbytes, **terms)
        layout.clear_gaps(buffer)
        return layout.over(buffer)

    def allocate_arrays(
        self,
        specs: Iterable[object],
        dtype: object = "float32",
        *,
        align: Size = ALIGN,
        **terms: Unpack[RequestTerms],
    ) -> ArrayBatch:
        """Allocate as `empty_batch` does, from code that cannot await: now, or blocking this thread until `timeout`."""
        layout = Layout.of(specs, dtype=dtype, align=align)
        buffer = self.allocate(layout.nbytes, **terms)
        layout.clear_gaps(buffer)
        return layout.over(buffer)

    def lease(self, size: Size, **terms: Unpack[RequestTerms]) -> Lease:
        """Promise one contiguous range, whose inner allocations never wait: ``async with pool.lease("1 GiB") as it``.

        The arguments are those of `allocate_async`; waiting for the range starts when the block is entered.
        """
        from asyncmem.pool.lease import Lease

        return Lease(self, size, **terms)

    def apply_plan(self, plan: ReusePlan, *, strict: bool = False, **terms: Unpack[RequestTerms]) -> PlannedMemory:
        """Have one range serve the buffers of a program's steps by a plan: ``async with pool.apply_plan(plan) as it``.

        Waiting for the range, of ``plan.peak`` bytes, starts when the block is entered.

        Args:
            plan: Where the buffers of a step lie, from `LifetimeAnalyzer.compute_reuse_plan`.
            strict: Whether what the plan does not have raises, instead of being served by the pool.
            **terms: `stream`, `tag`, `priority` and `timeout` of the request for the range, as in `allocate_async`.

        Raises:
            InvalidRequest: It is no plan, or one of nothing.
        """
        from asyncmem.pool.planned import PlannedMemory

        return PlannedMemory(self, plan, strict=strict, **terms)

    def budget(self, name: str, *, limit: Size) -> Budget:
        """Make a share with a limit, a queue and statistics of its own; it holds within this one's limit too.

        Raises:
            InvalidRequest: The limit is no size, or zero.
        """
        nbytes = parse_size(limit, what="limit")
        if nbytes == 0:
            raise InvalidRequest("limit", limit, "more than 0 bytes")
        return Budget(self, name, nbytes)

    def spillable(self, buffer: Buffer) -> Spillable:
        """Say that a buffer may move to page-locked host memory while others need the device's.

        From here on the memory is reached by the answer alone: ``async with held as buffer`` brings it home where it is
        away, and keeps it there until the block ends. The buffer that was given is dead. At most `spill_limit` bytes
        of the host are used for this.

        It moves where a full budget or lease that it is charged to holds a request up, or the pool where that is full.

        Raises:
            InvalidRequest: It is not of this pool, is pinned or exported, lies where a plan or a captured graph has it,
                or its home stream is a mere number.
            BufferReleased: It has been freed.
        """
        from asyncmem.pool.spillable import Spillable

        return Spillable(self._opened.spilling, buffer)

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Name what is allocated inside the block: its task holds it, for the proof of deadlocks, until it is freed.

        The name stands for the task in tables and errors. Tasks that are made inside inherit the name, and each of them
        is an owner of its own.
        """
        token = named_owner.set(name)
        opened = self._opened
        opened.enter_owner()
        try:
            yield
        finally:
            opened.leave_owner()
            with suppress(ValueError):  # its task was collected, by another
                named_owner.reset(token)

    def stats(self) -> PoolStats:
        """Answer the figures of this moment."""
        return share_stats(self)

    def waiters(self) -> tuple[WaiterInfo, ...]:
        """Answer who waits here for how much, for how long, and holds what; in the order of arrival."""
        return waiter_infos(self)


class Budget(Share):
    """A named share of a pool with its own limit and statistics. Made by `pool.budget(...)`.

    Its requests stand in order with all others; one for which the budget has no room holds up nobody outside of it.
    """

    def __init__(self, parent: Share, name: str, limit: int, *, waits: bool | None = None) -> None:
        super().__init__(name, parent)
        self._limit = limit
        self._closed = False
        self.may_wait = parent.may_wait if waits is None else waits
        opened = self._served_by = parent._opened  # kept, because a budget may outlive its lease
        opened.close_accounts()
        core = opened.core
        account = core.add_account(parent._account, self._limit)
        core.scheduler.open_share(
            account, up=parent._account, part_of=parent._account, arena=parent._arena, waits=self.may_wait,
            bypass=opened.options.bypass,
        )  # fmt: skip
        self._attach(core, account, parent._arena)
        opened.begin_share(self, account)
        with opened.lock:
            for share in parent.lineage():
                share.inside[self] = None

    def __repr__(self) -> str:
        return f"<asyncmem.Budget {self.name!r} of {self._limit} bytes{', closed' if self._closed else ''}>"

    @property
    def level(self) -> str:
        """What errors call it."""
        return f"budget {self.name!r}"

    @property
    def _opened(self) -> Opened:
        if self._closed:
            raise PoolClosed(self.name, "the budget has been closed")
        return super()._opened

    def own_limit(self) -> int:
        """Return the budget's limit in bytes."""
        return self._limit

    def resize(self, *, limit: Size) -> None:
        """Change the limit; below what is live, nothing is granted until enough is freed.

        Requests for more than the new limit get `OutOfMemoryError`.
        """
        nbytes = parse_size(limit, what="limit")
        opened = self._opened
        self._limit = nbytes
        opened.core.scheduler.set_limit(self._account, nbytes, opened.core.time)
        opened.core.carry_out()

    def close(self) -> None:
        """End the budget: requests that wait in it get `PoolClosed`. Buffers still held stay valid, and are the pool's.

        Budgets inside it are closed too. Closing twice is fine.
        """
        opened = self._served_by
        for inner in list(self.inside):
            assert isinstance(inner, Budget)
            inner.close()
        with opened.lock:
            if self._closed:
                return
            self._closed = True
            account = self._account
            self._attach(None)
            for share in self.lineage():
                share.inside.pop(self, None)
        opened.end_share(account)
