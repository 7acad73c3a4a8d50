"""What pool, budgets and leases have in common; budgets, and leases."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar, Unpack, cast

from asyncmem.arrays import ALIGN, Array, ArrayBatch, Layout, extent
from asyncmem.errors import BufferReleased, InvalidRequest, PoolClosed
from asyncmem.figures import format_size
from asyncmem.lazy import np
from asyncmem.pool.graph import graph_of
from asyncmem.pool.owners import named_owner
from asyncmem.pool.ports import AnyShare
from asyncmem.pool.snapshot import stats_of, waiter_infos
from asyncmem.synonyms import POOL, Elsewhere
from asyncmem.text import quoted
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from contextlib import ExitStack

    from numpy.typing import NDArray

    from asyncmem.core import Buffer
    from asyncmem.interop.cuda_core import ShareMemoryResource
    from asyncmem.pool.placement import ReusePlan
    from asyncmem.pool.planned import PlannedMemory
    from asyncmem.pool.ports import Opened
    from asyncmem.pool.spillable import Spillable
    from asyncmem.stats import PoolStats, WaiterInfo
    from asyncmem.units import Size


A = TypeVar("A", bound=Array | ArrayBatch)


class ArrayRequest(Coroutine[Any, Any, A], Generic[A]):
    """An array under way: await it, or use it with ``async with``, which frees it at the end.

    It begins when it is awaited. It is a coroutine to `asyncio.create_task`, `gather` and task groups.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, A]) -> None:
        self._coroutine = coroutine
        self._array: A | None = None

    def __await__(self) -> Generator[Any, Any, A]:
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:  # noqa: ANN401  # the protocol's
        """Go on."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401  # the protocol's
        """Go on with an error."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Give up."""
        self._coroutine.close()

    async def __aenter__(self) -> A:
        """Wait for the array, and hold it until the block ends; the current task counts as its owner."""
        array = self._array = await self._coroutine
        array.__enter__()
        return array

    async def __aexit__(self, *_: object) -> None:
        """Free it."""
        assert self._array is not None
        self._array.__exit__(None, None, None)


class RequestTerms(TypedDict, total=False):
    """The arguments of every request besides its size; see `allocate_async`."""

    stream: object
    tag: str | None
    priority: int
    timeout: float | str | None


class Share(AnyShare):
    """A pool or a part of one. Not made by users; see `AsyncMemoryPool`, `Budget` and `Lease`."""

    def __dir__(self) -> Iterable[str]:
        return (name for name in super().__dir__() if name not in POOL)

    def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", **terms: Unpack[RequestTerms]
    ) -> ArrayRequest[Array]:
        """Allocate a typed array over a buffer of its own; its contents are undefined.

        ``x = await pool.empty(shape)`` or ``async with pool.empty(shape) as x``, which frees it at the end.

        Args:
            shape: Length of each dimension.
            dtype: Anything numpy takes, or "bfloat16" and a short float such as "float8_e4m3fn".
            **terms: `stream`, `tag`, `priority` and `timeout`, as in `allocate_async`.
        """
        return ArrayRequest(self._make_array(*extent(shape, dtype), dtype, terms))

    def zeros(
        self, shape: int | Sequence[int], dtype: object = "float32", **terms: Unpack[RequestTerms]
    ) -> ArrayRequest[Array]:
        """Allocate as `empty` does and set all bytes to zero, in the order of the stream."""
        return ArrayRequest(self._make_array(*extent(shape, dtype), dtype, terms, zeros=True))

    def ones(
        self, shape: int | Sequence[int], dtype: object = "float32", **terms: Unpack[RequestTerms]
    ) -> ArrayRequest[Array]:
        """Allocate as `full` does, of ones."""
        return self.full(shape, 1, dtype, **terms)

    def full(
        self, shape: int | Sequence[int], value: object, dtype: object = "float32", **terms: Unpack[RequestTerms]
    ) -> ArrayRequest[Array]:
        """Allocate as `empty` does and copy `value` from the host to every element, in the order of the stream.

        Raises:
            InvalidRequest: The dtype is one that numpy has not, or has not this value.
        """
        dims, _ = extent(shape, dtype)
        try:
            each = np.full(np.shape(cast("Any", value)), cast("Any", value), cast("Any", dtype))
            source = np.broadcast_to(each, dims)  # which takes no memory before the pool has some
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest("value", value, f"a value of numpy's dtype {dtype!s}") from error
        return ArrayRequest(self._make_array(source.shape, source.nbytes, dtype, terms, source=source))

    async def _make_array(
        self, dims: tuple[int, ...], nbytes: int, dtype: object, terms: RequestTerms,
        *, zeros: bool = False, source: NDArray[Any] | None = None,
    ) -> Array:  # fmt: skip
        buffer = await self.allocate_async(nbytes, **terms)
        array = buffer.view(dtype, dims)
        if zeros and nbytes:
            buffer.device.fill(buffer.address, nbytes, 0, buffer.stream)
        if source is not None and nbytes:
            await array.copy_from(source.copy())
        return array

    def empty_batch(
        self, specs: Iterable[object], dtype: object = "float32", *, align: Size = ALIGN, **terms: Unpack[RequestTerms]
    ) -> ArrayRequest[ArrayBatch]:
        """Allocate many typed arrays over one buffer, all or nothing; their contents are undefined.

        They lie one after the other, in the order of `specs`, so an operation over all of them reads one range.

        Args:
            specs: For each array a shape, a pair of shape and dtype, or an object with a `shape` and a `dtype`: an
                array of numpy or asyncmem, a tensor of torch.
            dtype: The elements of arrays given by shape alone, as in `empty`.
            align: Each array begins at a multiple of `align` bytes, a power of two up to 512.
            **terms: `stream`, `tag`, `priority` and `timeout`, as in `allocate_async`.

        Raises:
            InvalidRequest: One of the arguments cannot be right.

        Cancelled: nothing was allocated.
        """
        return ArrayRequest(self._make_batch(Layout.of(specs, dtype=dtype, align=align), terms))

    async def _make_batch(self, layout: Layout, terms: RequestTerms) -> ArrayBatch:
        buffer = await self.allocate_async(layout.nbytes, **terms)
        layout.clear_gaps(buffer)
        return layout.over(buffer)

    def allocate_arrays(
        self, specs: Iterable[object], dtype: object = "float32", *, align: Size = ALIGN, **terms: Unpack[RequestTerms]
    ) -> ArrayBatch:
        """Allocate as `empty_batch` does, from code that cannot await: now, or blocking this thread until `timeout`."""
        layout = Layout.of(specs, dtype=dtype, align=align)
        buffer = self.allocate(layout.nbytes, **terms)
        layout.clear_gaps(buffer)
        return layout.over(buffer)

    def lease(self, size: Size, **terms: Unpack[RequestTerms]) -> Lease:
        """Reserve one contiguous range, in which allocations never wait: ``async with pool.lease("1 GiB") as it``.

        The arguments are those of `allocate_async`; waiting for the range starts when the block is entered.
        """
        return Lease(self, size, **terms)

    def apply_plan(self, plan: ReusePlan, *, strict: bool = False, **terms: Unpack[RequestTerms]) -> PlannedMemory:
        """Place the buffers of a program's steps in one range, by a plan: ``async with pool.apply_plan(plan) as it``.

        Waiting for the range, of ``plan.peak`` bytes, starts when the block is entered.

        Args:
            plan: The places of the buffers of a step, from `LifetimeAnalyzer.compute_reuse_plan`.
            strict: Whether a request that the plan does not have raises, instead of being served by the pool.
            **terms: `stream`, `tag`, `priority` and `timeout` of the request for the range, as in `allocate_async`.

        Raises:
            InvalidRequest: It is not a plan, or an empty one.
        """
        from asyncmem.pool.planned import PlannedMemory

        return PlannedMemory(self, plan, strict=strict, **terms)

    def budget(self, name: str, *, limit: Size) -> Budget:
        """Make a share with a limit, a queue and statistics of its own, within the limit of this one.

        Raises:
            InvalidRequest: The limit is not a size above zero, or the name is not text.
            PoolClosed: The pool is closed.
        """
        nbytes = parse_size(limit, what="limit")
        if nbytes == 0:
            raise InvalidRequest("limit", limit, "more than 0 bytes")
        if not isinstance(name, str):
            raise InvalidRequest("name", name, "text")
        return Budget(self, name, nbytes)

    def spillable(self, buffer: Buffer) -> Spillable:
        """Let a buffer move to page-locked host memory while other requests need the device's.

        Use the memory through the returned handle only: ``async with held as buffer`` moves it back to the device if it
        was spilled, and keeps it there until the block ends. The buffer that you pass is dead. At most `spill_limit`
        bytes of the host are used for this.

        It moves when a request waits for the budget or lease that it is charged to, or for the pool.

        Raises:
            InvalidRequest: It is of another pool, is pinned or exported, belongs to a plan or a captured graph, or its
                home stream is a raw handle.
            BufferReleased: It has been freed.
        """
        from asyncmem.pool.spillable import Spillable

        return Spillable(self._opened.spilling, buffer)

    def as_memory_resource(self, *, tag: str = "cuda.core", timeout: float | str | None = None) -> ShareMemoryResource:
        """Return what has cuda.core allocate from here, as in ``device.memory_resource = pool.as_memory_resource()``.

        Args:
            tag: A name under which statistics and errors count it.
            timeout: Seconds to block a thread that allocates for at most; None does not wait.

        Raises:
            InvalidRequest: It is no memory of a CUDA device.
        """
        from asyncmem.interop.cuda_core import ShareMemoryResource

        return ShareMemoryResource(self, tag=tag, timeout=timeout)

    @contextmanager
    def owner(self, name: str) -> Iterator[None]:
        """Name the owner of what is allocated inside the block: it holds these buffers until they are freed.

        Tables and errors show the name; the detector of deadlocks counts these buffers as held. Tasks that are made
        inside inherit the name, and each is an owner of its own.
        """
        if not isinstance(name, str):
            raise InvalidRequest("name", name, "text")
        token = named_owner.set(name)
        opened = self._opened
        opened.owner_blocks.append(None)  # while there is one, every allocation looks for its owner's name
        opened.core.label(name)
        opened.observe()
        try:
            yield
        finally:
            opened.owner_blocks.pop()
            opened.observe()
            with suppress(ValueError):  # its task was collected, by another
                named_owner.reset(token)

    def __exit__(self, *_: object) -> None:
        """End a budget or a lease; buffers still held stay valid."""
        self._end()

    async def __aexit__(self, *_: object) -> None:
        """End a budget or a lease; buffers still held stay valid."""
        self._end()

    def stats(self) -> PoolStats:
        """Return the figures of this moment."""
        return stats_of(self)

    def waiters(self) -> tuple[WaiterInfo, ...]:
        """Return the waiting requests in the order of arrival: owner, bytes, age, and what the owner holds."""
        return waiter_infos(self)


for _name, _ours in POOL.items():
    setattr(Share, _name, Elsewhere(_name, _ours))


class Budget(Share):
    """A named share of a pool with its own limit and statistics. Made by `pool.budget(...)`.

    Its requests queue with all others; a request for which the budget has no room does not hold up those outside it.
    """

    def __init__(self, parent: Share, name: str, limit: int, *, waits: bool | None = None) -> None:
        super().__init__(name, parent)
        self._limit = limit
        self._may_wait = parent._may_wait if waits is None else waits
        opened = self._served_by = parent._opened  # kept, because a budget may outlive its lease
        opened.need_open()
        self._begin_budget(parent, self._limit, self._may_wait, opened.options.bypass)
        opened.shares[self._account] = self
        for share in parent._lineage():
            share._inside[self] = None

    def __repr__(self) -> str:
        return f"<asyncmem.Budget {quoted(self.name)} of {self._limit} bytes{', closed' if self._ended else ''}>"

    @property
    def _level(self) -> str:
        """What errors call it."""
        return f"budget {quoted(self.name)}"

    @property
    def _opened(self) -> Opened:
        if self._ended:
            raise PoolClosed(self.name, "the budget has been closed")
        return super()._opened

    def _own_limit(self) -> int:
        """Return the budget's limit in bytes."""
        return self._limit

    def __enter__(self) -> Self:
        """Return the budget, which is closed at the end of the block."""
        return self

    async def __aenter__(self) -> Self:
        """Return the budget, which is closed at the end of the block."""
        return self

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
        """End the budget: requests that wait in it get `PoolClosed`. Live buffers stay valid, and belong to the pool.

        Budgets inside it are closed too. Closing twice is fine.
        """
        self._end()


class Lease(Share):
    """A share of a pool: one range of memory, held by the task or thread that entered it. Made by `pool.lease(...)`.

    Inside the block every allocation is served at once from the range, or fails at once with `OutOfMemoryError` when
    it exceeds the largest hole of the range; it waits only while `spillable` memory of the lease moves for it. Freed
    bytes return to the lease. At the end of the block its free bytes return to the pool, budgets inside are closed, and
    buffers still held become ordinary buffers of the pool.
    """

    _may_wait = False
    _is_lease = True
    _parent: AnyShare

    def __init__(
        self, parent: Share, size: Size, *, stream: object = None, tag: str | None = None, priority: int = 0,
        timeout: float | str | None = None,
    ) -> None:  # fmt: skip
        self._size = parse_size(size)
        if self._size == 0:
            raise InvalidRequest("size", size, "more than 0 bytes")
        super().__init__(f"{parent.name}/lease", parent)
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
        return self._enter(await self._parent.allocate_async(self._size, **self._terms))

    def __enter__(self) -> Self:
        """Take the range at once, from any thread; see `allocate` for what its timeout may be."""
        self._need_new()
        return self._enter(self._parent.allocate(self._size, **self._terms))

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
        self._begin_lease(found, self._parent, opened.options.bypass)
        opened.shares[self._account] = self
        return self


def fail_first(share: Share, error: Exception) -> None:
    """Fail the request that has waited longest in a share: a pipeline proves deadlocks of its own."""
    opened = share._opened
    for one in opened.requests_in(share)[:1]:
        opened.core.fail(one["id"], error)


def record_fence(share: Share, stream: object) -> None:
    """Record a fence on a stream now, behind what was freed there so far, and not when the worker next does.

    Raises:
        DeviceError: The device refuses.
    """
    core = share._opened.core
    core.retire.fence(core.stream_number(stream))


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
