"""What exists between a pool's opening and the end of its last buffer, put together; and that end."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from asyncmem.core import GRANULE, Core, Retire
from asyncmem.devices import Stream
from asyncmem.errors import DeviceError, InvalidRequest, LeakWarning, PoolClosed
from asyncmem.figures import format_size
from asyncmem.pool import policy
from asyncmem.pool.alarm import alarm
from asyncmem.pool.blocking import block, serve
from asyncmem.pool.copies import Copies
from asyncmem.pool.executor import Executor
from asyncmem.pool.failures import Failures
from asyncmem.pool.graph import Captures
from asyncmem.pool.held import held_by_site
from asyncmem.pool.latch import Latch
from asyncmem.pool.loops import running_loop
from asyncmem.pool.owners import named_owner
from asyncmem.pool.pins import Pins
from asyncmem.pool.pressure import PressureListeners
from asyncmem.pool.share import Budget
from asyncmem.pool.spilling import Spilling
from asyncmem.pool.stall import StallWatch
from asyncmem.pool.worker import TICK

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from asyncmem.core import Batch, Buffer, Effect, Request
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.loops import EventLoop, Sleeper
    from asyncmem.pool.opening import Ground
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.ports import AnyShare, WorkerLike

    WorkerFactory = Callable[[str, Callable[[], float | None], Callable[[BaseException], None]], WorkerLike]

_SPREAD: Final = 4
"""A range's size by the device's, where memory comes by pages: addresses are spread more than memory."""


class OpenPool:
    """An opened pool: its device, its core, and all that carries out what the scheduler decides.

    Attributes:
        closed: The error of a closed pool, or None.
        refusing: The error that newcomers get, or None.
        shares: The pool and its open budgets and leases, by account.
    """

    def __init__(self, pool: AsyncMemoryPool, ground: Ground, options: PoolOptions, factory: WorkerFactory) -> None:
        self.pool = pool
        self.name = pool.name
        self.options = options
        self._ground = ground
        self.device = device = ground.device
        self.total = device.capacity
        self.min_free = options.spared(device.kind)
        self.core = core = Core(device, pool, **policy.heap_settings(options))
        self.retire = Retire(core, device, late_fences=options.late_fences, fence_every=options.fence_every)
        me = weakref.ref(self)
        self.worker = factory(f"asyncmem {pool.name}", lambda: _look_after(me), lambda error: _died(me, error))
        self._factory = factory
        self._copier: WorkerLike | None = None
        self.executor = Executor(self)
        if options.segments == "paged":
            page = max(device.page, 1)
            self.executor.reserve(_SPREAD * max(device.capacity, page) // page * page)
        self.closed: Exception | None = None
        self.refusing: Exception | None = None
        self.lock = threading.Lock()  # over what is below; finalizers post to the core instead of waiting for it
        self.shares: dict[int, AnyShare] = {0: pool}
        self._ended_accounts: list[int] = []  # of closed budgets and leases, while something below them is held
        self._owner_blocks = 0
        self._emptied_latch: Latch[None] | None = None
        self._releasing: set[int] = set()  # threads that give back what there is, and need not be asked to
        self.loop_blocking_calls = self.cpu_fallbacks = 0
        self.captures = Captures(self)
        self.pins = Pins(core)
        self.spilling = Spilling(self)
        self.pressure = PressureListeners(self)
        self.failures = Failures(self)
        self.stall = StallWatch(self)
        self.copies = Copies(self)
        self.released = False
        self._ending = threading.RLock()  # re-entrant: a worker that is closed may run what is left at once
        self._last = threading.RLock()  # over what the worker is given last; re-entrant for finalizers
        self._due = time.monotonic() + TICK  # when the pool is to be looked after next
        self._beats = False
        self._over_budget = device.over_budget  # what has been heeded
        self.counted: dict[str, float] = {}  # the counters at the last reset
        core.serve(self.executor.perform, **self._settings())
        core.can_capture = type(device.default_stream).capturing is not Stream.capturing
        core.default_timeout = options.timeout
        _opened[id(self)] = self
        core.open = True
        self.observe()
        for told in tuple(arrivals):
            told(self)
        self.worker.start()

    @property
    def limit(self) -> int:
        """The limit in bytes, in whole granules."""
        return -(-self.options.ceiling(self.total) // GRANULE) * GRANULE

    def _settings(self) -> dict[str, Any]:
        return policy.scheduler_settings(self.options, self.device, self.limit)

    # -- shares ------------------------------------------------------------------------------------------------------

    def share_of(self, buffer: Buffer) -> AnyShare:
        """Return the pool, budget or lease that a buffer is charged to."""
        return self.shares.get(buffer._account, self.pool)

    @property
    def budgets(self) -> list[Budget]:
        """The open budgets, in the order of their making."""
        return [one for one in list(self.shares.values()) if isinstance(one, Budget)]

    def begin_share(self, share: AnyShare, account: int) -> None:
        """Note a share that is open from now on."""
        with self.lock:
            self.shares[account] = share

    def end_share(self, account: int, arena: int | None = None) -> None:
        """Forget a share that is closed, and a lease's range; its account ends once nothing of it is held."""
        with self.lock:
            share = self.shares.pop(account, None)
        if arena is not None and share is not None:
            self.spilling.pass_on(share)
        self.core.scheduler.close_share(account, self.core.time)  # who waits there fails, before its range is gone
        self.core.carry_out()
        if arena is not None:
            self.core.end_lease(arena)
        with self.lock:
            self._ended_accounts.append(account)
        self.close_accounts()

    def close_accounts(self) -> None:
        """Remove the accounts of closed shares of which nothing is held any more."""
        with self.lock:
            before: list[int] = []
            while self._ended_accounts != before:  # the one above goes after the last below it
                before = self._ended_accounts
                self._ended_accounts = [account for account in before if not self._remove(account)]

    def _remove(self, account: int) -> bool:
        try:
            self.core.remove_account(account)
        except ValueError:
            return False  # something of it is held, or an account below it is left
        return True

    # -- what the core asks ------------------------------------------------------------------------------------------

    def on_loop(self) -> bool:
        """Return whether an event loop runs on this thread."""
        return running_loop(self.core.loop) is not None

    def bind(self, request: Request[Any]) -> EventLoop:
        """Return the loop to sleep on, which becomes the pool's own until it closes.

        Raises:
            InvalidRequest: No loop runs here, or another one is served that is still open.
        """
        served = self.core.loop
        loop = running_loop(served)
        if loop is None:
            raise InvalidRequest("await", request, "a running event loop, asyncio's or trio's")
        if loop is not served:
            if served is not None and not served.is_closed():
                raise InvalidRequest("await", loop, f"the event loop that pool {self.name!r} serves, {served!r}")
            self._serve_loop(loop)
        return loop

    def meet(self) -> None:
        """Serve the loop that runs here, where none is served yet."""
        loop, served = running_loop(self.core.loop), self.core.loop
        if loop is not None and (served is None or served.is_closed()):
            self._serve_loop(loop)

    def _serve_loop(self, loop: EventLoop) -> None:
        self.core.set_loop(loop)
        self.core.expire()

    def wait(self, request: Request[Any]) -> Generator[Any, Any, None]:
        """Let the task that runs here wait for a request, where that is not done by the core."""
        loop = self.bind(request)
        if request.done():  # and the loop is to turn once
            try:
                yield from loop.pause()
            except BaseException:
                request._awake(True)
                raise
            return
        place = _RequestPlace(request, loop)
        yield from loop.park(place)
        place.end()

    def serve(self, request: Request[Any]) -> None:
        """See a synchronous request through."""
        serve(self, request)

    def block(self, request: Request[Any], timeout: float | None) -> None:
        """Wait for a request on this thread."""
        block(self, request, timeout)

    def stream_index(self, stream: object) -> int:
        """Return the core's number of a stream; None is the device's default stream."""
        return 0 if stream is None else self.retire.register(self.device.stream_of(stream))

    def claims(self) -> list[tuple[int, int, int]]:
        """Return who waits for others to bring spilled memory home: owner, bytes and account."""
        return self.spilling.claims()

    def facts_of(self, number: int) -> OutOfMemoryFacts | None:
        """Return what is known about a request that finds no memory."""
        request = self.core.request(number)
        return None if request is None else self.failures.out_of_memory_facts(request)

    # -- what is noted on buffers ------------------------------------------------------------------------------------

    def enter_owner(self) -> None:
        """Count a block of `pool.owner(...)`: while there is one, every allocation looks for its owner's name."""
        with self.lock:
            self._owner_blocks += 1
        self.core.label(named_owner.get())
        self.observe()

    def leave_owner(self) -> None:
        """Count one less. From finalizers too: such a task may be collected while its thread has the lock."""
        self.core.post(self._leave_owner)

    def _leave_owner(self) -> bool:
        if not self.lock.acquire(blocking=False):
            return False
        self._owner_blocks -= 1
        self.lock.release()
        self.observe()
        return True

    def observe(self) -> None:
        """Have every request go the way that looks at it, while there is something to see."""
        options = self.options
        noting = options.track or self.device.checker is not None or self._owner_blocks > 0
        self.core.tracking = options.track
        self.core.observe_all(noting, options.segments == "direct" or self.captures.open)
        self.core.watch_captures = self.core.can_capture and options.watch_captures

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
        """Return the pool of page-locked memory that this one's moves to."""
        return self.pool.spilled.of(self.pool)

    def serve_on_host(self, request: Request[Any]) -> Buffer | Batch:
        """Serve a request from ordinary memory (blocks)."""
        return self.pool.fallback.of(self.pool)._serve_from(request)

    # -- work for the threads ----------------------------------------------------------------------------------------

    def run(self, call: Callable[[], object]) -> Latch[object]:
        """Have the worker make a call, and return what to wait on."""
        latch = Latch(call)
        self.run_last(latch)
        return latch

    def copier(self) -> WorkerLike:
        """Return the thread that makes copies which would hold up their callers; starts it at the first need."""
        with _starting:
            if self._copier is None or not self._copier.alive:
                me = weakref.ref(self)
                name = f"asyncmem {self.name} copies"
                self._copier = self._factory(name, lambda: _lasts(me), lambda error: _died(me, error))
                self._copier.start()
            return self._copier

    def run_last(self, job: Callable[[], None]) -> None:
        """Have a job run: by the worker, or by a thread of its own where that ends or has died."""
        with self._last:  # until all is released the worker goes on, and it does what it has been given before it ends
            if self.worker.alive and not self.released:
                self.worker.submit(job)
                return
        if not sys.is_finalizing():  # then the start would wait for ever, and the process gives all back
            threading.Thread(target=job, name=f"{self.name} is closed", daemon=True).start()

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
        tags = ", ".join(f"{tag!r} {format_size(nbytes)}" for tag, nbytes in core.tag_bytes().items())
        sites = ", ".join(f"{format_size(nbytes)} at {site}" for site, nbytes in held_by_site(core, 5))
        alarm(
            f"pool {self.name!r} was closed while buffers of {format_size(held)} were held"
            + (f" ({tags})" if tags else "")
            + (f", made {sites}" if sites else "")
            + "; they stay valid until they are freed",
            LeakWarning,
            level=4,
        )

    def check(self) -> None:
        """Walk every invariant; raises `AssertionError` that names the one which does not hold."""
        self.core.check()
        self.core.scheduler.check()
        mapped, reserved = self.executor.balance()
        if mapped != reserved:
            raise AssertionError(f"segments add up to {mapped}, the heap has {reserved}")


class _RequestPlace:
    """A request to park on, for one task."""

    deadline: float | None = None

    def __init__(self, request: Request[Any], loop: EventLoop) -> None:
        self._request = request
        self._loop = loop
        self._asleep = False

    def admit(self, sleeper: Sleeper) -> bool:
        self._asleep = self._request._admit(sleeper)
        if self._asleep:
            self._request._asleep(self._loop.current_task())
        return self._asleep

    def abandon(self, sleeper: Sleeper) -> None:
        self._request._abandon_sleeper(sleeper)
        if self._asleep:
            self._request._awake(True)

    def expire(self) -> None:
        """Never called: the scheduler knows the deadline."""

    def end(self) -> None:
        """The task goes on."""
        if self._asleep:
            self._request._awake(False)


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


def _look_after(me: weakref.ref[OpenPool]) -> float | None:
    opened = me()
    return None if opened is None else opened.look_after()


def _lasts(me: weakref.ref[OpenPool]) -> float | None:
    opened = me()
    return None if opened is None or opened.released else TICK


def _died(me: weakref.ref[OpenPool], error: BaseException) -> None:
    opened = me()
    if opened is not None:
        opened.break_down(error)


def _nothing() -> None:
    """Stand for a call of which only the end matters."""
