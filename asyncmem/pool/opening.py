"""The devices of a pool that opens; made on a thread if a task opens it, so that no event loop waits for a driver.

A GPU's context takes half a second to make. A task that opens a pool by `await` sleeps meanwhile; synchronous code that
opens it blocks.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, cast

from asyncmem.devices import Device, device, select_device_for
from asyncmem.errors import InvalidRequest, NoDeviceHasRoom
from asyncmem.facts import Shortfall
from asyncmem.pool.appended import JournalFile
from asyncmem.pool.latch import Latch

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.options import PoolOptions

_QUICK: Final = {"host", "simulated"}
"""The kinds of devices that are made without a driver."""


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

    def close_aside(self) -> None:
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
    known = ("auto", "direct", *device.segment_kinds, *(("paged",) if device.page else ()))
    if kind not in known:
        raise InvalidRequest("segments", kind, f"one of {', '.join(map(repr, known))} on this device")
    if kind == "paged" and device.checker is not None:
        raise InvalidRequest(
            "segments", kind, "another kind while a memory checker is at work, which hears of whole segments"
        )


def may_block(spec: Device | str, options: PoolOptions) -> bool:
    """Say whether the making of a devices may ask a driver, or make a file."""
    if options.need or options.journal is not None:
        return True  # of a need, how much is free is asked
    asked = spec if isinstance(spec, str) else spec.kind if options.peers else "host"
    named = (asked, *(peer for peer in options.peers if isinstance(peer, str)))
    return any(one.partition(":")[0] not in _QUICK for one in named)


class Opening:
    """Devices on their way, made by a thread of its own for the tasks that wait for it."""

    def __init__(self, pool: str, make: Callable[[], PoolDevices]) -> None:
        """Start the thread, for the pool of that name."""
        self._make = make
        self._devices: PoolDevices | None = None
        self._left = False  # no caller waits any more: what was made is closed, at once or as soon as it is there
        self._waiting = 0
        self._lock = threading.Lock()
        self._latch = Latch(self._run)
        threading.Thread(target=self._latch, name=f"asyncmem {pool} opens", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to wait for: it was made, could not be made, or all who waited have left."""
        return self._left or self._latch.done

    async def wait(self) -> PoolDevices | None:
        """Return what was made, which is the caller's from then on; None for all but the first.

        Raises:
            AsyncmemError: The devices cannot be had.

        Cancelled: nothing is left, unless others wait too.
        """
        with self._lock:
            self._waiting += 1
        try:
            await self._latch.wait()
        except BaseException:
            with self._lock:
                self._waiting -= 1
                self._left = not self._waiting
            devices = self._take() if self._left else None
            if devices is not None:
                devices.close_aside()
            raise
        return self._take()

    def _take(self) -> PoolDevices | None:
        with self._lock:
            devices, self._devices = self._devices, None
            return devices

    def _run(self) -> None:
        devices = self._make()
        with self._lock:
            if not self._left:
                self._devices = devices
                return
        devices.close()
