"""What the parts of an open pool know of it: its shares, and what it consists of. `open_pool` puts it together."""

from __future__ import annotations

import sys
import threading
from copy import copy
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from asyncmem.core import GRANULE, Allocator
from asyncmem.pool.alarm import caller_site
from asyncmem.pool.latch import Latch
from asyncmem.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from typing import Any, Literal

    from asyncmem.core import Core, Retire
    from asyncmem.devices import Device
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.executor import Executor
    from asyncmem.pool.graph import Captures
    from asyncmem.pool.spilling import Spilling
    from asyncmem.pool.worker import Worker


class AnyShare(Allocator):
    """A pool, a budget or a lease, as the parts of the pool see it.

    Attributes:
        name: What messages and statistics call it.
    """

    name: str
    _may_wait = True  # requests queue when there is no room; a lease's fail, unless its own memory may move
    _is_lease = False  # it is a range of its own
    _laid_out = False  # buffers lie where a plan has them, and nowhere else
    _parent: AnyShare | None = None  # what this is a part of; None for a pool

    def __init__(self, name: str, parent: AnyShare | None = None) -> None:
        self.name = name
        self._parent = parent
        self._inside: dict[AnyShare, None] = {}  # the budgets that are parts of this, and of its parts
        self._served_by: Opened | None = None  # of a budget, and of a lease that was entered: its pool, or the fallback
        self._ended = False

    @property
    def _level(self) -> str:
        """What errors call it, with its kind."""
        return f"pool {quoted(self.name)}"

    @property
    def _has_range(self) -> bool:
        """Whether its memory comes from one range, as that of a lease and of all its parts."""
        return self._arena != -1

    @property
    def _opened(self) -> Opened:
        """The open pool that this is a part of; opens a pool that is not open yet.

        Raises:
            PoolClosed: It has been closed.
        """
        assert self._parent is not None
        return self._parent._opened

    def _open_core(self) -> Core:
        """Return the core, for a request.

        Raises:
            PoolClosed: It has been closed.
        """
        opened = self._opened
        if opened.refusing is not None:
            raise copy(opened.refusing)  # each has frames of its own, which it keeps
        return opened.core

    def _end(self) -> None:
        """End a budget or a lease, and the budgets inside; twice is fine."""
        opened = self._served_by
        if opened is None:
            return
        for inner in list(self._inside):
            inner._end()
        end = partial(opened.end_share, self, self._account)
        if self._ended:
            return
        self._ended = True
        opened.core.post(end)
        for share in self._lineage():
            share._inside.pop(self, None)

    def _lineage(self) -> Iterator[AnyShare]:
        """Yield this share and those that it is a part of, innermost first."""
        share: AnyShare | None = self
        while share is not None:
            yield share
            share = share._parent

    def capacity(self) -> int:
        """Return the most bytes that could ever be allocated here."""
        return min(share._own_limit() for share in self._lineage())

    def _own_limit(self) -> int:
        """Return this share's own limit in bytes."""
        raise NotImplementedError


class Opened:
    """An open pool, as its parts know it: what it consists of, its shares, and who works for it.

    Attributes:
        kind: How memory is got: "paged", or the device's kind of segments.
        closed: The error of a closed pool, or None.
        refusing: The error that newcomers get, or None.
        released: Whether all memory has gone back, and the worker has ended.
        shares: The pool and its open budgets and leases, by account; a lease that is dropped ends.
        host_pool: Returns the pool of the host's memory of a kind that goes with this one.
        copier: Returns the thread that makes copies which would hold up their callers; starts it at the first need.
        facts_of: Returns what is known about a request, by its number, that finds no memory.
    """

    name: str
    options: PoolOptions
    pool: AnyShare
    device: Device
    kind: str
    core: Core
    retire: Retire
    worker: Worker
    executor: Executor
    spilling: Spilling
    captures: Captures
    host_pool: Callable[[Literal["spilled", "on the host"]], Allocator]
    copier: Callable[[], Worker]
    facts_of: Callable[[int], OutOfMemoryFacts | None]

    def __init__(self, pool: AnyShare) -> None:
        self.pool = pool
        self.name = pool.name
        self.closed: Exception | None = None
        self.refusing: Exception | None = None
        self.released = False
        self.quota: Callable[[int, int], AbstractContextManager[int]] | None = None
        """Waits until the pool may have so many bytes more, up to so many; None where only the limit says that."""
        self.loop_blocking_calls = self.cpu_fallbacks = 0
        self.pins: dict[int, tuple[int, int]] = {}  # address and bytes of each pin
        self.give_back_hooks: set[Callable[[], object]] = set()
        """Each has a library give back memory that it keeps unused; called now and then while requests wait."""
        self.lock = threading.Lock()  # over what is below; finalizers post to the core instead of waiting for it
        self.shares = WeakValueDictionary[int, AnyShare]({0: pool})
        self.owner_blocks: list[None] = []  # one for each block of `pool.owner`: an interrupt finds a list whole
        self._last = threading.RLock()  # over what the worker is given last; re-entrant for finalizers

    def need_open(self) -> None:
        """Raise the error of a pool that is closed.

        Raises:
            PoolClosed: It is, also by the death of its worker or by a fork.
        """
        if self.closed is not None:
            raise copy(self.closed)

    @property
    def limit(self) -> int:
        """The limit in bytes, in whole pages where memory comes in pages, and else in whole granules."""
        unit = self.device.page if self.kind == "paged" else GRANULE
        return -(-self.options.ceiling(self.device.capacity) // unit) * unit

    @property
    def min_free(self) -> int:
        """Bytes of the device that stay free for others."""
        return self.options.spared(self.device.kind)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the blocks that are pinned, each counted once."""
        return sum(nbytes for _, nbytes in set(self.pins.copy().values()))

    # -- shares ------------------------------------------------------------------------------------------------------

    def share_at(self, account: int) -> AnyShare:
        """Return the open budget or lease of an account; else the pool, whose that of a closed one is."""
        return self.shares.get(account, self.pool)

    def requests_in(self, share: AnyShare) -> list[dict[str, Any]]:
        """Return the requests that wait or grow in a share and its parts, in the order of arrival."""
        # Another thread may have closed one of them since: then its requests are about to fail, and are the pool's.
        return [one for one in self.core.requests() if share in self.share_at(one["account"])._lineage()]

    def end_share(self, share: AnyShare, account: int) -> bool:
        """Close a budget or a lease, and forget it; return True, for `Core.post`, which calls again after an interrupt.

        Its account ends once nothing of it is held.
        """
        if self.shares.get(account) is share:
            del self.shares[account]
        if share._is_lease:
            self.spilling.move_to_parent(share)
        share._end_share()
        return True

    # -- what is noted on buffers ------------------------------------------------------------------------------------

    def observe(self) -> None:
        """Set whether the core takes notes on buffers, and whether each request goes past its fast path."""
        options = self.options
        noting = options.track or self.device.checker is not None or bool(self.owner_blocks)
        self.core.call_site = caller_site if options.track else None
        self.core.observe_all(noting, options.segments == "direct" or self.captures.open)
        self.core.watch_captures = self.core.can_capture and options.watch_captures

    # -- work for the threads ----------------------------------------------------------------------------------------

    def run(self, call: Callable[[], object]) -> Latch[object]:
        """Submit a call to the worker, and return the latch of its outcome."""
        latch = Latch(call)
        self.run_last(latch)
        return latch

    def run_last(self, job: Callable[[], object]) -> None:
        """Run a job on the worker, or on a thread of its own once the worker ends or has died."""
        with self._last:  # until all is released the worker goes on, and it does what it has been given before it ends
            if self.worker.alive and not self.released:
                self.worker.submit(job)
                return
        if not sys.is_finalizing():  # then the start would wait for ever, and the process gives all back
            threading.Thread(target=job, name=f"{self.name} is closed", daemon=True).start()
