"""What a pool opens with: its devices, and its options as the heap and the scheduler take them.

The devices are made on a thread if a task opens it, so that no event loop waits for a driver.

A GPU's context takes half a second to make. A task that opens a pool by `await` sleeps meanwhile; synchronous code that
opens it blocks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from asyncmem.devices import Device, device, select_device_for
from asyncmem.errors import InvalidRequest, NoDeviceHasRoom
from asyncmem.facts import Shortfall
from asyncmem.pool.appended import JournalFile
from asyncmem.pool.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.core import Batch, HeapOptions, Ready, Request
    from asyncmem.options import PoolOptions
    from asyncmem.pool.ports import Opened

_QUICK: Final = {"host", "simulated"}
"""The kinds of devices that are made without a driver."""

_APART: Final = 32
"""Pages that streams may have free beside each other in the smallest pool, as a segment holds them."""


class PoolDevices:
    """The device of an opened pool, the peers that may use its memory, and the file of its journal."""

    def __init__(self, spec: Device | str, options: PoolOptions, pool: str) -> None:
        """Find or make the devices of the pool of that name (blocks, where a driver is asked).

        Raises:
            InvalidRequest: There is no such device, or it has no such segments or peers; nothing is left of the try.
            NoDeviceHasRoom: None has what `need` says, or not the one that was named.
            BackendUnavailable: One of them cannot be used here.
            DeviceError: Its driver fails.
        """
        # Here, so that no task waits for it at its first view, nor for memory that the worker makes behind it.
        import_module("numpy")
        self._made: list[Device] = []  # by us, so closed by us
        self.journal: JournalFile | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            chosen = select_device_for(options.need, options=options) if spec == "auto" and options.need else spec
            self.device = self._find(chosen)
            _check_segments(self.device, options.segments)
            if isinstance(options.limit, int):
                self.device.suggest_capacity(options.limit)
            if options.need:
                _check_room(self.device, options)
            if options.peers:
                peers = dict.fromkeys(cast("tuple[Device | str, ...]", options.peers))
                self.device.grant_access([self._find(peer) for peer in peers])
            if options.journal is not None:
                self.journal = JournalFile(options.journal, pool, self.device.name)
            undo.pop_all()

    def close(self) -> None:
        """Close the devices that were made here (blocks); those that were given are their owner's."""
        if self.journal is not None:
            self.journal.end()
        while self._made:
            self._made[-1].close()  # is tried again where it fails
            self._made.pop()

    def close_with_pool(self) -> None:
        """Close the device, too: the pool alone has it."""
        self._made.append(self.device)

    def close_by_thread(self) -> None:
        """Close them on a thread of its own, as they came to nothing: the caller may be an event loop's."""
        threading.Thread(target=self.close, name="asyncmem closes a device", daemon=True).start()

    def _find(self, spec: Device | str) -> Device:
        found = device(spec)
        if found is not spec:
            self._made.append(found)
        return found


def _check_room(device: Device, options: PoolOptions) -> None:
    memory = device.memory()
    room = options.room(device.kind, free=memory.free, total=device.capacity)
    if room < options.need:
        raise NoDeviceHasRoom(options.need, [Shortfall(device=device.name, room=room, lacking=options.need - room)])


def _check_segments(device: Device, kind: str) -> None:
    known = dict.fromkeys(("auto", "direct", *device.segment_kinds, *(("paged",) if device.page else ())))
    if kind not in known:
        raise InvalidRequest("segments", kind, f"one of {', '.join(map(repr, known))} on this device")
    if kind == "paged" and device.checker is not None:
        raise InvalidRequest(
            "segments", kind, "another kind while a memory checker is at work, which knows whole segments only"
        )


def may_block(spec: Device | str, options: PoolOptions) -> bool:
    """Return whether making the devices may call a driver, make a file, or import numpy."""
    if options.need or options.journal is not None or "numpy" not in sys.modules:
        return True  # of a need, how much is free is asked
    asked = spec if isinstance(spec, str) else spec.kind if options.peers else "host"
    named = (asked, *(peer for peer in options.peers if isinstance(peer, str)))
    return any(one.partition(":")[0] not in _QUICK for one in named)


def prepare(opened: Opened, ready: Latch[object]) -> None:
    """Get the memory of `pregrow`, `need` and `warmup`: the worker's first job. It sets the latch."""
    grown = Latch(opened.executor.grow_ahead)
    warming: Ready[Batch] | Request[Batch] | None = None
    try:
        grown()
        sizes = [size for size, count in opened.options.warmup for _ in range(count)]
        if sizes and opened.closed is None:
            warming = opened.pool.allocate_batch(sizes)
    finally:
        ready.call = partial(_end_preparing, grown, warming)
        if warming is None:
            ready()
        else:  # not waited for: it is the worker itself that does the growing
            warming.add_done_callback(lambda _: ready())


def _end_preparing(grown: Latch[None], warming: Ready[Batch] | Request[Batch] | None) -> None:
    if warming is not None:
        warming.result().free()
    grown.result()


class Opening(Latch[PoolDevices]):
    """Devices on their way, made by a thread of its own for the tasks that wait for them."""

    def __init__(self, pool: str, make: Callable[[], PoolDevices]) -> None:
        """Start the thread, for the pool of that name, and count a task that waits."""
        super().__init__(make)
        self._users = 2  # the thread, and tasks that wait: what none of them has taken is closed by the last
        self._taken = False
        threading.Thread(target=self._run, name=f"asyncmem {pool} opens", daemon=True).start()

    def join(self) -> bool:
        """Count another task; False where all have left, and what was made is gone."""
        with self._lock:
            self._users += bool(self._users)
            return self._users > 0

    async def devices(self) -> PoolDevices | None:
        """Return what was made, which is the caller's from then on; None for all but the first.

        Raises:
            AsyncmemError: The devices cannot be made.

        Cancelled: nothing is left, unless others wait too.
        """
        try:
            devices = await self.wait()
            with self._lock:
                taken, self._taken = self._taken, True
            return None if taken else devices
        finally:
            self._leave()

    def _run(self) -> None:
        self()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            devices, self._result, self._error = self._result, None, None
        if devices is not None and not self._taken:
            devices.close_by_thread()


_AS_GIVEN: Final = (
    "segment_size", "ready", "late_fences", "overlap", "bypass", "max_waiting", "merge_threshold", "defragment",
    "adaptive", "shrink_after",
)  # fmt: skip
"""The options that the scheduler takes as they are."""


def heap_settings(options: PoolOptions) -> HeapOptions:
    """Return the heap's settings; a pool without pooling caches no blocks."""
    blocks = 0 if options.segments == "direct" else 1
    return {
        "small_limit": max(blocks * options.small_limit, 1),  # direct: every request has a segment of its own
        "strategy": options.strategy,
        "stream_cache_blocks": blocks * options.stream_cache_blocks,
        "stream_cache_bytes": options.stream_cache_bytes,
        "shared_cache_blocks": blocks * options.shared_cache_blocks,
        "shared_cache_bytes": options.shared_cache_bytes,
    }


def kind_of(segments: str, device: Device) -> str:
    """Return how a pool gets memory whose options say `segments`."""
    if segments != "auto":
        return segments
    return "paged" if device.prefers_pages else device.segment_kinds[0]


def scheduler_settings(options: PoolOptions, device: Device, kind: str, limit: int) -> dict[str, Any]:
    """Return the scheduler's settings."""
    return {
        **heap_settings(options),
        **{name: getattr(options, name) for name in _AS_GIVEN},
        "limit": limit,
        "limited": options.limit is not None,
        "paged": kind == "paged",
        "joins": device.joins_segments and kind == "stream_ordered",
        "direct": options.segments == "direct",
        "granularity": device.granularity,
        "page": device.page,
        "overlap_least": _APART * device.page if kind == "paged" else 0,
        "patience": options.patience.seconds,
        "patience_share": options.patience.share,
        "fallback": options.fallback is not None,
    }
