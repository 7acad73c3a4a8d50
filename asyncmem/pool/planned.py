"""`PlannedMemory`: one range that holds the buffers of a step where a plan has them lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self, Unpack, final

from asyncmem.arrays import extent
from asyncmem.core import ready
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_size
from asyncmem.pool.graph import is_captured
from asyncmem.pool.handles import Handle
from asyncmem.pool.placement import ReusePlan
from asyncmem.pool.share import Lease
from asyncmem.text import encodable, quoted
from asyncmem.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.arrays import Array
    from asyncmem.core import Buffer, Ready, Request
    from asyncmem.pool.share import RequestTerms, Share
    from asyncmem.units import Size


class PlanUse(NamedTuple):
    """How requests were served since the range was entered."""

    planned: int
    """At the place that the plan has for them."""
    unplanned: int
    """By the pool, because the plan has no such buffer, or no further one in this step."""
    displaced: int
    """By the pool, because a buffer still lay at the place, or the stream could not be ordered behind its last use."""


@final
class PlannedMemory(Handle):
    """One range of a pool, laid out by a plan. Made by `pool.apply_plan(...)`, entered by ``async with`` or ``with``.

    The range is there for as long as the block lasts, so requests that follow the plan never wait. Each `next_step`
    begins the plan anew. A request is told by its `key`, or else by its size: the next of that size in the plan's
    order. What the plan does not have is served by the pool as ever, and counted in `use`.

    Buffers are the pool's own: they are ordered between streams as all others are, so one that takes a place over on
    another stream has that stream wait for the last use; freed whenever and wherever the program likes; and those that
    outlive the block become ordinary buffers. In records the whole range is one allocation.

    Attributes:
        plan: The plan.
    """

    def __init__(self, parent: Share, plan: ReusePlan, *, strict: bool, **terms: Unpack[RequestTerms]) -> None:
        self.plan = plan = _of_something(plan)
        self._parent = parent
        self._strict = strict
        self._lease = Lease(parent, plan.peak, **terms)
        self._lease._laid_out = True
        self._named: dict[str | int, list[int]] = {}  # numbers of places, by their size and by their key
        for index, place in enumerate(plan.places):
            self._named.setdefault(plan.rounded(place.nbytes), []).append(index)
            if place.key is not None:
                self._named.setdefault(place.key, []).append(index)
        self._planned = self._unplanned = self._displaced = 0
        self._begin()

    def __repr__(self) -> str:
        return (
            f"<asyncmem.pool.PlannedMemory: {format_count(len(self.plan.places), 'buffer')} in "
            f"{format_size(self.nbytes)}, {self._planned:,} served as planned, {self._unplanned:,} unplanned, "
            f"{self._displaced:,} displaced>"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self._lease.nbytes

    @property
    def use(self) -> PlanUse:
        """How requests were served so far."""
        return PlanUse(self._planned, self._unplanned, self._displaced)

    def next_step(self) -> None:
        """Begin the plan again. What is still live of the step before stays where it is.

        Raises:
            InvalidRequest: The block has not been entered.
            BufferReleased: It has ended.
        """
        with self._lease._opened.lock:
            self._begin()

    def _begin(self) -> None:
        self._used = bytearray(len(self.plan.places))
        self._passed: dict[str | int, int] = {}  # how many of the places of a name were used

    async def __aenter__(self) -> Self:
        """Wait for the range; the current task counts as its owner until the block ends.

        Cancelled: nothing was taken.
        """
        await self._lease.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give the free parts back at once; buffers still held stay valid."""
        self._lease._end()

    def __enter__(self) -> Self:
        """Take the range at once, from any thread; see `AsyncMemoryPool.allocate` for what its timeout may be."""
        self._lease.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Give the free parts back at once; buffers still held stay valid."""
        self._lease._end()

    def allocate_async(
        self, size: Size | None = None, *, key: str | None = None, stream: object = None, tag: str | None = None,
        priority: int = 0, timeout: float | str | None = None,
    ) -> Ready[Buffer] | Request[Buffer]:  # fmt: skip
        """Allocate as the plan has it; what it does not have, as `AsyncMemoryPool.allocate_async` does.

        Args:
            size: Bytes; the planned size where only `key` is given.
            key: Which of the plan's buffers; the next of that name where it has several. Without one: the next of that
                size.
            stream: Home stream, as in a pool; likewise `tag`. `priority` and `timeout` are for what the pool serves.

        Raises:
            InvalidRequest: Neither size nor key, or a key that the plan does not have and no size; where the plan is
                applied strictly, also whatever the pool would have to serve.
            BufferReleased: The block has ended.
        """
        nbytes, found = self._take(size, key, stream, tag)
        if found is None:
            return self._parent.allocate_async(nbytes, stream=stream, tag=tag, priority=priority, timeout=timeout)
        return ready(self._lease, found)

    def allocate(
        self, size: Size | None = None, *, key: str | None = None, stream: object = None, tag: str | None = None,
        priority: int = 0, timeout: float | str | None = None,
    ) -> Buffer:  # fmt: skip
        """Allocate as `allocate_async` does, now; what the pool must serve may block this thread until `timeout`."""
        nbytes, found = self._take(size, key, stream, tag)
        if found is None:
            found = self._parent.allocate(nbytes, stream=stream, tag=tag, priority=priority, timeout=timeout)
        return found

    async def empty(
        self, shape: int | Sequence[int], dtype: object = "float32", *, key: str | None = None,
        **terms: Unpack[RequestTerms],
    ) -> Array:  # fmt: skip
        """Allocate a typed array, as `AsyncMemoryPool.empty` and `allocate_async` do."""
        dims, nbytes = extent(shape, dtype)
        buffer = await self.allocate_async(nbytes, key=key, **terms)
        return buffer.view(dtype, dims)

    def _take(self, size: Size | None, key: str | None, stream: object, tag: str | None) -> tuple[int, Buffer | None]:
        """Return the size in bytes, and the buffer at its place; None where the pool is to serve it."""
        if isinstance(key, str) and key not in self._named:
            key = encodable(key)  # as a plan has it that comes from a file
        nbytes = self._size_of(key) if size is None else parse_size(size)
        if tag is not None and not isinstance(tag, str):
            raise InvalidRequest("tag", tag, "text or None")
        opened = self._lease._opened
        if nbytes == 0:
            return nbytes, None
        core, lease = opened.core, self._lease
        index = opened.core.stream_number(stream)
        with opened.lock:
            place = self._next(key, nbytes)
            if place is None:
                if self._strict:
                    raise InvalidRequest("size", (key, nbytes), "a buffer that the plan has, and has not had this step")
                self._unplanned += 1
                return nbytes, None
            found = None
            if not is_captured(core.stream_objects[index], named=True):  # what a graph keeps is no place to share
                address = lease.address + self.plan.places[place].offset
                found = core.take_at(address, nbytes, index, lease._account, lease._arena, tag)
            if found is None and self._strict:
                raise InvalidRequest("key", self.plan.places[place], "a place where nothing else lies, as planned")
            self._used[place] = True
            self._planned += found is not None
            self._displaced += found is None
            return nbytes, found

    def _size_of(self, key: str | None) -> int:
        if key is None:
            raise InvalidRequest("size", None, "a size, or the key of a buffer in the plan")
        if key not in self._named:
            some = ", ".join([quoted(one) for one in self._named if isinstance(one, str)][:8]) or "none has one"
            raise InvalidRequest("key", key, f"the key of a buffer in the plan ({some}), or a size")
        index = self._next(key, 0)
        return self.plan.places[self._named[key][-1] if index is None else index].nbytes

    def _next(self, key: str | None, nbytes: int) -> int | None:
        """Return the number of the next place that a request may have in this step."""
        size = self.plan.rounded(nbytes)
        name = size if key is None else key
        numbers, at = self._named.get(name, []), self._passed.get(name, 0)
        while at < len(numbers) and self._used[numbers[at]]:
            at += 1
        self._passed[name] = at
        fits = at < len(numbers) and size <= self.plan.rounded(self.plan.places[numbers[at]].nbytes)
        return numbers[at] if fits else None


def _of_something(plan: object) -> ReusePlan:
    if isinstance(plan, ReusePlan) and plan.peak:
        return plan
    raise InvalidRequest("plan", plan, "a plan of LifetimeAnalyzer.compute_reuse_plan() that places something")
