"""The warning where nothing moves and nothing proves a deadlock."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncmem.errors import StallWarning
from asyncmem.facts import owner_table
from asyncmem.pool.alarm import alarm
from asyncmem.pool.holders import short_of, shortage, waiting_owner
from asyncmem.pool.owners import held_by

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
        held = held_by(opened.core)
        requests = [one for one in opened.core.requests() if not one["growing"]]
        owners = [
            waiting_owner(
                opened, one["owner"], one["request"], held=held.pop(one["owner"], 0) if one["owner"] else 0,
                waiting=one["nbytes"], age=one["age"],
            )
            for one in requests
        ]  # fmt: skip
        waiting = {one["owner"] for one in requests}
        short = (short_of(opened, opened.shares.get(one["account"], opened.pool), one["nbytes"]) for one in requests)
        text = f"pool {opened.name!r}: nothing was granted for {after:g} s, and nothing proves a deadlock\n"
        text += "\n".join([owner_table(owners), *(shortage(opened, one, waiting) for one in dict.fromkeys(short))])
        alarm(text, StallWarning, next((one.site for one in owners if one.site), None))
