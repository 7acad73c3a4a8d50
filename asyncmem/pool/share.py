"""What pool, budgets and leases have in common: the doors, and where a request goes that finds them shut."""

from __future__ import annotations

import itertools
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from asyncmem.core import STREAK_LIMIT, Allocator, Array, Batch, Buffer, Ready, extent
from asyncmem.engine.admit import Queue
from asyncmem.errors import InvalidRequest, PoolClosed
from asyncmem.pool.arrays import ALIGN, Layout
from asyncmem.pool.graph import is_captured
from asyncmem.pool.holdings import Holdings, OwnerName, named_owner
from asyncmem.pool.home import running_home
from asyncmem.pool.notes import call_site
from asyncmem.pool.request import Request
from asyncmem.pool.snapshot import share_stats, waiter_infos
from asyncmem.pool.tally import Tally
from asyncmem.pool.waiting import Waiting
from asyncmem.units import MAX_SIZE, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncmem.pool.arrays import ArrayBatch
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.lease import Lease
    from asyncmem.pool.placement import ReusePlan
    from asyncmem.pool.planned import PlannedMemory
    from asyncmem.pool.spillable import Spillable
    from asyncmem.stats import PoolStats, WaiterInfo
    from asyncmem.units import Size


_numbers = itertools.count()


class Share(Allocator):
    """A pool or a part of one. Not made by users; see `AsyncMemoryPool`, `Budget` and `Lease`.

    Attributes:
        name: What messages and statistics call it.
        may_wait: Whether requests queue when there is no room; a lease's fail, unless its own memory may move.
        parent: What this is a part of; None for a pool.
        inside: The budgets that are parts of this, and of its parts.
    """

    name: str
    may_wait = True
    parent: Share | None = None

    def __init__(self, name: str, parent: Share | None = None) -> None:
        self.name = name
        self.parent = parent
        self.inside: dict[Budget, None] = {}
        self.holdings = Holdings()
        self.tally = Tally()

    # -- asked by the pool's machinery -----------------------------------------------------------------------------

    @property
    def has_range(self) -> bool:
        """Whether its memory comes from one range, as that of a lease and of all its parts."""
        return self._arena != -1

    @property
    def flow(self) -> Flow:
        """The machinery of the pool that this is a part of; opens a pool that is not open yet."""
        parent = self.parent
        assert parent is not None
        return parent.flow

    @property
    def queue(self) -> Queue[Waiting]:
        """Where requests of this share stand first."""
        return self.flow.queue

    def join(self, waiting: Waiting) -> Budget | None:
        """Have a request stand here (with the turn held), and answer the budget that it stands in, if it is one."""
        self.queue.join(waiting)
        return None

    def lineage(self) -> Iterator[Share]:
        """Go through this share and those that it is a part of, innermost first."""
        share: Share | None = self
        while share is not None:
            yield share
            share = share.parent

    def capacity(self) -> int:
        """Answer the most bytes that could ever be had here."""
        return min(share.own_limit() for share in self.lineage())

    def own_limit(self) -> int:
        """Answer this share's own bound in bytes."""
        raise NotImplementedError

    _flow: Flow | None = None  # known once the pool is open, and for as long as requests may be made

    def held_up_at(self, waiting: Waiting) -> Share:
        """Answer what has no room for a request that waits: this share, or one that it is a part of."""
        assert self.parent is not None
        return self.parent.held_up_at(waiting)

    def shortage(self, nbytes: int) -> int:
        """Answer how much has to become free here before so many bytes can be had; 1 where they are free in pieces."""
        raise NotImplementedError

    def refusal(self, waiting: Waiting) -> Exception | None:
        """Answer the error of a request that can never be granted, or None."""
        return self.flow.out_of_memory(waiting) if waiting.total > self.capacity() else None

    def grant(self, ask: Waiting, *, anywhere: bool) -> Buffer | Batch | None:
        """Take what needs no other stream's memory (with the turn held)."""
        core = self._core
        if ask.batch:
            return core.grant_many(ask.sizes, ask.stream, self._account, self._arena, anywhere, ask.tag)
        if ask.nbytes == 0:
            return core.adopt(0, 0, ask.tag)
        return core.grant(ask.nbytes, ask.stream, self._account, self._arena, anywhere, ask.tag)

    # -- the doors when they are shut ------------------------------------------------------------------------------

    def _allocate(self, size: Size, stream: object, tag: str | None, priority: int, timeout: float | None) -> Buffer:
        waiting = self._read((size,), stream, tag, priority, timeout, patient=False)
        waiting.keeper.blocking.allow(waiting)
        return cast("Buffer", waiting.keeper.blocking.serve(waiting))

    def _request(
        self, size: Size, stream: object, tag: str | None, priority: int, timeout: float | None
    ) -> Request[Buffer]:
        if self._flow is not None and self._core.streak >= STREAK_LIMIT and isinstance(size, int | str):
            # Many hits in a row: this one is granted as the others were, but its await lets the loop turn once.
            self._core.streak = 0
            granted = self.allocate_async(size, stream=stream, tag=tag, priority=priority, timeout=timeout)
            return self._polite(granted.result()) if isinstance(granted, Ready) else granted
        return self._started(self._read((size,), stream, tag, priority, timeout))

    def _polite(self, granted: Buffer) -> Request[Buffer]:
        flow = self._flow or self.flow
        waiting = Waiting(flow, self, (granted.nbytes,), None)
        waiting.finish(granted, None)
        return Request(flow, waiting, True)

    def _request_batch(
        self, sizes: Iterable[Size], stream: object, tag: str | None, priority: int, timeout: float | None
    ) -> Request[Batch]:
        waiting = self._read(tuple(sizes), stream, tag, priority, timeout)
        waiting.batch = True
        return self._started(waiting)

    def _try(self, size: Size, stream: object, tag: str | None) -> Buffer | None:
        waiting = self._read((size,), stream, tag, 0, None)
        return cast("Buffer | None", waiting.keeper.try_now(waiting))

    def _started(self, waiting: Waiting) -> Request[Any]:
        flow, core = waiting.keeper, self._core
        polite = core.streak >= STREAK_LIMIT
        if polite:
            core.streak = 0
        flow.ask(waiting)
        return Request(flow, waiting, polite)

    def _read(
        self, sizes: tuple[Size, ...], stream: object, tag: str | None, priority: int, timeout: float | None, *,
        patient: bool = True,
    ) -> Waiting:  # fmt: skip
        flow = self._flow or self.flow
        first = sizes[0] if len(sizes) == 1 else None
        exact = (first,) if type(first) is int and 0 < first <= MAX_SIZE else tuple(parse_size(one) for one in sizes)
        waiting = Waiting(flow, self, exact, running_home(flow.home))
        if stream is not None:
            waiting.stream = flow.stream_index(stream)
        if is_captured(self._core.stream_objects[waiting.stream], named=True):
            flow.captures.admit(waiting)
        if tag is not None:
            waiting.tag = _text(tag)
        if priority != 0:
            waiting.priority = parse_priority(priority)
        if timeout is not None:
            waiting.limit_to(parse_duration(timeout))
        elif patient:
            waiting.limit_to(flow.options.timeout)
        if self._core.observed:
            waiting.site = call_site() if flow.options.track else None
            waiting.holder = named_owner.get()
        self._core.see(waiting)
        return waiting

    # -- what users call -------------------------------------------------------------------------------------------

    async def empty(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        *,
        stream: object = None,
        tag: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Array:
        """Allocate a typed array over a buffer of its own; its contents are whatever was there.

        Args:
            shape: Length of each dimension.
            dtype: Anything numpy takes, or "bfloat16" and the "float8_..." names.
            stream: Home stream, as in `allocate_async`; likewise `tag`, `priority` and `timeout`.
        """
        dims, nbytes = extent(shape, dtype)
        buffer = await self.allocate_async(nbytes, stream=stream, tag=tag, priority=priority, timeout=timeout)
        return buffer.view(dtype, dims)

    async def zeros(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        *,
        stream: object = None,
        tag: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> Array:
        """Allocate as `empty` does and set all bytes to zero, in the order of the stream."""
        array = await self.empty(shape, dtype, stream=stream, tag=tag, priority=priority, timeout=timeout)
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
        stream: object = None,
        tag: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> ArrayBatch:
        """Allocate many typed arrays over one buffer, all or nothing; their contents are whatever was there.

        They lie one behind the other in the order asked, so what goes through all of them streams through one range.

        Args:
            specs: What each array is: a shape, a pair of shape and dtype, or anything that has a `shape` and a `dtype`
                to be like: arrays of numpy and ours, tensors of torch.
            dtype: The elements of those that are a mere shape, as in `empty`.
            align: Each array begins at a multiple of so many bytes, a power of two up to 512.
            stream: Home stream, as in `allocate_async`; likewise `tag`, `priority` and `timeout`.

        Raises:
            InvalidRequest: One of the arguments cannot be right.

        Cancelled: nothing was allocated.
        """
        layout = Layout.of(specs, dtype=dtype, align=align)
        buffer = await self.allocate_async(layout.nbytes, stream=stream, tag=tag, priority=priority, timeout=timeout)
        layout.clear_gaps(buffer)
        return layout.over(buffer)

    def allocate_arrays(
        self,
        specs: Iterable[object],
        dtype: object = "float32",
        *,
        align: Size = ALIGN,
        stream: object = None,
        tag: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
    ) -> ArrayBatch:
        """Allocate as `empty_batch` does, from code that cannot await: now, or blocking this thread until `timeout`."""
        layout = Layout.of(specs, dtype=dtype, align=align)
        buffer = self.allocate(layout.nbytes, stream=stream, tag=tag, priority=priority, timeout=timeout)
        layout.clear_gaps(buffer)
        return layout.over(buffer)

    def lease(
        self, size: Size, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | None = None,
    ) -> Lease:  # fmt: skip
        """Promise one contiguous range, whose inner allocations never wait: ``async with pool.lease("1 GiB") as it``.

        The arguments are those of `allocate_async`; waiting for the range starts when the block is entered.
        """
        from asyncmem.pool.lease import Lease

        return Lease(self, size, stream=stream, tag=tag, priority=priority, timeout=timeout)

    def apply_plan(
        self, plan: ReusePlan, *, strict: bool = False, stream: object = None, tag: str | None = None,
        priority: int = 0, timeout: float | None = None,
    ) -> PlannedMemory:  # fmt: skip
        """Have one range serve the buffers of a program's steps by a plan: ``async with pool.apply_plan(plan) as it``.

        Waiting for the range, of ``plan.peak`` bytes, starts when the block is entered.

        Args:
            plan: Where the buffers of a step lie, from `LifetimeAnalyzer.compute_reuse_plan`.
            strict: Whether what the plan does not have raises, instead of being served by the pool.
            stream: Home of the range, as in `allocate_async`; likewise `tag`, `priority` and `timeout`.

        Raises:
            InvalidRequest: It is no plan, or one of nothing.
        """
        from asyncmem.pool.planned import PlannedMemory

        return PlannedMemory(self, plan, strict=strict, stream=stream, tag=tag, priority=priority, timeout=timeout)

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

        return Spillable(self.flow.spilling, buffer)

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Name who holds what is allocated inside the block, for the deadlock detector and its table."""
        token = named_owner.set(OwnerName(name))
        self.flow.owner_enters()
        try:
            yield
        finally:
            self.flow.owner_leaves()
            with suppress(ValueError):  # its task was collected, by another
                named_owner.reset(token)

    def stats(self) -> PoolStats:
        """Answer the figures of this moment."""
        return share_stats(self)

    def waiters(self) -> tuple[WaiterInfo, ...]:
        """Answer who waits here for how much, for how long, and holds what; in the order of arrival."""
        return waiter_infos(self)


class Budget(Share):
    """A named share of a pool with its own limit, queue and statistics. Made by `pool.budget(...)`.

    A request first waits for room in the budget, in the budget's own order, and then for memory with everybody else,
    so a budget that is used up holds nobody else up.
    """

    def __init__(self, parent: Share, name: str, limit: int) -> None:
        super().__init__(name, parent)
        self.number = next(_numbers)
        self._flow = flow = parent.flow
        self._limit = limit
        self._promised = 0
        self._closed = False
        self._queue: Queue[Waiting] = Queue(int(flow.options.bypass * limit))
        self._attach(parent._core, parent._core.add_account(parent._account, limit), parent._arena)
        self.may_wait = parent.may_wait
        with flow.turn:
            flow.close_accounts()
            flow.budgets.append(self)
            for share in parent.lineage():
                share.inside[self] = None
            flow.shares[self._account] = self

    def __repr__(self) -> str:
        return f"<asyncmem.Budget {self.name!r} of {self._limit} bytes{', closed' if self._closed else ''}>"

    @property
    def flow(self) -> Flow:
        """The pool's machinery.

        Raises:
            PoolClosed: The budget has been closed.
        """
        if self._closed:
            raise PoolClosed(self.name, "the budget has been closed")
        return super().flow

    @property
    def queue(self) -> Queue[Waiting]:
        """Where requests of this budget stand until it has room."""
        return self._queue

    def join(self, waiting: Waiting) -> Budget | None:
        """Have a request stand here until there is room (with the turn held)."""
        self._queue.join(waiting)
        self.flow.standing[self] = None
        return self

    def pass_on(self, waiting: Waiting) -> Budget | None:
        """Have a request stand next in what is around this (with the turn held); see `join`."""
        assert self.parent is not None
        return self.parent.join(waiting)

    def own_limit(self) -> int:
        """Answer the budget's limit in bytes."""
        return self._limit

    def resize(self, *, limit: Size) -> None:
        """Change the limit; below what is live, nothing is granted until enough is freed.

        Whoever waits for more than the new limit gets `OutOfMemoryError`.
        """
        nbytes = parse_size(limit, what="limit")
        with self.flow.turn:
            self._limit = nbytes
            self._core.set_limit(self._account, nbytes)
            self.flow.refuse_hopeless()
            self.flow.changed()

    def close(self) -> None:
        """End the budget: whoever waits in it gets `PoolClosed`. Buffers still held stay valid, and count in the pool.

        Budgets inside it are closed too. Closing twice is fine.
        """
        flow = self._flow
        if flow is None:
            return
        with flow.turn:
            inside = list(self.inside)
        for budget in inside:
            budget.close()
        with flow.turn:
            error = PoolClosed(self.name, "the budget has been closed")
            for waiting in [one for one in flow.waiters() if self in one.share.lineage()]:
                flow.withdraw(waiting, error)
            self._closed, self._flow = True, None
            flow.budgets.remove(self)
            flow.standing.pop(self, None)
            for share in self.lineage():
                share.inside.pop(self, None)
            del flow.shares[self._account]
            flow.core.set_gate(self._account, False)
            flow.ended_accounts.append(self._account)
            self._attach(None)  # shuts the doors
            flow.close_accounts()
            flow.changed()

    def room(self) -> int:
        """Answer the bytes that may still be let through."""
        return self._limit - self._core.account(self._account).live - self._promised

    def let_through(self, waiting: Waiting) -> bool:
        """Count a request against this budget, if it fits, so that it may wait further up (with the turn held)."""
        if waiting.total > self.room():
            return False
        self._promised += waiting.total
        waiting.promised += (self,)
        return True

    def check(self, waiting: list[Waiting]) -> None:
        """Walk this budget's invariants (with the turn held); raises `AssertionError`."""
        promised = sum(one.total for one in waiting if self in one.promised)
        assert promised == self._promised, f"budget {self.name!r} promised {self._promised}, its waiters {promised}"

    def unpromise(self, nbytes: int) -> None:
        """Stop counting a request that left: granted ones are counted by the core (with the turn held)."""
        self._promised -= nbytes

    def held_up_at(self, waiting: Waiting) -> Share:
        """Answer this budget, unless it has room and so a limit above it is what counts (with the turn held)."""
        if self not in waiting.promised and waiting.total > self.room():
            return self
        return super().held_up_at(waiting)

    def shortage(self, nbytes: int) -> int:
        """Answer how much has to become free here before so many bytes can be had, at least 1."""
        return max(nbytes - self.room(), 1)


def _text(tag: object) -> str:
    if isinstance(tag, str):
        return tag
    raise InvalidRequest("tag", tag, "text or None")


def parse_priority(priority: object) -> int:
    """Read a priority.

    Raises:
        InvalidRequest: It is no integer.
    """
    if isinstance(priority, int) and not isinstance(priority, bool):
        return priority
    raise InvalidRequest("priority", priority, "an integer; larger is sooner")
