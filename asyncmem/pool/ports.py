"""What the parts of an open pool know of it: its shares, and what it consists of. `open_pool` puts it together."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Protocol

from asyncmem.core import GRANULE, Allocator
from asyncmem.pool.latch import Latch
from asyncmem.pool.loops import running_loop
from asyncmem.pool.owners import named_owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncmem.core import Buffer, Core, Retire
    from asyncmem.devices import Device
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.executor import Executor
    from asyncmem.pool.graph import Captures
    from asyncmem.pool.pins import Pins
    from asyncmem.pool.spilling import Spilling


class AnyShare(Allocator):
    """A pool, a budget or a lease, as the parts of the pool see it.

    Attributes:
        name: What messages and statistics call it.
        parent: What this is a part of; None for a pool.
        may_wait: Whether requests queue when there is no room; a lease's fail, unless its own memory may move.
        is_lease: Whether it is a range of its own.
        laid_out: Whether buffers lie where a plan has them, and nowhere else.
        inside: The budgets that are parts of this, and of its parts.
    """

    name: str
    may_wait = True
    is_lease = False
    laid_out = False
    parent: AnyShare | None = None

    def __init__(self, name: str, parent: AnyShare | None = None) -> None:
        self.name = name
        self.parent = parent
        self.inside: dict[AnyShare, None] = {}

    @property
    def level(self) -> str:
        """What errors call it, with its kind."""
        return f"pool {self.name!r}"

    @property
    def has_range(self) -> bool:
        """Whether its memory comes from one range, as that of a lease and of all its parts."""
        return self._arena != -1

    @property
    def _opened(self) -> Opened:
        """The open pool that this is a part of; opens a pool that is not open yet.

        Raises:
            PoolClosed: It has been closed.
        """
        assert self.parent is not None
        return self.parent._opened

    def _open_core(self) -> Core:
        """Return the core, for a request.

        Raises:
            PoolClosed: It has been closed.
        """
        opened = self._opened
        if opened.refusing is not None:
            raise opened.refusing
        return opened.core

    def lineage(self) -> Iterator[AnyShare]:
        """Go through this share and those that it is a part of, innermost first."""
        share: AnyShare | None = self
        while share is not None:
            yield share
            share = share.parent

    def capacity(self) -> int:
        """Return the most bytes that could ever be had here."""
        return min(share.own_limit() for share in self.lineage())

    def own_limit(self) -> int:
        """Return this share's own limit in bytes."""
        raise NotImplementedError


class WorkerLike(Protocol):
    """What a pool asks of its worker."""

    @property
    def alive(self) -> bool: ...
    def start(self) -> None: ...
    def submit(self, job: Callable[[], None]) -> None: ...
    def close(self, timeout: float | None = None) -> bool: ...


class Opened:
    """An open pool, as its parts know it: what it consists of, its shares, and who works for it.

    Attributes:
        closed: The error of a closed pool, or None.
        refusing: The error that newcomers get, or None.
        released: Whether all memory has gone back, and the worker has ended.
        shares: The pool and its open budgets and leases, by account.
        counted: The counters at the last reset.
        total: The device's memory in bytes.
        host_memory: Returns the pool of page-locked memory that this one's moves to.
        fallback_memory: Returns the pool of ordinary memory that stands in for this one.
        copier: Returns the thread that makes copies which would hold up their callers; starts it at the first need.
        facts_of: Returns what is known about a request, by its number, that finds no memory.
    """

    name: str
    options: PoolOptions
    min_free: int
    pool: AnyShare
    device: Device
    core: Core
    retire: Retire
    worker: WorkerLike
    executor: Executor
    spilling: Spilling
    captures: Captures
    pins: Pins
    total: int
    host_memory: Callable[[], Allocator]
    fallback_memory: Callable[[], Allocator]
    copier: Callable[[], WorkerLike]
    facts_of: Callable[[int], OutOfMemoryFacts | None]

    def __init__(self, pool: AnyShare) -> None:
        self.pool = pool
        self.name = pool.name
        self.closed: Exception | None = None
        self.refusing: Exception | None = None
        self.released = False
        self.loop_blocking_calls = self.cpu_fallbacks = 0
        self.counted: dict[str, float] = {}
        self.lock = threading.Lock()  # over what is below; finalizers post to the core instead of waiting for it
        self.shares: dict[int, AnyShare] = {0: pool}
        self._ended_accounts: list[int] = []  # of closed budgets and leases, while something below them is held
        self._owner_blocks = 0
        self._last = threading.RLock()  # over what the worker is given last; re-entrant for finalizers

    @property
    def limit(self) -> int:
        """The limit in bytes, in whole granules."""
        return -(-self.options.ceiling(self.total) // GRANULE) * GRANULE

    # -- shares ------------------------------------------------------------------------------------------------------

    def share_of(self, buffer: Buffer) -> AnyShare:
        """Return the pool, budget or lease that a buffer is charged to."""
        return self.shares.get(buffer._account, self.pool)

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

    # -- who calls, and for what stream ------------------------------------------------------------------------------

    def on_loop(self) -> bool:
        """Return whether an event loop runs on this thread."""
        return running_loop(self.core.loop) is not None

    def stream_index(self, stream: object) -> int:
        """Return the core's number of a stream; None is the device's default stream."""
        return 0 if stream is None else self.retire.register(self.device.stream_of(stream))

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

    # -- work for the threads ----------------------------------------------------------------------------------------

    def run(self, call: Callable[[], object]) -> Latch[object]:
        """Have the worker make a call, and return what to wait on."""
        latch = Latch(call)
        self.run_last(latch)
        return latch

    def run_last(self, job: Callable[[], None]) -> None:
        """Have a job run: by the worker, or by a thread of its own where that ends or has died."""
        with self._last:  # until all is released the worker goes on, and it does what it has been given before it ends
            if self.worker.alive and not self.released:
                self.worker.submit(job)
                return
        if not sys.is_finalizing():  # then the start would wait for ever, and the process gives all back
            threading.Thread(target=job, name=f"{self.name} is closed", daemon=True).start()
