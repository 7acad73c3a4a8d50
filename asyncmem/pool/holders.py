"""The errors of requests, and the warnings of a pool: who waits for memory, who holds it, and where it is short."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from asyncmem.core import LOG_ROW, Kind
from asyncmem.errors import (
    DeadlockError,
    LeakWarning,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    RequestCancelled,
    StallWarning,
    TooManyRequests,
)
from asyncmem.facts import OutOfMemoryFacts, OwnerInfo, owner_table
from asyncmem.figures import format_size
from asyncmem.lazy import np
from asyncmem.pool.alarm import alarm, report, waiting_site
from asyncmem.pool.owners import held_by, label, name_of
from asyncmem.pool.snapshot import largest_hole, segment_infos, waiter_infos
from asyncmem.text import printable, quoted, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from asyncmem.core import Core, Request, Witness
    from asyncmem.pool.latch import Latch
    from asyncmem.pool.ports import AnyShare, Opened

TOP: Final = 5
"""Tags and lines that errors and warnings name."""

_TOP_OF_SNAPSHOT: Final = 100
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
        waiting_owner(opened, owner, core.request(number), held, nbytes, core.time - since)
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
    most = opened.core.reserved() if share is opened.pool else share._own_limit()
    return max(0, most - opened.core.account(share._account).live)


# -- out of memory -----------------------------------------------------------------------------------------------------


def _out_of_memory(opened: Opened, request: Request[Any], cause: str, level: int) -> OutOfMemoryError:
    facts = out_of_memory_facts(opened, request, cause, level)
    opened.core.note(Kind.OUT_OF_MEMORY, nbytes=request.nbytes, request=request)
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
    share = opened.share_at(request._share._account if level is None else level)
    whole = share is opened.pool
    limit, live = share._own_limit(), core.account(share._account).live
    free = _free(opened, share)
    if cause == "device" and gauges["coming"]:
        cause = "growth"
    elif not cause:
        cause = _cause(asked, limit, live, in_pieces=share._has_range or (whole and free >= asked))
    waiting = [one["nbytes"] for one in opened.requests_in(share) if one["id"] != request._id]
    facts: dict[str, Any] = {
        "asked": asked, "device": opened.device.name, "level": share._level, "limit": limit, "live": live, "free": free,
        "reserved": limit if share._has_range else live, "waiting": len(waiting), "waiting_bytes": sum(waiting),
        "largest_hole": core.largest(share._arena) if share._has_range else free,
        "holders": tuple(tags_of(opened, share)), "cause": cause, "advice": tuple(_advice(opened, share, cause, asked)),
    }  # fmt: skip
    if whole:
        means = gauges["means"] | opened.executor.asked
        facts |= {
            "reserved": core.reserved(), "largest_hole": largest_hole(opened),
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


def _advice(opened: Opened, share: AnyShare, cause: str, asked: int) -> list[str]:
    if share._is_lease:
        enough = share._own_limit() + asked - opened.core.largest(share._arena)
        return [*(["free what the lease served"] if cause != "size" else []), f"lease {format_size(enough)}"]
    if cause in _TRY:
        tries = [one.format(most=format_size(share._own_limit())) for one in _TRY[cause]]
        return [one for one in tries if one != _RAISE or share._own_limit() < opened.device.capacity]
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
        "tags": tags_of(opened, opened.pool, _TOP_OF_SNAPSHOT),
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
    if found.is_symlink():
        raise OSError(f"{path} is a link to itself")
    if found.parent != path.parent.resolve():
        raise OSError(f"{path} is a link out of its folder, to {found}")
    if found.exists() and not found.is_file():
        raise OSError(f"{path} is no regular file")
    return found


# -- who holds what ----------------------------------------------------------------------------------------------------


def waiting_owner(
    opened: Opened, number: int, request: Request[Any] | None, held: int, waiting: int, age: float
) -> OwnerInfo:
    """Return an owner that waits, with its name and the line of the program where it does."""
    owner = opened.core.named(number)
    site = getattr(request, "_site", None) or (waiting_site(owner) if owner is not None else None)
    return OwnerInfo(owner=name_of(opened.core, number), held=held, waiting=waiting, age=age, site=site or "")


def short_of(opened: Opened, share: AnyShare, nbytes: int) -> AnyShare:
    """Return the innermost level that has no room for a request in a share: itself, or one around it, or the pool."""
    core = opened.core
    for one in share._lineage():
        full = opened.shares.get(one._account) is one and nbytes > one._own_limit() - core.account(one._account).live
        if full or one._is_lease:  # nothing around a lease bounds what lies in it
            return one
    return opened.pool


def held_beside(opened: Opened, share: AnyShare, waiting: Collection[int] = ()) -> dict[str, int]:
    """Return the bytes of a share's live buffers by what holds them, besides the waiting owners."""
    core = opened.core
    held = held_by(core, _accounts(opened, share, whole=False))
    rows = {label(core.named(owner)): nbytes for owner, nbytes in held.items() if owner not in waiting}
    known = sum(held.values())
    others = "held in no block, or granted and never awaited"
    if share is opened.pool:
        figures = {
            "pinned": opened.pinned_bytes,
            "kept for captured graphs": opened.captures.nbytes,
            "spillable, and in no use": opened.spilling.idle_bytes(),
        }
        rows |= figures
        known += sum(figures.values()) + core.exported_bytes
    else:
        others += ", or pinned, exported or spillable"
    rows[others] = core.account(share._account).live - known
    return {what: nbytes for what, nbytes in rows.items() if nbytes > 0}


def tags_of(opened: Opened, share: AnyShare, most: int = TOP) -> list[tuple[str, int]]:
    """Return the tags that hold most of a share, with their bytes, largest first; of a pool as it is recorded."""
    whole = share is opened.pool
    if whole and (recorded := held_by_tag(opened.core, most)):
        return recorded
    return list(opened.core.tag_bytes(None if whole else _accounts(opened, share, whole=True)).items())[:most]


def shortage(opened: Opened, share: AnyShare, waiting: Collection[int]) -> str:
    """Return lines: a share is full, and what holds its memory besides the waiting owners."""
    live = opened.core.account(share._account).live
    head = f"{share._level}: limit {format_size(share._own_limit())}, live {format_size(live)}{_tags(opened, share)}"
    rows = held_beside(opened, share, waiting)
    if share is opened.pool:
        rows["freed while exported"] = opened.core.exported_bytes
        rows["more, spilled to the host"] = opened.spilling.nbytes
    return "\n".join([head, *(f"  {format_size(nbytes)} {printable(what)}" for what, nbytes in rows.items() if nbytes)])


def _accounts(opened: Opened, share: AnyShare, *, whole: bool) -> set[int]:
    """Return the accounts of a share and its parts; those inside of a lease only for itself, or where `whole`."""
    return {
        account
        for account, one in list(opened.shares.items())
        if share in one._lineage() and (whole or share._has_range or not one._has_range)
    }


def held_by_tag(core: Core, most: int) -> list[tuple[str, int]]:
    """Return the tags that hold most and their bytes, as far as that is recorded."""
    return _held_by(core, "tag", lambda witness, number: witness.tags[number], most)


def held_by_site(core: Core, most: int) -> list[tuple[str, int]]:
    """Return the lines that hold most ("file:line") and their bytes, as far as that is recorded."""
    return _held_by(core, "site", _line, most)


def _line(witness: Witness, site: int) -> str:
    file, line, _ = witness.places[witness.sites[site][0]]
    return f"{file}:{line}"


def _held_by(core: Core, column: str, name: Callable[[Witness, int], str], most: int) -> list[tuple[str, int]]:
    witness = core.witness
    if witness is None:
        return []
    rows = np.frombuffer(core.held(), LOG_ROW)
    numbers, places = np.unique(rows[column], return_inverse=True)
    sums = np.bincount(places, rows["nbytes"], len(numbers))
    held: Counter[str] = Counter()
    for number, nbytes in zip(numbers.tolist(), sums.tolist(), strict=True):
        if number:
            held[name(witness, number)] += int(nbytes)
    return held.most_common(most)


def warn_of_leaks(ends: Iterable[tuple[Opened, Latch[object], bool]]) -> None:
    """Name the buffers still held in pools that were closed just now; freed ones that are still exported are not held.

    Args:
        ends: Each pool, what opens at its end, and whether it was not closed before.
    """
    for opened, end, first in ends:
        if first:
            _warn_of_leaks(opened, ended=end.done)


def _warn_of_leaks(opened: Opened, *, ended: bool) -> None:
    core = opened.core
    if not ended:
        text = "its worker is still in a call of the device; it ends after that"
        alarm(f"pool {quoted(opened.name)}: {text}", RuntimeWarning)
    held = core.account(0).requested - core.exported_bytes
    if held <= 0:
        return
    lines = held_by_site(core, TOP)
    sites = ", ".join(f"{format_size(nbytes)} at {printable(site)}" for site, nbytes in lines)
    rows = held_beside(opened, opened.pool)
    alarm(
        f"pool {quoted(opened.name)} was closed while buffers of {format_size(held)} were held"
        + _tags(opened, opened.pool)
        + (f", made {sites}" if sites else "")
        + f": {', '.join(f'{format_size(nbytes)} {printable(what)}' for what, nbytes in rows.items())}"
        + "; they stay valid until they are freed",
        LeakWarning,
        lines[0][0] if lines else None,
    )


def _tags(opened: Opened, share: AnyShare) -> str:
    tags = ", ".join(f"{quoted(tag)} {format_size(nbytes)}" for tag, nbytes in tags_of(opened, share))
    return f" ({tags})" if tags else ""


class StallWatch:
    """Warns when nothing has been granted for `stall_after` seconds while requests wait; once for each stall."""

    def __init__(self, opened: Opened) -> None:
        self._pool = opened
        self._seen = -1
        self._since: float | None = None

    def look(self) -> None:
        """Check for requests that have waited too long; called a few times a second."""
        opened = self._pool
        gauges = opened.core.scheduler.gauges()
        now = time.monotonic()
        after = opened.options.stall_after
        if not gauges["waiting"] or gauges["progress"] != self._seen or self._since is None:
            self._seen, self._since = gauges["progress"], now
        elif after is not None and now - self._since >= after:
            self._since = None
            self._warn(after)

    def _warn(self, after: float) -> None:
        opened = self._pool
        held = held_by(opened.core)
        requests = [one for one in opened.core.requests() if not one["growing"]]
        owners = [
            waiting_owner(opened, one["owner"], one["request"], held.pop(one["owner"], 0), one["nbytes"], one["age"])
            for one in requests
        ]
        waiting = {one["owner"] for one in requests}
        short = (short_of(opened, opened.share_at(one["account"]), one["nbytes"]) for one in requests)
        text = f"pool {quoted(opened.name)}: nothing was granted for {after:g} s, and nothing proves a deadlock\n"
        text += "\n".join([owner_table(owners), *(shortage(opened, one, waiting) for one in dict.fromkeys(short))])
        alarm(text, StallWarning, next((one.site for one in owners if one.site), None))
