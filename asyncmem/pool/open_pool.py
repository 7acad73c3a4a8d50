"""What exists between a pool's opening and the end of its last buffer, put together; and that end."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncmem.core import Core, Kind, hold_interrupts, on_main_thread
from asyncmem.devices import Stream
from asyncmem.errors import DeviceError, InvalidRequest, LeakWarning, PoolClosed
from asyncmem.figures import format_size
from asyncmem.pool.alarm import alarm
from asyncmem.pool.copies import Copies, Copy, Part
from asyncmem.pool.executor import Executor
from asyncmem.pool.graph import Captures
from asyncmem.pool.handles import Pin
from asyncmem.pool.holders import StallWatch, error_of, out_of_memory_facts
from asyncmem.pool.latch import Latch, ThreadSleeper, wait_at
from asyncmem.pool.loops import need_running_loop, running_loop
from asyncmem.pool.opening import heap_settings, kind_of, scheduler_settings
from asyncmem.pool.owners import named_owner
from asyncmem.pool.ports import Opened
from asyncmem.pool.share import Budget
from asyncmem.pool.spilling import Spilling
from asyncmem.pool.worker import TICK, Worker, idle_helpers, ready_helper, weakly
from asyncmem.readers import SHARED
from asyncmem.stats import Pressure
from asyncmem.text import printable, quoted
from asyncmem.units import parse_timeout

if TYPE_CHECKING:
    from typing import Any

    from asyncmem.core import Buffer, Effect, Request
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.loops import EventLoop
    from asyncmem.pool.opening import PoolDevices
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.snapshot import PressureChanges
    from asyncmem.stats import PoolStats

_SPREAD: Final = 4
"""A range's size by the device's, where memory comes by pages: addresses are spread more than memory."""


class OpenPool(Opened):
    """An opened pool: its device, its core, and all that carries out what the scheduler decides.

    The core calls what begins with an underscore, with the interpreter's lock and no other.
    """

    pool: AsyncMemoryPool

    def __init__(
        self, pool: AsyncMemoryPool, devices: PoolDevices, options: PoolOptions, factory: type[Worker]
    ) -> None:
        super().__init__(pool)
        self._devices = devices
        self.host_pool = pool._host_pool
        self.device = device = devices.device
        self.core = core = Core(device, self, journal=options.journal is not None, **heap_settings(options))
        self.journal = devices.journal
        if self.journal is not None:
            self.journal.core = core
        self.retire = core.retire
        self.kind = kind_of(options.segments, device)
        self._apply(options)
        self.worker = factory(f"asyncmem {pool.name}", weakly(self.look_after), weakly(self.break_down))
        self._factory = factory
        self._copier: Worker | None = None
        self.executor = Executor(self)
        if options.limit == SHARED:
            from asyncmem.share.limits import Member

            self.quota = Member(self)
        if self.kind == "paged":
            page = max(device.page, 1)
            self.executor.reserve(_SPREAD * max(device.capacity, page) // page * page)
        self._emptied_latch: Latch[None] | None = None
        self._closers: deque[Latch[object]] = deque()  # callers that wait for the end
        self._releasing: set[int] = set()  # threads that give back what there is, and need not be asked to
        self.captures = Captures(self)
        self.spilling = Spilling(self)
        self.listeners: weakref.WeakSet[PressureChanges] = weakref.WeakSet()
        self.stall = StallWatch(self)
        self.copies = Copies(self)
        self._ending = threading.RLock()  # re-entrant: a worker that is closed may run what is left at once
        self._due = time.monotonic() + TICK  # when the pool is to be looked after next
        self._beats = False
        self._over_budget = device.over_budget  # how often that was, when it was last seen
        core.serve(self.executor, self.worker.submit, idle_helpers, **self._settings())
        core.can_capture = type(device.default_stream).capturing is not Stream.capturing
        _opened[id(self)] = self
        core.open = True
        self.observe()
        for arrival in tuple(arrivals):
            arrival(self)
        self.worker.start()

    def _settings(self) -> dict[str, Any]:
        return scheduler_settings(self.options, self.device, self.kind, self.limit)

    @property
    def budgets(self) -> list[Budget]:
        """The open budgets, in the order of their making."""
        return [one for one in list(self.shares.values()) if isinstance(one, Budget)]

    def budget_stats(self) -> Iterator[PoolStats]:
        """Return the figures of the open budgets."""
        for budget in self.budgets:
            with suppress(PoolClosed):  # by another thread, since
                yield budget.stats()

    def facts_of(self, number: int) -> OutOfMemoryFacts | None:
        """Return what is known about a request that finds no memory."""
        request = self.core.request(number)
        return None if request is None else out_of_memory_facts(self, request)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _bind(self, request: Request[Any]) -> EventLoop:
        """Return the loop to sleep on, which becomes the pool's own until it closes.

        Raises:
            InvalidRequest: No loop runs here, or another one is served that is still open.
        """
        served = self.core.loop
        loop = need_running_loop(request, served)
        if loop is not served:
            if served is not None and not served.is_closed():
                raise InvalidRequest("await", loop, f"the event loop that pool {quoted(self.name)} serves, {served!r}")
            self._serve_loop(loop)
        return loop

    def serve_loop_here(self) -> None:
        """Serve the loop that runs here, where none is served yet."""
        loop, served = running_loop(self.core.loop), self.core.loop
        if loop is not None and (served is None or served.is_closed()):
            self._serve_loop(loop)

    def _serve_loop(self, loop: EventLoop) -> None:
        self.core.set_loop(loop)
        self.core.expire()

    # torch, CuPy and plain threads cannot await. Their requests stand in the same queue as all others, so they do not
    # barge; only the device's calls are theirs, because a thread that calls may block and need not wait for the
    # worker.

    def _serve(self, request: Request[Any]) -> None:
        """Wait for a synchronous request to end, at its deadline at the latest."""
        gate, jobs = request._gate, request._jobs
        assert gate is not None
        waits = False  # for others, and is named among those who do
        me = threading.get_ident()
        try:
            self.core.serving.add(me)
            if self._loop_here() is not None:  # whose every turn waits for this
                self.loop_blocking_calls += 1
            while not request.done():
                if jobs:
                    hold_interrupts(partial(self._run_first, jobs))
                elif not waits and request._deadline is not None:
                    waits = True
                    request._asleep(me)
                elif not wait_at(gate, self._left(request)):
                    request._expire()
        except BaseException:  # an interrupt: no caller would see it through any more
            request.cancel()
            raise
        finally:
            self.core.serving.discard(me)
            if waits:
                request._awake()

    def _run_first(self, jobs: list[Effect]) -> None:
        self.executor.run(jobs.pop(0))

    def _divide_effects(self, request: Request[Any]) -> None:
        """Say which of a synchronous request's effects its thread carries out: on the main thread none that may wait.

        Under a memory checker, which asks for the caller's own context, it carries out all there, too. Where growth
        waits for other processes, no thread does, for it has to end its request at the deadline.
        """
        checked = self.device.checker is not None
        if checked or self.quota is None:
            request._jobs = []
        request._interruptible = not checked and on_main_thread()
        if request._jobs is None or request._interruptible:
            ready_helper()

    def _block(self, request: Request[Any], timeout: float | None) -> None:
        """Wait on this thread until a request of the event loop's has ended, for at most `timeout` seconds."""
        if self.core.forked:
            self.need_open()
        sleeper = ThreadSleeper()
        left = self._left(request)
        bounds = [bound for bound in (parse_timeout(timeout), left) if bound is not None]
        if request._asleep(threading.get_ident(), sleeper):
            try:
                sleeper.sleep(min(bounds, default=None))
            finally:
                request._awake(sleeper)
        if left is not None and self._left(request) == 0:
            request._expire()

    def _left(self, request: Request[Any]) -> float | None:
        if request._deadline is None:
            return None
        return min(max(0.0, request._deadline - self.core.time), threading.TIMEOUT_MAX)

    _error_of = error_of

    def _loop_here(self) -> EventLoop | None:
        return running_loop(self.core.loop)

    def _holder(self) -> int | None:
        """Return the number of who runs here, where `pool.owner(...)` has named it."""
        name = named_owner.get()
        if name is None:
            return None
        self.core.label(name)
        return self.core.owner()

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _copy(self, buffer: Buffer, nbytes: int, other: object, stream: object, into: bool, offset: int) -> Copy:
        copy: Copy = self.copies.start(Part(buffer, nbytes, offset), other, stream, into=into)
        return copy

    def _pin(self, buffer: Buffer) -> Pin:
        return Pin(self.pins, buffer)

    def _forgotten(self, nbytes: int, tag: str | None, site: str) -> None:
        """Warn of a buffer that was dropped and never freed."""
        named = f" tagged {quoted(tag)}" if tag else ""
        text = f"a buffer of {format_size(nbytes)}{named} was dropped and never freed; it was made at {printable(site)}"
        alarm(text, LeakWarning, site)

    # -- effects that concern the pool itself ------------------------------------------------------------------------

    def _pressure(self, effect: Effect) -> None:
        for listener in list(self.listeners):
            listener.put(Pressure(effect.level))

    def _beat(self, effect: Effect) -> None:  # noqa: ARG002
        self._beats = True

    def _emptied(self) -> None:
        if self._emptied_latch is not None:
            self._emptied_latch()
            self._emptied_latch = None
        if self.closed is not None and threading.get_ident() not in self._releasing:
            self.run_last(self._release_rest)

    # -- the worker's care -------------------------------------------------------------------------------------------

    def beat(self) -> float | None:
        """Look after pages (blocks); return in how many seconds to do so again, None where nothing happens any more."""
        if not self._beats:
            return None
        self._beats = False
        scheduler = self.core.scheduler
        # Segments that are joined wait for their stream, on which a capture may begin in a block.
        if self.executor.spaces or not self.captures.open:
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
            self.tick()
        if self.released:
            return None
        return min(self._due - now, TICK) if pause is None else pause

    def tick(self) -> None:
        """Look after an idle pool."""
        over_budget = self.device.over_budget
        if over_budget != self._over_budget:
            before = self._under_way()
            self.give_back_all()
            if not before and not self._under_way():  # else a thread may be left with some: again at the next tick
                self._over_budget = over_budget
        with suppress(DeviceError):  # a lost device raises where memory grows or is freed
            self.retire.poll()
        if self.give_back_hooks and self.core.scheduler.gauges()["waiting"]:
            self._call_give_back_hooks()
        self.copies.look()
        self.spilling.look_again()
        self.executor.finish()
        self.core.scheduler.tick(self.core.time)
        with suppress(DeviceError):
            if self.min_free and not self.device.host_readable and self.executor.others_need():
                self.core.scheduler.offer(self.core.time)
        self.core.carry_out()
        self.stall.look()
        if self.journal is not None:
            self.journal.write()

    def _call_give_back_hooks(self) -> None:
        for give_back in tuple(self.give_back_hooks):
            try:
                give_back()
            except Exception as error:  # noqa: BLE001 -- of another library, and no reason for the worker to end
                alarm(f"pool {quoted(self.name)}: a library is asked for nothing more after {error!r}", RuntimeWarning)
                self.give_back_hooks.discard(give_back)

    def give_back_all(self) -> None:
        """Give back all that is free (blocks); where the device refuses, warn of it."""
        try:
            self.executor.trim(0)
        except DeviceError as error:
            alarm(f"pool {quoted(self.name)}: {error}", RuntimeWarning)

    # -- options -----------------------------------------------------------------------------------------------------

    def _apply(self, options: PoolOptions) -> None:
        self.options = options
        self.core.default_timeout = options.timeout
        self.retire.late_fences, self.retire.fence_every = options.late_fences, options.fence_every

    def reconfigure(self, options: PoolOptions) -> bool:
        """Change the options; return True, for `Core.post`, which calls again after an interrupt."""
        self._apply(options)
        self.spilling.look_again()
        self.core.scheduler.configure(self.core.time, **self._settings())
        self.core.carry_out()
        self.observe()
        return True

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

    def copier(self) -> Worker:
        with _starting:
            if self._copier is None or not self._copier.alive:
                name = f"asyncmem {self.name} copies"
                self._copier = self._factory(name, weakly(self._still_copies), weakly(self.break_down))
                self._copier.start()
            return self._copier

    def _still_copies(self) -> float | None:
        return None if self.released else TICK

    # -- the end -----------------------------------------------------------------------------------------------------

    def drained(self) -> Latch[None]:
        """Refuse newcomers from now on, and return what opens once every buffer has been freed."""
        self._emptied_latch = latch = Latch[None]()
        self.refusing = PoolClosed(self.name, "it is draining")
        self.core.open = False
        self.core.scheduler.drain(self.core.time)
        self.core.carry_out()
        return latch

    def close(self, error: Exception) -> None:
        """Refuse everything from now on, after failing what waits."""
        if self.closed is None:
            self.core.note(Kind.CLOSED, nbytes=self.core.account(0).requested)
        self.closed = self.refusing = self.closed or error  # the first has the reason
        self.core.open = False
        with self._giving_back():  # its closer has `release` made
            self.core.scheduler.close(self.core.time)
            for listener in list(self.listeners):
                listener.put(None)
            self.core.carry_out()  # before another thread does so
            self.spilling.unbind_all()

    def end(self, error: Exception) -> Latch[object]:
        """Close, and have all go back; return what to wait for."""
        self.close(error)
        closer = Latch[object]()
        if self.released:
            closer()
        else:
            self.run_last(partial(self._release_for, closer))
        return closer

    def _release_for(self, closer: Latch[object]) -> None:
        # A thread may still get memory for a request that was served otherwise.
        before, outcome = self._under_way(), Latch(self.release)
        try:
            outcome()
        finally:
            closer.call, now = outcome.result, self._under_way()
            if before and not now and not self.released:  # it came too late for that release, perhaps
                self.run_last(partial(self._release_for, closer))
            else:
                self._closers.append(closer)
                if self.released or self.core.live() or not now:  # else `_emptied` comes behind it
                    self._open_closers()

    def _under_way(self) -> int:
        under_way: int = self.core.scheduler.gauges()["under_way"]
        return under_way

    def _open_closers(self) -> None:
        while self._closers:
            self._closers.popleft()()

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
            self._devices.close()
            with self._last:
                self.released = True
        self.worker.close(0)
        if self._copier is not None:
            self._copier.close(0)

    def _release_rest(self) -> None:
        outcome = Latch(self.release)
        try:
            outcome()
            outcome.result()
        except DeviceError as error:
            # Who closes the pool hears of it below, but may have waited no longer.
            alarm(f"pool {quoted(self.name)} is closed, and its memory could not go back: {error}", RuntimeWarning)
        finally:
            for closer in self._closers:
                closer.call = outcome.result
            self._open_closers()

    def break_down(self, error: BaseException) -> None:
        """Close loudly after the worker has died of an error."""
        try:  # before its waiters wake, so that a program that ends by their errors has shown the reason
            alarm(f"pool {quoted(self.name)}: the worker ended with {error!r}; the pool is closed", RuntimeWarning)
        finally:
            self.close(PoolClosed(self.name, f"its worker ended with {error!r}"))

    def check(self) -> None:
        """Walk every invariant; raises `AssertionError` that names the one which does not hold."""
        self.core.check()
        self.core.scheduler.check()
        before = self.core.scheduler.gauges()
        leaving = 0 if self.executor.spaces else before["leaving"]
        mapped, reserved = self.executor.given() - leaving, self.core.reserved()
        settled = not before["under_way"] and before == self.core.scheduler.gauges()  # no other thread is at work
        if settled and mapped != reserved:
            raise AssertionError(f"segments add up to {mapped}, the heap has {reserved}")


def _forked() -> None:
    # The child has neither the worker nor the holder of a lock; its copy of the pool only says so.
    for opened in _all_open():
        opened.lock = threading.Lock()
        opened.closed = opened.refusing = PoolClosed(
            opened.name, "it belongs to the process that forked this one; make a pool after fork, not before"
        )
        for listener in list(opened.listeners):
            listener.ended = True  # no task is woken: the sleepers are the parent's


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
