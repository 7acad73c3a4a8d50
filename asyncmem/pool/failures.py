"""The errors of requests, made from what the scheduler says and what is known at that moment."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from asyncmem.errors import (
    DeadlockError,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    RequestCancelled,
    TooManyRequests,
)
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.figures import format_size
from asyncmem.pool.alarm import alarm, report
from asyncmem.pool.holders import TOP, held_by_site, short_of, shortage, top_tags, waiting_owner
from asyncmem.pool.snapshot import largest_hole, segment_infos, waiter_infos
from asyncmem.text import printable, quoted, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.core import Core, Request
    from asyncmem.facts import OwnerInfo
    from asyncmem.pool.ports import AnyShare, Opened

_TOP_OF_SNAPSHOT = 100
_REFUSED = 8  # of `asyncmem.core.Kind`
_PIECES: Final = "fragmentation"

_logger = logging.getLogger("asyncmem")
_logger.addHandler(logging.NullHandler())  # a library says nothing of its own accord


def error_of(opened: Opened, request: Request[Any], reason: str, cause: str, level: int, ahead: int) -> Exception:
    """Return the error of a request that has failed. It keeps nothing alive but numbers and names.

    Args:
        opened: The request's pool.
        request: The request.
        reason: The scheduler's name of it.
        cause: Why there is no memory, where that is the reason.
        level: The account of the pool, budget or lease that has no room.
        ahead: How many requests stood before it.
    """
    share, pool, asked = request._share, opened.name, request.nbytes
    match reason:
        case "expired":
            short = short_of(opened, share, asked)
            return PoolTimeout(
                pool=pool, asked=asked, timeout=request._timeout or 0.0, ahead=ahead,
                free=_free(opened, short), level=short._level,
            )  # fmt: skip
        case "cancelled":
            return RequestCancelled(pool=pool, asked=asked)
        case "too many":
            waiting, most = opened.core.scheduler.gauges()["waiting"], opened.options.max_waiting or 0
            return TooManyRequests(pool=pool, waiting=waiting, max_waiting=most, asked=asked)
        case "deadlock":
            return _deadlock(opened, request)
        case "closed":
            itself = share is not opened.pool and cast("Core | None", share._core) is None
            return (None if itself else opened.refusing) or PoolClosed(share.name, "it has been closed")
    return _out_of_memory(opened, request, cause, level)


def _deadlock(opened: Opened, request: Request[Any]) -> DeadlockError:
    core, share = opened.core, request._share
    stuck = core.scheduler.stuck()
    owners = [
        waiting_owner(opened, owner, core.request(number), held=held, waiting=nbytes, age=core.time - since)
        for owner, number, nbytes, held, since in stuck
    ]
    short = short_of(opened, share, request.nbytes)
    return DeadlockError(
        pool=opened.name, owners=owners, level=short._level,
        holders=shortage(opened, short, {owner for owner, *_ in stuck}),
        hints=[*_hints(owners, share.capacity()), "a larger limit", "fewer of these tasks at a time"],
    )  # fmt: skip


def _hints(owners: Sequence[OwnerInfo], most: int) -> list[str]:
    """Return what the owner that holds most could do, of those that hold something and could have all at once."""
    able = [one for one in owners if one.held and one.held + one.waiting <= most]
    if not able:
        return []
    first = max(able, key=lambda one: one.held)
    size = format_size(first.held + first.waiting)
    return [f"{printable(first.owner)} could take all it needs at once, with allocate_batch or a lease of {size}"]


def _free(opened: Opened, share: AnyShare) -> int:
    if share is opened.pool:
        counts = opened.core.counts()
        return counts.free + counts.cached
    return max(0, share._own_limit() - opened.core.account(share._account).live)


# -- out of memory -----------------------------------------------------------------------------------------------------


def _out_of_memory(opened: Opened, request: Request[Any], cause: str, level: int) -> OutOfMemoryError:
    facts = out_of_memory_facts(opened, request, cause, level)
    opened.core.note(_REFUSED, nbytes=request.nbytes, request=request)
    if opened.options.oom_snapshot is not None:
        content = _snapshot(opened, facts)
        opened.worker.submit(partial(_save, opened, content, opened.options.oom_snapshot))
    error = OutOfMemoryError(facts)
    # The words of the error and not the error, whose traceback would keep alive all that its frames hold.
    try:
        extra = {"pool": opened.name, "facts": facts}
        _logger.error("pool %s: %s", quoted(opened.name), str(error), extra=extra)
    except Exception as trouble:  # noqa: BLE001  # of the program's handlers, and no reason to keep others waiting
        report(trouble)
    return error


def out_of_memory_facts(
    opened: Opened, request: Request[Any], cause: str = "", level: int | None = None
) -> OutOfMemoryFacts:
    """Return all that is known about a request that finds no memory, of the share that has none for it."""
    core, asked = opened.core, request.nbytes
    gauges = core.scheduler.gauges()
    share = opened.shares.get(request._share._account if level is None else level, opened.pool)
    whole = share is opened.pool
    limit, live = share._own_limit(), core.account(share._account).live
    free = core.reserved() - core.live() if whole else limit - live
    if cause == "device" and gauges["coming"]:
        cause = "growth"
    elif not cause:
        cause = _cause(asked, limit, live, in_pieces=share._has_range or (whole and free >= asked))
    waiting = [one["nbytes"] for one in opened.requests_in(share) if one["id"] != request._id]
    facts: dict[str, Any] = {
        "asked": asked, "device": opened.device.name, "level": share._level, "limit": limit, "live": live, "free": free,
        "reserved": limit if share._has_range else live, "waiting": len(waiting), "waiting_bytes": sum(waiting),
        "largest_hole": core.largest(share._arena) if share._has_range else free,
        "holders": tuple(top_tags(opened, share)), "cause": cause, "advice": tuple(_advice(opened, share, cause)),
    }  # fmt: skip
    if whole:
        means = gauges["means"] | opened.executor.asked
        facts |= {
            "reserved": core.reserved(), "live": core.live(), "largest_hole": largest_hole(opened),
            "pending_fence_bytes": core.pending(), "device_free": opened.executor.memory.free,
            "sites": tuple(held_by_site(core, TOP)),
            "remedies": {name: count for name, count in means.items() if count},
        }  # fmt: skip
    return OutOfMemoryFacts(**facts)


def _cause(asked: int, limit: int, live: int, *, in_pieces: bool) -> str:
    if asked > limit:
        return "size"
    if asked > limit - live:
        return "limit"
    return _PIECES if in_pieces else "device"


_RAISE: Final = "raise the limit"
_TRY: Final = {
    "size": ("ask for at most {most}", _RAISE),
    _PIECES: ("the free memory is in pieces: allocate long-lived buffers first", "a larger segment_size"),
    "growth": ("await allocate_async, which waits for it", "pregrow"),
}
"""What to try, by the cause, where nothing else matters."""


def _advice(opened: Opened, share: AnyShare, cause: str) -> list[str]:
    if share._is_lease:
        return [*(["free what the lease served"] if cause != "size" else []), "lease more"]
    if cause in _TRY:
        tries = [one.format(most=format_size(share._own_limit())) for one in _TRY[cause]]
        return [one for one in tries if one != _RAISE or share._own_limit() < opened.total]
    if share is not opened.pool:
        waits = ["await allocate_async, which waits"] if share._may_wait else []
        return [f"free what budget {quoted(share.name)} holds", "raise its limit", *waits]
    if opened.core.live() == 0:
        kept = f"; {format_size(opened.min_free)} stay free for others (min_free)" if opened.min_free else ""
        return [f"other programs or other pools hold the device's memory{kept}", "a smaller limit here"]
    return ["await allocate_async, which waits for memory", "free buffers earlier", _RAISE]


def _snapshot(opened: Opened, facts: OutOfMemoryFacts) -> dict[str, object]:
    waiters = waiter_infos(opened.pool)
    return {
        "version": 1,
        "time": time.time(),
        "pool": opened.name,
        "facts": asdict(facts) | {"remedies": dict(facts.remedies)},
        "waiters": [{name: getattr(one, name) for name in ("owner", "nbytes", "age", "tag")} for one in waiters],
        "tags": top_tags(opened, opened.pool, _TOP_OF_SNAPSHOT),
        "sites": held_by_site(opened.core, _TOP_OF_SNAPSHOT),
    }


def _save(opened: Opened, content: dict[str, object], where: str) -> None:
    """Write a snapshot, over what is there, as a whole or not at all; warn of what goes wrong."""
    content["segments"] = [asdict(one) for one in segment_infos(opened)]
    try:
        path = _regular(Path(where))
        draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        draft.unlink(missing_ok=True)
        try:
            with draft.open("x", encoding="utf-8") as file:  # which follows no link
                file.write(to_json(content, indent=1))
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError, ValueError) as error:  # of a link to itself; of a name that no file can have
        alarm(f"the snapshot of an out-of-memory error could not be written: {error}", RuntimeWarning)


def _regular(path: Path) -> Path:
    """Return the file to write behind a link within its folder; refuse links out of it, devices and the like."""
    found = path.resolve()
    if found.parent != path.parent.resolve():
        raise OSError(f"{path} is a link out of its folder, to {found}")
    if found.exists() and not found.is_file():
        raise OSError(f"{path} is no regular file")
    return found
