"""One opened pool's machinery, put together: device, core, order of streams, flow and worker; and its end."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypedDict

from asyncmem.core import GRANULE, Core
from asyncmem.engine.retire import Retire
from asyncmem.errors import LeakWarning, PoolClosed
from asyncmem.figures import format_size
from asyncmem.pool.alarm import alarm
from asyncmem.pool.copies import Copies
from asyncmem.pool.flow import Flow
from asyncmem.pool.held import held_by_site
from asyncmem.pool.idle import IdleWatch
from asyncmem.pool.latch import Latch
from asyncmem.pool.paging import PagedSupply
from asyncmem.pool.supply import Supply
from asyncmem.pool.worker import TICK

if TYPE_CHECKING:
    from typing import Protocol

    from asyncmem.core import Turn
    from asyncmem.options import PoolOptions
    from asyncmem.pool.opening import Ground
    from asyncmem.pool.pool import AsyncMemoryPool

    class WorkerLike(Protocol):
        """What a pool asks of its worker."""

        @property
        def alive(self) -> bool: ...
        def start(self) -> None: ...
        def submit(self, job: Callable[[], None]) -> None: ...
        def close(self, timeout: float | None = None) -> bool: ...

    WorkerFactory = Callable[[str, Callable[[], float | None], Callable[[BaseException], None]], WorkerLike]


class House:
    """What exists between a pool's opening and the end of its last buffer."""

    def __init__(self, pool: AsyncMemoryPool, ground: Ground, options: PoolOptions, factory: WorkerFactory) -> None:
        self.options = options
        self._ground = ground
        self.device = ground.device
        self.total = self.device.capacity
        self.core = Core(self.device, pool, **core_settings(options))
        self.retire = Retire(self.core, self.device, late_fences=options.late_fences, fence_every=options.fence_every)
        me = weakref.ref(self)
        self.worker = factory(f"asyncmem {pool.name}", lambda: _tick(me), lambda error: _died(me, error))
        self.flow = Flow(pool, self.core, self.retire, self._make_supply, self.worker.submit, options)
        with self.flow.turn:
            self.core.set_limit(0, self.flow.supply.limit)
            self.flow.pressure.look()
        self.idle = IdleWatch(self.flow)
        self.copies = Copies(self)
        self._factory = factory
        self._copier: WorkerLike | None = None
        self.released = False
        self._ending = threading.RLock()  # re-entrant: a worker that is closed may run what is left at once
        self._last = threading.RLock()  # over what the worker is given last; re-entrant for finalizers
        self._due = time.monotonic() + TICK  # when the pool is to be looked after next
        self._over_budget = self.device.over_budget  # what has been heeded
        self.counted: dict[str, float] = {}  # the counters at the last reset
        _houses[id(self)] = self
        self.core.open = not self.flow.notes_all(options)
        self.flow.observe()
        for told in tuple(arrivals):
            told(self)
        self.worker.start()

    def _make_supply(self, turn: Turn) -> Supply:
        kind = PagedSupply if self.options.segments == "paged" else Supply
        supply = kind(self.core, self.device, self.retire, turn, self.options)
        supply.limit = self.ceiling(self.options)
        supply.min_free = self.options.spared(self.device.kind)
        return supply

    def ceiling(self, options: PoolOptions) -> int:
        """Answer the limit in bytes, in whole granules."""
        return -(-options.ceiling(self.total) // GRANULE) * GRANULE

    def run(self, call: Callable[[], object]) -> Latch[object]:
        """Have the worker make a call, and answer what to wait on."""
        latch = Latch(call)
        self.worker.submit(latch)
        return latch

    def copier(self) -> WorkerLike:
        """Answer the thread that makes copies which would hold up their callers; starts it at the first need."""
        with _starting:
            if self._copier is None or not self._copier.alive:
                me = weakref.ref(self)
                name = f"asyncmem {self.flow.pool.name} copies"
                self._copier = self._factory(name, lambda: _lasts(me), lambda error: _died(me, error))
                self._copier.start()
            return self._copier

    def release(self) -> None:
        """Give everything that is free back to the device (blocks); the rest follows as it is freed.

        Raises:
            DeviceError: The device did not take it all.
        """
        flow = self.flow
        with flow.turn:
            self.core.flush()
            self.core.merge()
            give_back = flow.supply.detach() or flow.supply.retry
        give_back()
        with flow.turn:
            # What another thread has under way needs the device, too; once it is there the flow has this made again.
            if self.core.live() or flow.supply.coming or flow.supply.leaving:
                return
            flow.supply.end()
        with self._ending:
            if self.released:
                return
            self._ground.close()
            with self._last:
                self.released = True
        self.worker.close(0)
        if self._copier is not None:
            self._copier.close(0)

    def run_last(self, job: Callable[[], None]) -> None:
        """Have a job run for a closed pool: by the worker, or by a thread of its own where that ends or has died."""
        with self._last:  # until all is released the worker goes on, and it does what it has been given before it ends
            if self.worker.alive and not self.released:
                self.worker.submit(job)
                return
        if not sys.is_finalizing():  # then the start would wait for ever, and the process gives all back
            threading.Thread(target=job, name=f"{self.flow.pool.name} is closed", daemon=True).start()

    def look_after(self) -> float | None:
        """Do what is due, on the worker's thread; answers in how many seconds to come again, or None for never."""
        pause = self.flow.upkeep.beat()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + TICK
            if not self.tick():
                return None
        return min(self._due - now, TICK) if pause is None else pause

    def tick(self) -> bool:
        """Look after an idle pool; says whether that will be needed again."""
        flow = self.flow
        if self.device.over_budget != self._over_budget:
            self._over_budget = self.device.over_budget
            flow.upkeep.give_up()
        flow.taker.poll()
        self.copies.look()
        self.idle.look()
        with flow.turn:
            flow.supply.refused = None  # others may have given memory back to the device
            flow.captures.in_the_way = False  # or ended their captures
            flow.spilling.look_again()
            if flow.anyone_waits():
                flow.changed()
            flow.watch.stalled()
            flow.upkeep.defragment()
        return not self.released

    def break_down(self, error: BaseException) -> None:
        """Close loudly after the worker has died of an error."""
        name = self.flow.pool.name
        alarm(f"pool {name!r}: the worker ended with {error!r}; the pool is closed", RuntimeWarning)
        self.flow.close(PoolClosed(name, f"its worker ended with {error!r}"))


def _forked() -> None:
    # The child has neither the worker nor whoever held the lock; its copy of the pool only says so.
    for house in _all_houses():
        flow = house.flow
        flow.turn.renew()
        flow.closed = flow.refusing = PoolClosed(
            flow.pool.name, "it belongs to the process that forked this one; make a pool after fork, not before"
        )


arrivals: Final[list[Callable[[House], None]]] = []
"""Told of each pool that opens, before anything is allocated in it: for those above who watch all pools."""


def open_houses() -> list[House]:
    """Answer the machinery of all pools of this process that have memory, or may get some."""
    return [house for house in _all_houses() if not house.released and not house.core.forked]


def _all_houses() -> list[House]:
    # In one step, because pools open in other threads meanwhile.
    return [house for known in _houses.valuerefs() if (house := known()) is not None]


_starting = threading.Lock()
_houses: weakref.WeakValueDictionary[int, House] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_forked)


class CoreSettings(TypedDict):
    """The options that the core takes, by its names."""

    small_limit: int
    strategy: str
    stream_cache_blocks: int
    stream_cache_bytes: int
    shared_cache_blocks: int
    shared_cache_bytes: int


def core_settings(options: PoolOptions) -> CoreSettings:
    """Answer what the core is told; a pool without caching keeps no blocks."""
    blocks = 0 if options.segments == "direct" else 1
    return {
        "small_limit": max(blocks * options.small_limit, 1),  # direct: every request has a segment of its own
        "strategy": options.strategy,
        "stream_cache_blocks": blocks * options.stream_cache_blocks,
        "stream_cache_bytes": options.stream_cache_bytes,
        "shared_cache_blocks": blocks * options.shared_cache_blocks,
        "shared_cache_bytes": options.shared_cache_bytes,
    }


def warn_of_leaks(house: House) -> None:
    """Name the buffers still held when their pool is closed; freed ones that are still exported are not held."""
    core = house.core
    held = core.account(0).requested - core.exported_bytes
    if held <= 0:
        return
    tags = ", ".join(f"{tag!r} {format_size(nbytes)}" for tag, nbytes in core.tag_bytes().items())
    sites = ", ".join(f"{format_size(nbytes)} at {site}" for site, nbytes in held_by_site(core, 5))
    alarm(
        f"pool {house.flow.pool.name!r} was closed while buffers of {format_size(held)} were held"
        + (f" ({tags})" if tags else "")
        + (f", made {sites}" if sites else "")
        + "; they stay valid until they are freed",
        LeakWarning,
        level=4,
    )


def _tick(me: weakref.ref[House]) -> float | None:
    house = me()
    return None if house is None else house.look_after()


def _lasts(me: weakref.ref[House]) -> float | None:
    house = me()
    return None if house is None or house.released else TICK


def _died(me: weakref.ref[House], error: BaseException) -> None:
    house = me()
    if house is not None:
        house.break_down(error)
