"""What a process says about its pools: plain data, taken without holding them up."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Final, TypedDict

from asyncmem.errors import PoolClosed
from asyncmem.pool.holders import held_by_site, held_by_tag
from asyncmem.pool.open_pool import open_pools
from asyncmem.pool.snapshot import waiter_infos

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncmem.pool.open_pool import OpenPool
    from asyncmem.stats import Figure

FORMAT: Final = 1
"""Of what is said; readers refuse another."""

_SHOWN: Final = 10
_MANY: Final = 10_000
"""Of more buffers it is not told who holds them: to go through them would hold the pool up for milliseconds."""


class WaiterLook(TypedDict):
    """A request that waits."""

    owner: str
    nbytes: int
    age: float
    """Seconds since it was made."""
    tag: str | None
    growing: bool
    """Whether it waits for the device alone, and not for other holders of memory."""


class Holder(TypedDict):
    """What a tag or a line holds."""

    name: str
    nbytes: int


class PoolLook(TypedDict):
    """A pool that has memory."""

    closed: bool
    """Whether it is closed, and only goes on for the buffers that are held."""
    stats: dict[str, Figure]
    """`PoolStats`, by names."""
    budgets: list[dict[str, Figure]]
    """Likewise of its budgets."""
    waiters: list[WaiterLook]
    """Who has waited longest."""
    tags: list[Holder]
    """Which tags hold most, as far as that is recorded."""
    sites: list[Holder]
    """Which lines do, likewise."""


class ProcessLook(TypedDict):
    """A process."""

    format: int
    process: int
    program: list[str]
    """Its arguments."""
    asyncmem: str
    """Version."""
    time: float
    """When this was, in seconds since 1970."""
    pools: list[PoolLook]


def look() -> ProcessLook:
    """Look at all pools of this process, by their names. None is held up for longer than about a millisecond."""
    from asyncmem import __version__

    found = sorted(open_pools(), key=lambda opened: opened.name)
    return {
        "format": FORMAT,
        "process": os.getpid(),
        "program": list(sys.argv),
        "asyncmem": __version__,
        "time": time.time(),
        "pools": [_look_at(opened) for opened in found],
    }


def _look_at(opened: OpenPool) -> PoolLook:
    core = opened.core
    stats = opened.pool.stats()
    few = stats.active_buffers <= _MANY
    return {
        "closed": opened.closed is not None,
        "stats": stats.as_dict(),
        "budgets": list(_budgets(opened)),
        "waiters": [
            {"owner": one.owner, "nbytes": one.nbytes, "age": one.age, "tag": one.tag, "growing": one.growing}
            for one in islice(waiter_infos(opened.pool), _SHOWN)
        ],
        "tags": _holders(held_by_tag(core, _SHOWN) if few else []),
        "sites": _holders(held_by_site(core, _SHOWN) if few else []),
    }


def _budgets(opened: OpenPool) -> Iterator[dict[str, Figure]]:
    for budget in opened.budgets[:_SHOWN]:
        with suppress(PoolClosed):  # by another thread, since
            yield budget.stats().as_dict()


def _holders(held: list[tuple[str, int]]) -> list[Holder]:
    return [{"name": name, "nbytes": nbytes} for name, nbytes in held]
