"""`AsyncMemoryPool`: what users hold."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Self, cast, overload

import anyio

from asyncmem import readers
from asyncmem.devices.base import DeviceT_co
from asyncmem.errors import LeakWarning, PoolClosed
from asyncmem.options import PoolOptions
from asyncmem.pool.alarm import alarm
from asyncmem.pool.graph import GraphMemory
from asyncmem.pool.holders import warn_of_leaks
from asyncmem.pool.latch import Latch
from asyncmem.pool.open_pool import OpenPool
from asyncmem.pool.opening import Opening, PoolDevices, may_block, prepare
from asyncmem.pool.share import Share
from asyncmem.pool.snapshot import (
    PressureChanges,
    counters,
    html_summary,
    segment_infos,
    since,
    state_line,
    stats_of,
    summary,
)
from asyncmem.pool.worker import Worker, call_aside
from asyncmem.text import quoted
from asyncmem.units import parse_size, parse_timeout

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Literal, Unpack

    from asyncmem.devices import Cuda, Device, Host, Simulated
    from asyncmem.insight import Profile
    from asyncmem.options import OptionArguments
    from asyncmem.stats import PoolStats, SegmentInfo
    from asyncmem.units import Size

    class PoolArguments(OptionArguments, total=False):
        """What a pool takes besides its device."""

        options: PoolOptions | None


_PINNED_SHARE: Final = 0.25
"""Of the host's memory: what is page-locked is lost to all other programs."""

_numbers = itertools.count(1)
_installing = threading.RLock()  # re-entrant: a signal's handler may close a pool that is being opened


class AsyncMemoryPool(Share, Generic[DeviceT_co]):
    """A pool of device memory that is awaited.

    Making one uses neither the device nor an event loop; entering it, `open`, or the first allocation does. It serves
    one event loop at a time, and every thread for `allocate` and `free`. A closed pool stays closed; live buffers stay
    valid until they are freed.

    Args:
        device: "auto", "host", "simulated", "cuda:0", ... or a device object, which the caller owns and closes.
        options: Options; the other arguments change them.
        **arguments: The fields of `PoolOptions`; each beats its environment variable.

    Raises:
        InvalidRequest: An option is unknown, or its value cannot be right.
    """

    _worker_factory = Worker
    _fallback_of: weakref.ref[AsyncMemoryPool] | None = None
    """The pool that this one stands in for, on the host; None for most."""

    @overload
    def __init__(
        self: AsyncMemoryPool[Host], device: Literal["host", "cpu"], /, **arguments: Unpack[PoolArguments]
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncMemoryPool[Simulated], device: Literal["simulated"], /, **arguments: Unpack[PoolArguments]
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncMemoryPool[Cuda], device: Literal["cuda", "cuda:0", "cuda:1"], /, **arguments: Unpack[PoolArguments]
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncMemoryPool[Device], device: str = "auto", /, **arguments: Unpack[PoolArguments]
    ) -> None: ...
    @overload
    def __init__(self, device: DeviceT_co, /, **arguments: Unpack[PoolArguments]) -> None: ...
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
        self._making = threading.Lock()
        self._opening: Opening | None = None
        self._counted: dict[str, float] = {}  # the counters at the last reset
        self._closes_device = False  # whether the pool alone has the device that it was given
        self._host_pools: dict[str, AsyncMemoryPool] = {}  # each made at the first need, and closed with this one
        self._making_host_pool = threading.Lock()

    def __repr__(self) -> str:
        if self._state is None:
            return f"<asyncmem.AsyncMemoryPool {quoted(self.name)}: {'closed' if self._closed else 'not open'}>"
        return f"<asyncmem.AsyncMemoryPool {state_line(self._state, closed=self._closed)}>"

    def _repr_html_(self) -> str:
        import html

        if self._state is None:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return html_summary(self.stats(), self._state.budget_stats())

    # -- life ------------------------------------------------------------------------------------------------------

    def _own_limit(self) -> int:
        """Return the limit in bytes."""
        return self._opened.limit

    @property
    def _opened(self) -> OpenPool:
        """The open pool; opens it."""
        return self._state or self._open()

    def _open(self) -> OpenPool:
        with self._making:
            if self._state is None:
                self._install(self._find_devices())
        if self._state is None:
            raise PoolClosed(self.name)
        return self._state

    async def _open_by_thread(self) -> None:
        opening = self._opening
        if opening is None or not opening.join():
            opening = self._opening = Opening(self.name, self._find_devices)
        devices = await opening.devices()
        if devices is not None:
            self._install(devices)

    def _need_open(self) -> OpenPool:
        opened = self._opened
        opened.need_open()
        if self._closed:
            raise PoolClosed(self.name)
        return opened

    def _find_devices(self) -> PoolDevices:
        if self._closed:
            raise PoolClosed(self.name)
        return PoolDevices(self._spec, self._options, self.name)

    def _install(self, devices: PoolDevices) -> None:
        # Nothing here blocks. Another thread may have been faster, and another task may have closed the pool.
        with contextlib.ExitStack() as undo, _installing:
            undo.callback(devices.close_by_thread)
            if self._state is None and not self._closed:
                self._state = opened = OpenPool(self, devices, self._options, self._worker_factory)
                # A finalizer keeps its arguments: the collector would destroy the streams before `__del__` uses them.
                weakref.finalize(self, lambda _streams: None, opened.core.stream_objects).atexit = False
                undo.pop_all()
                if self._closes_device:
                    devices.close_with_pool()
                self._attach(opened.core, 0, -1)
                self._ready = Latch()
                opened.worker.submit(partial(prepare, opened, self._ready))

    async def open(self, *, wait: bool = False) -> None:
        """Open the device and start the worker; do nothing if the pool is open.

        A thread opens a GPU, so the loop keeps running. Synchronous code, and the first use of a pool that is not open,
        opens it on the caller's thread, which **blocks** for as long as the driver takes: half a second the first time
        in a process.

        Args:
            wait: Also wait for the memory of `pregrow`, `need` and `warmup`.

        Raises:
            PoolClosed: The pool was closed; make another.
            BackendUnavailable: The device cannot be used here.
            NoDeviceHasRoom: No device has the memory of the option `need`.

        Cancelled: the pool is as it was, not open, unless another task opens it too.
        """
        if self._state is None and not self._closed and may_block(self._spec, self._options):
            await self._open_by_thread()
        self._need_open()
        if wait:
            await self.wait()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait for the memory of `pregrow`, `need` and `warmup`, at most `timeout` seconds.

        Raises:
            TimeoutError: It is not there yet. The pool continues.
            OutOfMemoryError: There is no such memory.
            PoolClosed: The pool was closed before.
        """
        longest = parse_timeout(timeout)
        if self._state is None:
            await self.open()
        assert self._ready is not None
        if not self._ready.done and self._opened.core.forked:  # whose worker is the parent's
            self._need_open()
        await self._ready.wait(longest)
        if not self._ready.done:
            raise TimeoutError(f"pool {quoted(self.name)} was not ready within {timeout} s")

    async def aclose(self, timeout: float | str | None = 5.0, *, drain: bool = False) -> None:
        """Close the pool: waiting requests get `PoolClosed` first, then the worker ends, then free memory goes back.

        Live buffers stay valid, and are named in a `LeakWarning`; their memory goes back as they are freed. Closing
        twice is not an error.

        Args:
            timeout: The most seconds for this, and for the drain; None for any.
            drain: First serve waiting requests and wait until all buffers are freed; refuse new requests meanwhile.

        Raises:
            DeviceError: Memory could not go back; closing again tries again.
            InvalidRequest: The timeout is no time; the pool is as it was.

        Cancelled: the pool is closed nevertheless; the worker finishes its jobs by itself.
        """
        longest = parse_timeout(timeout)
        first, self._closed = not self._closed, True
        try:
            if drain and first and self._state is not None:
                await self._state.drained().wait(longest)
        finally:
            ends = self._finish(first=first)
        with anyio.CancelScope(shield=True):
            async with contextlib.AsyncExitStack() as others:  # they are waited for whatever fails here
                for _, end, _ in ends:
                    others.push_async_callback(end.wait, longest)
        warn_of_leaks(ends)

    def close(self, timeout: float | str | None = 5.0) -> None:
        """Close the pool from synchronous code, as `aclose` does; blocks this thread for at most `timeout` seconds.

        Raises:
            DeviceError: Memory could not go back; closing again tries again.
            InvalidRequest: The timeout is no time; the pool is as it was.
        """
        longest = parse_timeout(timeout)
        first, self._closed = not self._closed, True
        ends = self._finish(first=first)
        with contextlib.ExitStack() as others:
            for _, end, _ in ends:
                others.callback(end.block, longest)
        warn_of_leaks(ends)

    def _finish(self, *, first: bool) -> list[tuple[OpenPool, Latch[object], bool]]:
        # Ends this and the host's pools; returns what to wait for, and whether that was not closed before.
        with self._making_host_pool:
            self._closed = self._ended = True
            ends = [end for pool in self._host_pools.values() for end in pool._finish(first=not pool._closed)]
        with _installing:  # after this, what another thread is opening is there, or never will be
            state = self._state
        if state is not None:
            ends.append((state, state.end(PoolClosed(self.name)), first))
        return ends

    async def __aenter__(self) -> Self:
        """Open the pool."""
        await self.open()
        self._opened.serve_loop_here()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the pool."""
        await self.aclose()

    def __enter__(self) -> Self:
        """Open the pool from synchronous code."""
        self._need_open()
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
        alarm(f"pool {quoted(self.name)} was dropped and never closed", LeakWarning)
        opened.close(PoolClosed(self.name, "it was dropped"))
        opened.run_last(opened.release)

    # -- control ---------------------------------------------------------------------------------------------------

    @property
    def device(self) -> DeviceT_co:
        """The device whose memory this is."""
        return cast("DeviceT_co", self._opened.device)

    @property
    def options(self) -> PoolOptions:
        """The options in force."""
        return self._options

    @property
    def pinned(self) -> AsyncMemoryPool:
        """The pool of page-locked host memory that copies of this device read and write directly; closed with this one.

        It is made at its first use, has the streams of this pool's device, and is limited to a quarter of the host's
        memory; ``pool.pinned.resize(limit=...)`` changes that. On the host it is a pool of ordinary memory.

        Raises:
            PoolClosed: This pool is closed.
            InvalidRequest: The device has no such memory.
        """
        return self._host_pool("pinned")

    @property
    def shared(self) -> AsyncMemoryPool:
        """The pool of memory that other processes can open, by `asyncmem.share`; closed with this one.

        It is made at its first use, and is limited to the option `share_limit`: its memory counts besides this pool's.

        Raises:
            PoolClosed: This pool is closed.
            InvalidRequest: The device has no such memory.
            BackendUnavailable: Something for it is missing on this machine.
        """
        return self._host_pool("shared")

    def _host_pool(self, kind: Literal["pinned", "spilled", "shared", "on the host"]) -> AsyncMemoryPool:
        """Return a pool of other memory, the host's or shared, that is closed with this one; see `pinned`, `shared`."""
        name = f"{self.name} {kind}"
        with self._making_host_pool:
            if self._ended:
                raise PoolClosed(name)
            if kind not in self._host_pools:
                made: AsyncMemoryPool  # what the environment says of segments is meant for the device's own
                if kind == "on the host":
                    made = AsyncMemoryPool("host", name=name, segments="auto")
                    made._fallback_of = weakref.ref(self)
                else:
                    limits = {"pinned": _PINNED_SHARE, "spilled": self._options.spill_limit}
                    limit = limits.get(kind, self._options.share_limit)
                    device = self.device.shareable() if kind == "shared" else self.device.pinned()
                    made = AsyncMemoryPool(device, name=name, limit=limit, segments="auto")
                    made._closes_device = kind == "shared" and device is not self.device
                made._worker_factory = self._worker_factory
                self._host_pools[kind] = made
            return self._host_pools[kind]

    def graph(self, stream: object = None) -> GraphMemory:
        """Keep the memory allocated on captured streams for a graph: ``with pool.graph() as memory:``.

        A captured graph repeats its work on the same addresses. So memory allocated inside the block on a captured
        stream is kept until `release()` of the result, even after a free; memory freed inside serves the same capture
        again. Outside such a block, allocating on a captured stream raises `InvalidRequest`. Buffers that you allocated
        before are not kept: hold those that the captured work uses for as long as you launch it.

        Args:
            stream: Keep the memory of this captured stream only; None for any.

        Raises:
            PoolClosed: The pool is closed.
            InvalidRequest: The stream is another device's.
        """
        self._open_core()  # raises where it is closed
        opened = self._opened
        return GraphMemory(opened, None if stream is None else opened.core.stream_number(stream))

    def configure(self, **changes: Unpack[OptionArguments]) -> None:
        """Change options while the pool is in use.

        Raises:
            InvalidRequest: An option cannot be changed, or the value is invalid; nothing has changed.
            PoolClosed: The pool is closed.
        """
        options = self._options.reconfigured(**changes)
        opened = self._need_open()
        self._options = options
        opened.core.post(partial(opened.reconfigure, options))
        for kind, name in (("spilled", "spill_limit"), ("shared", "share_limit")):
            with self._making_host_pool:
                other = self._host_pools.get(kind)
            if other is not None and name in changes:
                other.resize(limit=getattr(options, name))

    def resize(self, *, limit: Size | float) -> None:
        """Change the limit. If more is reserved, free segments go back now, and others as they become free."""
        self.configure(limit=limit)

    async def warmup(self, sizes: Iterable[tuple[Size, int]]) -> None:
        """Get memory for these (size, count) pairs, so that the first requests for them are hits.

        Raises:
            InvalidRequest: They are not such pairs, or have more than 262,144 buffers in all.
            OutOfMemoryError: Together they exceed the limit.
        """
        wanted = [size for size, count in readers.warmup(sizes, "sizes") for _ in range(count)]
        batch = await self.allocate_batch(wanted)
        batch.free()

    async def trim(self, keep: Size = 0) -> int:
        """Give wholly free segments back to the device, on the worker.

        Args:
            keep: Bytes to leave reserved.

        Returns:
            The bytes given back.

        Raises:
            PoolClosed: The pool is closed; closing it again gives back what could not go back then.
        """
        least = parse_size(keep, what="keep")
        opened = self._need_open()
        freed = await opened.run(lambda: opened.executor.trim(least)).wait()
        assert isinstance(freed, int)
        return freed

    def empty_cache(self) -> None:
        """Give wholly free segments back: at once, or on an event loop's thread soon, by the worker.

        Raises:
            PoolClosed: The pool is closed.
        """
        opened = self._need_open()
        if opened._loop_here() is not None:
            opened.worker.submit(opened.give_back_all)
        else:
            call_aside(partial(opened.executor.trim, 0))

    def reset_stats(self) -> None:
        """Start the counters again from zero, and the peaks from what there is now."""
        self.reset_peaks()
        self._counted = counters(stats_of(self))

    def reset_peaks(self) -> None:
        """Start the peaks again from what there is now."""
        self._opened.core.reset_peaks()

    def check(self) -> None:
        """Check every invariant of the pool.

        Raises:
            AssertionError: One does not hold; the text names it. A bug in asyncmem.
        """
        self._opened.check()

    # -- looking -----------------------------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Return the figures of this moment."""
        return since(stats_of(self), self._counted)

    def summary(self) -> str:
        """Return the figures of this moment as text for one screen."""
        return summary(self.stats())

    def segments(self) -> tuple[SegmentInfo, ...]:
        """Return the segments that the pool has from its device."""
        return segment_infos(self._opened)

    def performance_context(self, *, frames: int = 1) -> Profile:
        """Profile a block, as `asyncmem.profile_memory` of this pool does.

        Args:
            frames: How many frames of the call are kept for each request.
        """
        from asyncmem.insight import profile_memory

        return profile_memory(self, frames=frames)

    def pressure_changes(self) -> PressureChanges:
        """Iterate over the pressure levels as they change: ``async for level in pool.pressure_changes()``."""
        opened = self._opened
        changes = PressureChanges(opened)
        opened.listeners.add(changes)
        return changes


def pool_of(share: Share) -> AsyncMemoryPool:
    """Return the pool that a share is a part of."""
    *_, pool = share._lineage()
    assert isinstance(pool, AsyncMemoryPool)
    return pool
