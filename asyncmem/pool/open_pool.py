"""What exists between a pool's opening and the end of its last buffer, put together; and that end."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, TypeVar

from asyncmem.core import Core, Retire
from asyncmem.devices import Stream
from asyncmem.errors import DeviceError, InvalidRequest, LeakWarning, PoolClosed
from asyncmem.figures import format_size
from asyncmem.pool import policy
from asyncmem.pool.alarm import alarm
from asyncmem.pool.copies import Copies
from asyncmem.pool.executor import Executor
from asyncmem.pool.failures import Failures
from asyncmem.pool.graph import Captures
from asyncmem.pool.held import held_by_site
from asyncmem.pool.holders import held_beside, tags_of
from asyncmem.pool.hooks import CoreHooks
from asyncmem.pool.latch import Latch
from asyncmem.pool.pins import Pins
from asyncmem.pool.pressure import PressureListeners
from asyncmem.pool.share import Budget
from asyncmem.pool.spilling import Spilling
from asyncmem.pool.stall import StallWatch
from asyncmem.pool.worker import TICK

if TYPE_CHECKING:
    from typing import Any

    from asyncmem.core import Buffer, Effect
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.opening import Ground
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.ports import WorkerLike

    WorkerFactory = Callable[[str, Callable[[], float | None], Callable[[BaseException], None]], WorkerLike]

T = TypeVar("T")

_SPREAD: Final = 4
"""A range's size by the device's, where memory comes by pages: addresses are spread more than memory."""


class OpenPool(CoreHooks):
    """An opened pool: its device, its core, and all that carries out what the scheduler decides."""

    pool: AsyncMemoryPool

    def __init__(self, pool: AsyncMemoryPool, ground: Ground, options: PoolOptions, factory: WorkerFactory) -> None:
        super().__init__(pool)
        self.options = options
        self._ground = ground
        self.device = device = ground.device
        self.total = device.capacity
        self.min_free = options.spared(device.kind)
        self.core = core = Core(device, self, journal=options.journal is not None, **policy.heap_settings(options))
        self.journal = ground.begin_journal(core, pool.name)
        self.retire = Retire(core, device, late_fences=options.late_fences, fence_every=options.fence_every)
        self.worker = factory(f"asyncmem {pool.name}", _weakly(self.look_after), _weakly(self.break_down))
        self._factory = factory
        self._copier: WorkerLike | None = None
        self.executor = Executor(self)
        if options.segments == "paged":
            page = max(device.page, 1)
            self.executor.reserve(_SPREAD * max(device.capacity, page) // page * page)
        self._emptied_latch: Latch[None] | None = None
        self._releasing: set[int] = set()  # threads that give back what there is, and need not be asked to
        self.captures = Captures(self)
        self.pins = Pins(core)
        self.spilling = Spilling(self)
        self.pressure = PressureListeners(self)
        self.failures = Failures(self)
        self.stall = StallWatch(self)
        self.copies = Copies(self)
        self._ending = threading.RLock()  # re-entrant: a worker that is closed may run what is left at once
        self._due = time.monotonic() + TICK  # when the pool is to be looked after next
        self._beats = False
        self._over_budget = device.over_budget  # what has been heeded
        core.serve(self.executor.perform, **self._settings())
        core.can_capture = type(device.default_stream).capturing is not Stream.capturing
        core.default_timeout = options.timeout
        _opened[id(self)] = self
        core.open = True
        self.observe()
        for told in tuple(arrivals):
            told(self)
        self.worker.start()

    def _settings(self) -> dict[str, Any]:
        return policy.scheduler_settings(self.options, self.device, self.limit)

    @property
    def budgets(self) -> list[Budget]:
        """The open budgets, in the order of their making."""
        return [one for one in list(self.shares.values()) if isinstance(one, Budget)]

    def facts_of(self, number: int) -> OutOfMemoryFacts | None:
        """Return what is known about a request that finds no memory."""
        request = self.core.request(number)
        return None if request is None else self.failures.out_of_memory_facts(request)

    # -- effects that concern the pool itself ------------------------------------------------------------------------

    def _pressure(self, effect: Effect) -> None:
        self.pressure.changed(effect.level)

    def _beat(self, effect: Effect) -> None:  # noqa: ARG002
        self._beats = True
        self.worker.submit(_nothing)

    def _emptied(self, effect: Effect) -> None:  # noqa: ARG002
        latch, self._emptied_latch = self._emptied_latch, None
        if latch is not None:
            latch()
        if self.closed is not None and threading.get_ident() not in self._releasing:
            self.run_last(self._release_rest)

    # -- the worker's care -------------------------------------------------------------------------------------------

    def beat(self) -> float | None:
        """Look after pages (blocks); return in how many seconds to do so again, None where nothing happens any more."""
        if not self._beats:
            return None
        self._beats = False
        scheduler = self.core.scheduler
        scheduler.begin_beat()
        self.core.carry_out()
        pause = scheduler.end_beat(self.core.time)
        self.core.carry_out()
        self._beats = self._beats or pause is not None
        return pause

    def look_after(self) -> float | None:
        """Do what is due, on the worker's thread; return in how many seconds to come again, None for never."""
        pause = self.beat()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TICK
            if not self.tick():
                return None
        return min(self._due - now, TICK) if pause is None else pause

    def tick(self) -> bool:
        """Look after an idle pool; return whether that will be needed again."""
        if self.device.over_budget != self._over_budget:
            self._over_budget = self.device.over_budget
            self.give_up()
        with suppress(DeviceError):  # a device that is lost says so to whoever grows or frees on it
            self.retire.poll()
        self.copies.look()
        self.spilling.look_again()
        self.executor.wash()
        self.core.scheduler.tick(self.core.time)
        self.core.carry_out()
        self.stall.look()
        if self.journal is not None:
            self.journal.write()
        return not self.released

    def give_up(self) -> None:
        """Give back all that is free (blocks); where the device refuses, warn of it."""
        try:
            self.executor.trim(0)
        except DeviceError as error:
            alarm(f"pool {self.name!r}: {error}", RuntimeWarning)

    # -- options -----------------------------------------------------------------------------------------------------

    def reconfigure(self, options: PoolOptions) -> None:
        """Go on with other options."""
        self.options = options
        self.min_free = options.spared(self.device.kind)
        self.core.default_timeout = options.timeout
        self.retire.late_fences = options.late_fences
        self.retire.fence_every = options.fence_every
        self.spilling.look_again()
        self.core.scheduler.configure(self.core.time, **self._settings())
        self.core.carry_out()
        self.observe()

    # -- memory of the host ------------------------------------------------------------------------------------------

    def host_memory(self) -> AsyncMemoryPool:
        return self.pool.spilled.of(self.pool)

    def fallback_memory(self) -> AsyncMemoryPool:
        return self.pool.fallback.of(self.pool)

    async def _to_device(self, buffer: Buffer) -> Buffer:
        """Copy a buffer that was placed on the host to the device it was asked for, and free the host's."""
        stands_in_for = self.pool._fallback_of
        wanted = None if stands_in_for is None else stands_in_for()
        if wanted is None:
            raise InvalidRequest("to_device()", buffer, 'a buffer that fallback="host" placed on the host')
        moved = await wanted.allocate_async(buffer.nbytes, tag=buffer.tag)
        await moved.copy_from(memoryview(buffer))
        buffer.free()
        return moved

    # -- work for the threads -----------------------------------------------------------------------------------------

    def copier(self) -> WorkerLike:
        with _starting:
            if self._copier is None or not self._copier.alive:
                name = f"asyncmem {self.name} copies"
                self._copier = self._factory(name, _weakly(self._still_copies), _weakly(self.break_down))
                self._copier.start()
            return self._copier

    def _still_copies(self) -> float | None:
        return None if self.released else TICK

    # -- the end -----------------------------------------------------------------------------------------------------

    def drained(self) -> Latch[None]:
        """Refuse newcomers from now on, and return what opens once every buffer has been freed."""
        self._emptied_latch = latch = Latch(_nothing)
        self.refusing = PoolClosed(self.name, "it is draining")
        self.core.open = False
        self.core.scheduler.drain(self.core.time)
        self.core.carry_out()
        return latch

    def close(self, error: Exception) -> None:
        """Refuse everything from now on, and fail who waits, first."""
        self.closed = self.refusing = error
        self.core.open = False
        with self._giving_back():  # whoever closes it has `release` made
            self.core.scheduler.close(self.core.time)
            self.spilling.let_stay()
            self.pressure.end()
            self.core.carry_out()

    @contextmanager
    def _giving_back(self) -> Iterator[None]:
        me = threading.get_ident()
        self._releasing.add(me)
        try:
            yield
        finally:
            self._releasing.discard(me)

    def release(self) -> None:
        """Give everything that is free back to the device (blocks); the rest follows as it is freed.

        Raises:
            DeviceError: The device did not take it all.
        """
        with self._giving_back():  # what the device does not take is not tried again and again
            self.executor.trim(0)
        gauges = self.core.scheduler.gauges()
        # What another thread has under way needs the device, too; once it is there this is made again.
        if self.core.live() or gauges["coming"] or gauges["leaving"] or self.core.reserved():
            return
        self.executor.unreserve()
        with self._ending:
            if self.released:
                return
            self._ground.close()
            with self._last:
                self.released = True
        self.worker.close(0)
        if self._copier is not None:
            self._copier.close(0)

    def _release_rest(self) -> None:
        try:
            self.release()
        except DeviceError as error:
            # The worker goes on: whoever closes the pool may still wait for it, and is told by that.
            alarm(f"pool {self.name!r} is closed, and its memory could not go back: {error}", RuntimeWarning)

    def break_down(self, error: BaseException) -> None:
        """Close loudly after the worker has died of an error."""
        alarm(f"pool {self.name!r}: the worker ended with {error!r}; the pool is closed", RuntimeWarning)
        self.close(PoolClosed(self.name, f"its worker ended with {error!r}"))

    def warn_of_leaks(self) -> None:
        """Name the buffers still held when the pool is closed; freed ones that are still exported are not held."""
        core = self.core
        held = core.account(0).requested - core.exported_bytes
        if held <= 0:
            return
        tags = ", ".join(f"{tag!r} {format_size(nbytes)}" for tag, nbytes in tags_of(self, self.pool))
        lines = held_by_site(core, 5)
        sites = ", ".join(f"{format_size(nbytes)} at {site}" for site, nbytes in lines)
        rows = ", ".join(f"{format_size(nbytes)} {what}" for what, nbytes in held_beside(self, self.pool).items())
        alarm(
            f"pool {self.name!r} was closed while buffers of {format_size(held)} were held"
            + (f" ({tags})" if tags else "")
            + (f", made {sites}" if sites else "")
            + f": {rows}; they stay valid until they are freed",
            LeakWarning,
            lines[0][0] if lines else None,
        )

    def check(self) -> None:
        """Walk every invariant; raises `AssertionError` that names the one which does not hold."""
        self.core.check()
        self.core.scheduler.check()
        mapped, reserved = self.executor.balance()
        if mapped != reserved:
            raise AssertionError(f"segments add up to {mapped}, the heap has {reserved}")


def _forked() -> None:
    # The child has neither the worker nor whoever held a lock; its copy of the pool only says so.
    for opened in _all_open():
        opened.lock = threading.Lock()
        opened.closed = opened.refusing = PoolClosed(
            opened.name, "it belongs to the process that forked this one; make a pool after fork, not before"
        )


arrivals: Final[list[Callable[[OpenPool], None]]] = []
"""Called with each pool that opens, before anything is allocated in it: for those above who watch all pools."""


def open_pools() -> list[OpenPool]:
    """Return all pools of this process that have memory, or may get some."""
    return [opened for opened in _all_open() if not opened.released and not opened.core.forked]


def _all_open() -> list[OpenPool]:
    # In one step, because pools open in other threads meanwhile.
    return [opened for known in _opened.valuerefs() if (opened := known()) is not None]


_starting = threading.Lock()
_opened: weakref.WeakValueDictionary[int, OpenPool] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_forked)


def _weakly(method: Callable[..., T]) -> Callable[..., T | None]:
    """Return a call of a method that does nothing once its object is gone."""
    known = weakref.WeakMethod(method)

    def call(*arguments: object) -> T | None:
        found = known()
        return None if found is None else found(*arguments)

    return call


def _nothing() -> None:
    """Stand for a call of which only the end matters."""
