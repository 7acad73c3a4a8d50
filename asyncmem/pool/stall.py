"""The warning where nothing moves and nothing proves a deadlock."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from asyncmem.errors import StallWarning
from asyncmem.facts import OwnerInfo, owner_table
from asyncmem.figures import format_size
from asyncmem.pool.alarm import alarm_at
from asyncmem.pool.owners import held_by, label

if TYPE_CHECKING:
    from asyncmem.pool.ports import Opened


class StallWatch:
    """Warns when nothing has been granted for `stall_after` seconds while requests wait; once for each stall."""

    def __init__(self, opened: Opened) -> None:
        self._pool = opened
        self._seen = -1
        self._since: float | None = None

    def look(self) -> None:
        """Look, a few times a second."""
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
        core = opened.core
        held = held_by(core)
        requests = [one for one in core.requests() if not one["growing"]]
        owners = [
            OwnerInfo(
                owner=label(core.named(one["owner"])), held=held.pop(one["owner"], 0), waiting=one["nbytes"],
                age=one["age"],
            )
            for one in requests
        ]  # fmt: skip
        text = f"pool {opened.name!r}: nothing was granted for {after:g} s, and nothing proves a deadlock\n"
        text += owner_table(owners) + _held_elsewhere(opened, held)
        site = next((one["request"]._site for one in requests if one["request"] is not None), None)
        alarm_at(text, StallWarning, site or _main_file())


def _held_elsewhere(opened: Opened, held: dict[int, int]) -> str:
    """Return lines about memory of those who do not wait."""
    core = opened.core
    rows = {label(core.named(owner)): nbytes for owner, nbytes in held.items() if owner}
    known = sum(nbytes for nbytes in rows.values())
    figures = {
        "exported": core.exported_bytes,
        "pinned": opened.pins.nbytes,
        "kept for captured graphs": opened.captures.nbytes,
    }
    rest = core.live() - known - sum(figures.values())
    rows |= {what: nbytes for what, nbytes in figures.items() if nbytes}
    if rest > 0:
        tags = sorted(core.tag_bytes().items(), key=lambda one: -one[1])[:3]
        tagged = ", ".join(f"{tag!r} {format_size(nbytes)}" for tag, nbytes in tags)
        rows["held in no block, or granted and never awaited" + (f" ({tagged})" if tagged else "")] = rest
    return "".join(f"\n  {format_size(nbytes)} {what}" for what, nbytes in rows.items() if nbytes > 0)


def _main_file() -> str:
    return f"{getattr(sys.modules.get('__main__'), '__file__', None) or '<the program>'}:1"
