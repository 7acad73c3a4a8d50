"""`AsyncMemoryPool`: what users hold."""

from __future__ import annotations

import contextlib
import html
import itertools
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Self

import anyio

from asyncmem.errors import LeakWarning, PoolClosed
from asyncmem.options import PoolOptions
from asyncmem.pool.alarm import alarm
from asyncmem.pool.graph import GraphMemory
from asyncmem.pool.host_pools import HostPool, PinnedPool
from asyncmem.pool.latch import Latch
from asyncmem.pool.open_pool import OpenPool
from asyncmem.pool.opening import Ground, Opening, close_aside, may_block
from asyncmem.pool.share import Share
from asyncmem.pool.snapshot import counters, pool_stats, segment_infos, since, summary
from asyncmem.pool.worker import Worker
from asyncmem.units import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Unpack

    from asyncmem.core import Batch, Ready, Request
    from asyncmem.devices import Device
    from asyncmem.insight import Profile
    from asyncmem.options import OptionArguments
    from asyncmem.pool.pressure import PressureChanges
    from asyncmem.stats import PoolStats, SegmentInfo
    from asyncmem.units import Size

_numbers = itertools.count(1)
_moving = threading.Lock()


class AsyncMemoryPool(Share):
    """A pool of device memory that is awaited.

    Making one touches neither the device nor an event loop; entering it, `open`, or the first allocation does. It
    serves one event loop at a time, and every thread for `allocate` and `free`. Once closed it stays closed; buffers
    still held stay valid until they are freed.

    Args:
        device: "auto", "host", "simulated", "cuda:0", ... or a device object, which then stays the caller's to close.
        options: Options made before; the other arguments change them.
        **arguments: The fields of `PoolOptions`; each beats its environment variable.

    Raises:
        InvalidRequest: An option is unknown, or its value cannot be right.
    """

    _worker_factory = Worker
    _fallback_of: weakref.ref[AsyncMemoryPool] | None = None
    """The pool that this one stands in for, on the host; None for most."""

    def __init__(
        self,
        device: str | Device = "auto",
        /,
        *,
        options: PoolOptions | None = None,
        **arguments: Unpack[OptionArguments],
    ) -> None:
        self._options = PoolOptions.from_environment(base=options, **arguments)
        super().__init__(self._options.name or f"pool-{next(_numbers)}")
        self._spec = device
        self._state: OpenPool | None = None
        self._closed = False
        self._ready: Latch[object] | None = None  # all is there that the options ask for
        self._grown: Latch[object]
        self._warming: Ready[Batch] | Request[Batch] | None = None
        self._making = threading.Lock()
        self._opening: Opening | None = None
        self.fallback = HostPool(f"{self.name} on the host")
        self._pinned = PinnedPool(f"{self.name} pinned")
        self.spilled = PinnedPool(f"{self.name} spilled", self._options.spill_limit)

    def __repr__(self) -> str:
        opened = self._state
        if opened is None:
            return f"<asyncmem.AsyncMemoryPool {self.name!r}: {'closed' if self._closed else 'not open'}>"
        core = opened.core
        state = "closed, " if self._closed else ""
        return (
            f"<asyncmem.AsyncMemoryPool {self.name!r} on {opened.device.name}: {state}"
            f"{format_size(core.live())} live, {format_size(core.reserved())} reserved, "
            f"limit {format_size(opened.limit)}, {core.scheduler.gauges()['waiting']} waiting>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self) if self._state is None else self.summary())}</pre>"

    # -- life ------------------------------------------------------------------------------------------------------

    def own_limit(self) -> int:
        """Return the limit in bytes."""
        return self._opened.limit

    @property
    def _opened(self) -> OpenPool:
        """The open pool; opens it."""
        return self._state or self._open()

    def _open(self) -> OpenPool:
        with self._making:
            if self._state is None:
                self._move_in(self._make_ground(), Ground.close)
        if self._state is None:
            raise PoolClosed(self.name)
        return self._state

    async def _open_aside(self) -> None:
        if self._opening is None:
            self._opening = Opening(self.name, self._make_ground)
        opening = self._opening
        try:
            await opening.wait()
        finally:
            if self._opening is opening and opening.over:
                self._opening = None
        ground = opening.take()
        if ground is not None:
            self._move_in(ground, close_aside)

    def _make_ground(self) -> Ground:
        if self._closed:
            raise PoolClosed(self.name)
        return Ground(self._spec, self._options)

    def _move_in(self, ground: Ground, otherwise: Callable[[Ground], object]) -> None:
        # Nothing here blocks. Another thread may have been faster, and another task may have closed the pool.
        with contextlib.ExitStack() as undo, _moving:
            undo.callback(otherwise, ground)
            if self._state is None and not self._closed:
                self._state = opened = OpenPool(self, ground, self._options, self._worker_factory)
                undo.pop_all()
                self._attach(opened.core, 0, -1)
                self._ready = Latch(self._warmed_up)
                opened.worker.submit(self._prepare)

    def _prepare(self) -> None:
        # The worker's first job. For what is to be warm it only asks: were it to wait, nobody would provide.
        ready, opened = self._ready, self._opened
        assert ready is not None
        self._grown = Latch(self._pregrow)
        self._grown()
        sizes = [size for size, count in self._options.warmup for _ in range(count)]
        if sizes and opened.closed is None:
            warming = self.allocate_batch(sizes)
            self._warming = warming
            warming.add_done_callback(lambda _: ready())
            return
        ready()

    def _pregrow(self) -> None:
        opened = self._opened
        core = opened.core
        before = -1
        while opened.closed is None and before != core.reserved():
            before = core.reserved()
            opened.executor.grow_ahead()

    def _warmed_up(self) -> None:
        warming, self._warming = self._warming, None
        if warming is not None:
            warming.result().free()
        self._grown.result()

    async def open(self, *, wait: bool = False) -> None:
        """Make the device and start the worker; nothing where that has been done.

        A GPU is made on a thread, so the loop goes on. In synchronous code, and where a pool is used that nobody has
        opened, it is made on the caller's thread, which **blocks** for as long as its driver takes: half a second the
        first time in a process.

        Args:
            wait: Also wait until what `pregrow`, `need` and `warmup` ask for is there.

        Raises:
            PoolClosed: It has been closed: make another.
            BackendUnavailable: The device cannot be used here.
            NoDeviceHasRoom: No device has what the option `need` says.

        Cancelled: the pool is as it was, not open, unless another task opens it too.
        """
        if self._state is None and not self._closed and may_block(self._spec, self._options):
            await self._open_aside()
        _ = self._opened
        if self._closed:
            raise PoolClosed(self.name)
        if wait:
            await self.wait()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until what `pregrow`, `need` and `warmup` ask for is there, at most `timeout` seconds.

        Raises:
            TimeoutError: It is not there yet. It goes on.
            OutOfMemoryError: It cannot be had.
        """
        if self._state is None:
            await self.open()
        assert self._ready is not None
        await self._ready.wait(timeout)
        if not self._ready.done:
            raise TimeoutError(f"pool {self.name!r} was not ready within {timeout} s")

    async def aclose(self, timeout: float = 5.0, *, drain: bool = False) -> None:
        """Close the pool: whoever waits gets `PoolClosed` first, then the worker ends, then free memory goes back.

        Buffers that are still held stay valid, and are named in a `LeakWarning`; their memory goes back as they are
        freed. Closing twice is fine.

        Args:
            timeout: The most seconds that this may take, and that is waited for a drain.
            drain: First wait until all buffers have been freed. Meanwhile nothing new is granted to newcomers.

        Raises:
            DeviceError: Memory could not go back; closing again tries again.

        Cancelled: the pool is closed all the same; what the worker had under way it finishes by itself.
        """
        opened, first = self._state, not self._closed
        self._closed = True
        if opened is None or (opened.released and not first):
            return
        try:
            if drain and first:
                await opened.drained().wait(timeout)
        finally:
            last = self._finish(opened)
        with anyio.CancelScope(shield=True):
            async with contextlib.AsyncExitStack() as others:  # they are closed whatever fails here
                for beside in (self.spilled, self._pinned, self.fallback):
                    others.push_async_callback(beside.aclose, timeout)
                await last.wait(timeout)
        if first:
            self._end(opened, last)

    def close(self, timeout: float = 5.0) -> None:
        """Close the pool from synchronous code, as `aclose` does; blocks this thread for at most `timeout` seconds.

        Raises:
            DeviceError: Memory could not go back; closing again tries again.
        """
        opened, first = self._state, not self._closed
        self._closed = True
        if opened is None or (opened.released and not first):
            return
        last = self._finish(opened)
        with contextlib.ExitStack() as others:
            for beside in (self.spilled, self._pinned, self.fallback):
                others.callback(beside.close, timeout)
            last.block(timeout)
        if first:
            self._end(opened, last)

    def _finish(self, opened: OpenPool) -> Latch[object]:
        opened.close(PoolClosed(self.name))
        return opened.run(opened.release)

    def _end(self, opened: OpenPool, last: Latch[object]) -> None:
        if not last.done:
            text = "its worker is still in a call of the device; it ends after that"
            alarm(f"pool {self.name!r}: {text}", RuntimeWarning)
        opened.warn_of_leaks()

    async def __aenter__(self) -> Self:
        """Open the pool."""
        await self.open()
        self._opened.meet()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the pool."""
        await self.aclose()

    def __enter__(self) -> Self:
        """Open the pool from synchronous code."""
        _ = self._opened
        if self._closed:
            raise PoolClosed(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def __del__(self) -> None:
        opened = getattr(self, "_state", None)
        # As the interpreter ends, a thread that were started would never come to run, and the process gives all back.
        if opened is None or self._closed or opened.core.forked or sys.is_finalizing():
            return
        self._closed = True
        alarm(f"pool {self.name!r} was dropped and never closed", LeakWarning)
        opened.close(PoolClosed(self.name, "it was dropped"))
        opened.run_last(opened.release)

    # -- control ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> Device:
        """The device whose memory this is."""
        return self._opened.device

    @property
    def options(self) -> PoolOptions:
        """The options in force."""
        return self._options

    @property
    def pinned(self) -> AsyncMemoryPool:
        """The pool of page-locked host memory that copies of this device read and write directly; closed with this one.

        It is made when it is first asked for, has the streams of this pool's device, and may take a quarter of the
        host's memory: ``pool.pinned.resize(limit=...)`` changes that. On the host it is a pool of ordinary memory.

        Raises:
            PoolClosed: This pool is closed.
            InvalidRequest: The device has no such memory.
        """
        return self._pinned.of(self)

    def graph(self, stream: object = None) -> GraphMemory:
        """Take in what is allocated on streams while they are captured: ``with pool.graph() as memory:``.

        A captured graph repeats its work on the same addresses, so memory that is allocated inside the block on a
        captured stream stays with the answer until its `release()`, also when it is freed; freed inside, it serves the
        capture again. Outside of such a block, allocating on a captured stream raises `InvalidRequest`. Buffers of
        before are no business of the graph's: keep those that the captured work uses for as long as it is launched.

        Args:
            stream: The only captured stream whose memory is meant; None for any.

        Raises:
            PoolClosed: The pool is closed.
            InvalidRequest: The stream is another device's.
        """
        opened = self._opened
        if opened.refusing is not None:
            raise opened.refusing
        return GraphMemory(opened, None if stream is None else opened.stream_index(stream))

    def configure(self, **changes: Unpack[OptionArguments]) -> None:
        """Change options while the pool is in use.

        Raises:
            InvalidRequest: One of them cannot be changed, or not to that; nothing has changed then.
        """
        self._options = options = self._options.reconfigured(**changes)
        self._opened.reconfigure(options)
        if "spill_limit" in changes:
            self.spilled.resize(options.spill_limit)

    def resize(self, *, limit: Size | float) -> None:
        """Change the limit. Below what is reserved, free segments go back first, and others as they become free."""
        self.configure(limit=limit)

    async def warmup(self, sizes: Iterable[tuple[Size, int]]) -> None:
        """Have memory for these (size, count) pairs ready, so that the first requests for them are hits.

        Raises:
            OutOfMemoryError: All of it together is more than the pool may have.
        """
        wanted = [parse_size(size) for size, count in sizes for _ in range(count)]
        batch = await self.allocate_batch(wanted)
        batch.free()

    async def trim(self, keep: Size = 0) -> int:
        """Give wholly free segments back to the device, on the worker.

        Args:
            keep: Bytes to leave reserved.

        Returns:
            The bytes given back.
        """
        least = parse_size(keep, what="keep")
        opened = self._opened
        freed = await opened.run(lambda: opened.executor.trim(least)).wait()
        assert isinstance(freed, int)
        return freed

    def empty_cache(self) -> None:
        """Give wholly free segments back: at once, or on an event loop's thread soon, by the worker."""
        opened = self._opened
        if opened.on_loop():
            opened.worker.submit(opened.give_up)
        else:
            opened.executor.trim(0)

    def reset_stats(self) -> None:
        """Start the counters again from zero, and the peaks from what there is now."""
        self.reset_peaks()
        self._opened.counted = counters(pool_stats(self))

    def reset_peaks(self) -> None:
        """Start the peaks again from what there is now."""
        self._opened.core.reset_peaks()

    def check(self) -> None:
        """Walk every invariant of the pool.

        Raises:
            AssertionError: One does not hold; the text names it. A bug in asyncmem.
        """
        self._opened.check()

    # -- looking -----------------------------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Return the figures of this moment."""
        return since(pool_stats(self), self._opened.counted)

    def summary(self) -> str:
        """Return the figures of this moment as text for one screen."""
        return summary(self.stats())

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Return the segments that the pool has from its device."""
        return segment_infos(self._opened)

    def performance_context(self, *, frames: int = 1) -> Profile:
        """Look at what a block does with the memory, as `asyncmem.profile_memory` of this pool does.

        Args:
            frames: How many lines of the call are kept of each request.
        """
        from asyncmem.insight import profile_memory

        return profile_memory(self, frames=frames)

    def pressure_changes(self) -> PressureChanges:
        """Iterate over the pressure levels as they change: ``async for level in pool.pressure_changes()``."""
        return self._opened.pressure.changes()
