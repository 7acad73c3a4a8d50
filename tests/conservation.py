"""What must hold for a pool after everything is freed: nothing lost, no request left, nothing given out twice."""

import gc

from asyncmem.pool import AsyncMemoryPool
from asyncmem.pool.share import Share


class NotConserved(AssertionError):
    """Bytes or waiters are missing, or were counted twice."""


def whole(pool: AsyncMemoryPool, *, live: int = 0) -> None:
    """Raise `NotConserved` unless the pool is as it should be when only `live` bytes are still held.

    Garbage is collected first where more than that is held: a cancelled task's traceback may still own a buffer.
    """
    pool.check()
    idle(pool, live=live)


def idle(share: Share, *, live: int = 0) -> None:
    """Raise `NotConserved` where a pool, budget or lease does not hold `live` bytes, has waiters or broke its limit."""
    stats = share.stats()
    if stats.allocated_bytes != live:
        gc.collect()
        stats = share.stats()
    if stats.allocated_bytes != live:
        raise NotConserved(f"{stats.allocated_bytes - live} bytes are still held by {stats.active_buffers} buffers")
    if stats.waiting or stats.waiting_bytes:
        raise NotConserved(f"{stats.waiting} requests still wait for {stats.waiting_bytes} bytes")
    if stats.growing or stats.growing_bytes:
        raise NotConserved(f"memory is still made for {stats.growing} requests of {stats.growing_bytes} bytes")
    within_limit(share)


def within_limit(share: Share) -> None:
    """Raise `NotConserved` if more than the limit has ever been given out or reserved."""
    stats = share.stats()
    if stats.limit is None:
        return
    most = max(stats.peak_allocated, stats.peak_reserved)
    if most > stats.limit:
        raise NotConserved(f"{most} bytes were out at once, {most - stats.limit} more than the limit allows")


async def refillable(share: Share, nbytes: int, *, timeout: float = 60.0) -> None:
    """Take `nbytes` in one piece and give them back: what was lost anywhere would be missing here.

    Raises:
        PoolTimeout: They could not be had within `timeout` seconds.
    """
    async with share.allocate_async(nbytes, timeout=timeout):
        pass
