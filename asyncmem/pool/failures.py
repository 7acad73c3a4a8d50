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
from asyncmem.pool.holders import held_by_site, held_by_tag, short_of, shortage, tags_of, waiting_owner
from asyncmem.pool.owners import label
from asyncmem.pool.snapshot import largest_hole, segment_infos
from asyncmem.text import printable, quoted, to_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.core import Core, Request
    from asyncmem.facts import OwnerInfo
    from asyncmem.pool.ports import AnyShare, Opened

_TOP = 5  # tags and lines named in an error
_TOP_OF_SNAPSHOT = 100

_logger = logging.getLogger("asyncmem")
_logger.addHandler(logging.NullHandler())  # a library says nothing of its own accord


class Failures:
    """Makes the errors of one pool's requests. None of them keeps anything alive but numbers and names."""

    def __init__(self, opened: Opened) -> None:
        self._pool = opened

    def of(self, request: Request[Any], reason: str, cause: str, level: int, ahead: int) -> Exception:
        """Return the error of a request that has failed for a reason of the scheduler's.

        Args:
            request: The request.
            reason: The scheduler's name of it.
            cause: Why there is no memory, where that is the reason.
            level: The account of the pool, budget or lease that has no room.
            ahead: How many requests stood before it.
        """
        opened, core = self._pool, self._pool.core
        match reason:
            case "expired":
                share = short_of(opened, request._share, request.nbytes) if request._share._account else opened.pool
                return PoolTimeout(
                    pool=opened.name, asked=request.nbytes, timeout=request._timeout or 0.0, ahead=ahead,
                    free=_free(opened, share), level=share._level,
                )  # fmt: skip
            case "cancelled":
                return RequestCancelled(pool=opened.name, asked=request.nbytes)
            case "too many":
                waiting = core.scheduler.gauges()["waiting"]
                most = opened.options.max_waiting or 0
                return TooManyRequests(pool=opened.name, waiting=waiting, max_waiting=most, asked=request.nbytes)
            case "deadlock":
                return self._deadlock(request)
            case "closed":
                return self._closed(request._share)
        return self._out_of_memory(request, cause, level)

    def _closed(self, share: AnyShare) -> Exception:
        itself = share is not self._pool.pool and cast("Core | None", share._core) is None
        why = None if itself else self._pool.refusing
        return why or PoolClosed(share.name, "it has been closed")

    # -- out of memory -----------------------------------------------------------------------------------------------

    def _out_of_memory(self, request: Request[Any], cause: str, level: int) -> OutOfMemoryError:
        opened = self._pool
        facts = self.out_of_memory_facts(request, cause, level)
        if opened.core.logged:
            opened.core.note(_REFUSED, nbytes=request.nbytes, request=request)
        if opened.options.oom_snapshot is not None:
            content = self._snapshot(request, facts)
            opened.worker.submit(partial(_save, opened, content, opened.options.oom_snapshot))
        error = OutOfMemoryError(facts)
        _log(error, opened.name)
        return error

    def out_of_memory_facts(self, request: Request[Any], cause: str = "", level: int | None = None) -> OutOfMemoryFacts:
        """Return all that is known about a request that finds no memory, of the share that has none for it."""
        opened, core = self._pool, self._pool.core
        share = opened.shares.get(request._share._account if level is None else level, opened.pool)
        waiting = [one for one in core.requests() if one["id"] != request._id]
        free = core.reserved() - core.live()
        if cause == "device" and core.scheduler.gauges()["coming"]:
            cause = "growth"
        common: dict[str, Any] = {
            "asked": request.nbytes, "device": opened.device.name, "limit": share._own_limit(),
            "level": share._level, "cause": cause or _cause(opened, request, share),
        }  # fmt: skip
        advice = tuple(_advice(opened, request, share, common["cause"]))
        if share is not opened.pool:
            counts = core.account(share._account)
            within = [one for one in opened.requests_in(share) if one["id"] != request._id]
            return OutOfMemoryFacts(
                **common, reserved=share._own_limit() if share._has_range else counts.live, live=counts.live,
                free=share._own_limit() - counts.live,
                largest_hole=core.largest(share._arena) if share._has_range else share._own_limit() - counts.live,
                waiting=len(within), waiting_bytes=sum(one["nbytes"] for one in within),
                holders=tuple(tags_of(opened, share)), advice=advice,
            )  # fmt: skip
        means = core.scheduler.gauges()["means"] | opened.executor.asked
        return OutOfMemoryFacts(
            **common, reserved=core.reserved(), live=core.live(), free=free, largest_hole=largest_hole(opened),
            pending_fence_bytes=core.pending(), device_free=opened.executor.memory.free, waiting=len(waiting),
            waiting_bytes=sum(one["nbytes"] for one in waiting),
            holders=tuple(held_by_tag(core, _TOP) or tags_of(opened, share)),
            sites=tuple(held_by_site(core, _TOP)), remedies={name: count for name, count in means.items() if count},
            advice=advice,
        )  # fmt: skip

    def _snapshot(self, refused: Request[Any], facts: OutOfMemoryFacts) -> dict[str, object]:
        core = self._pool.core
        return {
            "version": 1,
            "time": time.time(),
            "pool": self._pool.name,
            "facts": asdict(facts) | {"remedies": dict(facts.remedies)},
            "waiters": [
                {
                    "owner": label(core.named(one["owner"])), "nbytes": one["nbytes"], "age": one["age"],
                    "tag": one["request"].tag if one["request"] is not None else None,
                }
                for one in core.requests()
                if one["id"] != refused._id
            ],
            "tags": held_by_tag(core, _TOP_OF_SNAPSHOT) or tags_of(self._pool, self._pool.pool, _TOP_OF_SNAPSHOT),
            "sites": held_by_site(core, _TOP_OF_SNAPSHOT),
        }  # fmt: skip

    # -- deadlocks ---------------------------------------------------------------------------------------------------

    def _deadlock(self, request: Request[Any]) -> DeadlockError:
        opened, core = self._pool, self._pool.core
        stuck = core.scheduler.stuck()
        owners = [
            waiting_owner(opened, owner, core.request(number), held=held, waiting=nbytes, age=core.time - since)
            for owner, number, nbytes, held, since in stuck
        ]
        share = short_of(opened, request._share, request.nbytes)
        return DeadlockError(
            pool=opened.name, owners=owners, level=share._level,
            holders=shortage(opened, share, {owner for owner, *_ in stuck}),
            hints=[*_hints(owners, request._share.capacity()), "a larger limit", "fewer of these tasks at a time"],
        )  # fmt: skip


_REFUSED = 8  # of `asyncmem.core.Kind`


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


def _cause(opened: Opened, request: Request[Any], share: AnyShare) -> str:
    core = opened.core
    if request.nbytes > share._own_limit():
        return "size"
    room = share._own_limit() - core.account(share._account).live
    if share._has_range or (share is opened.pool and core.reserved() - core.live() >= request.nbytes):
        return "limit" if request.nbytes > room else "fragmentation"
    return "limit" if request.nbytes > room else "device"


RAISE: Final = "raise the limit"
_TRY: Final = {
    "size": ("ask for at most {most}", RAISE),
    "fragmentation": ("the free memory is in pieces: allocate long-lived buffers first", "a larger segment_size"),
    "growth": ("await allocate_async, which waits for it", "pregrow"),
}
"""What to try, by the cause, where nothing else matters."""


def _advice(opened: Opened, request: Request[Any], share: AnyShare, cause: str) -> list[str]:
    if share._is_lease:
        return [*(["free what the lease served"] if cause != "size" else []), "lease more"]
    if cause in _TRY:
        tries = [one.format(most=format_size(share._own_limit())) for one in _TRY[cause]]
        return [one for one in tries if one != RAISE or share._own_limit() < opened.total]
    if share is not opened.pool:
        waits = ["await allocate_async, which waits"] if share._may_wait else []
        return [f"free what budget {quoted(share.name)} holds", "raise its limit", *waits]
    if opened.core.live() == 0:
        kept = f"; {format_size(opened.min_free)} stay free for others (min_free)" if opened.min_free else ""
        return [f"other programs or other pools hold the device's memory{kept}", "a smaller limit here"]
    del request
    return ["await allocate_async, which waits for memory", "free buffers earlier", RAISE]


def _log(error: OutOfMemoryError, pool: str) -> None:
    # The words of the error and not the error, whose traceback would keep alive all that its frames hold.
    try:
        _logger.error("pool %s: %s", quoted(pool), str(error), extra={"pool": pool, "facts": error.facts})
    except Exception as trouble:  # noqa: BLE001  # of the program's handlers, and no reason to keep others waiting
        report(trouble)


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
