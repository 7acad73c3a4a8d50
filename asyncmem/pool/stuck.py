"""Watching for waits that cannot end: the proof of a deadlock, and the warning where there is no proof."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncmem.engine.deadlock import Claim, Space, stuck
from asyncmem.errors import DeadlockError, StallWarning
from asyncmem.facts import OwnerInfo, owner_table
from asyncmem.pool.alarm import alarm
from asyncmem.pool.holdings import current_owner, label

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from asyncmem.pool.flow import Flow
    from asyncmem.pool.share import Share
    from asyncmem.pool.waiting import Waiting


class DeadlockWatch:
    """Looks at who waits and who holds, for one pool. All methods are called with the turn held."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._seen = 0
        self._since: float | None = None

    def asleep(self, waiting: Waiting) -> None:
        """Note who sleeps on a request; if that owner also holds memory, see whether anybody can still go on.

        The youngest of those who cannot gets `DeadlockError`; its blocks end, and the others go on.
        """
        waiting.owner = owner = current_owner(waiting.home)
        if len(self._flow.pool.holdings):
            for share in waiting.share.lineage():
                if share.holdings.of(owner):
                    self._resolve(share)

    def follows(self, owner: Hashable, share: Share) -> None:
        """Hear that somebody waits for another one to bring spilled memory home; see whether that closes a circle."""
        for one in share.lineage():
            if one.holdings.of(owner):
                self._resolve(one)

    def overtaken(self) -> None:
        """Look again, because a grant may have used up what may overtake the head, and so barred others."""
        if len(self._flow.pool.holdings):
            self._resolve(self._flow.pool)

    def _resolve(self, share: Share) -> None:
        # A victim is expected to free what it holds; if that is not enough for the others, there is another.
        while lost := self._lost(share):
            victim = max(lost, key=lambda one: one.seq)
            error = DeadlockError(pool=share.name, owners=owners_of(lost), hints=_hints(lost))
            for tally in victim.tallies():
                tally.deadlocks += 1
            self._flow.withdraw(victim, error)

    def _lost(self, share: Share) -> list[Waiting]:
        sleeping = [one for one in self._flow.waiters() if one.owner is not None and share in one.share.lineage()]
        sleeping.sort(key=lambda one: one.seq)
        queue = self._flow.queue
        claims = [
            Claim(
                one.owner, one.total, max(one.pieces), one.deadline is None,
                barred=one.queue is queue and not queue.may_overtake(one),
            )
            for one in sleeping
        ]  # fmt: skip
        claims += [
            Claim(owner, one.size, one.size)
            for owner, one in self._flow.spilling.followers()
            if share in one.share.lineage()
        ]
        segments = [(one.address, one.nbytes) for one in self._flow.supply.segments.values()]
        space = Space(share.capacity(), self._flow.supply.limit, segments)
        caught = {id(claim) for claim in stuck(claims, share.holdings.table(), space)}
        return [one for one, claim in zip(sleeping, claims, strict=False) if id(claim) in caught]

    def stalled(self) -> None:
        """Warn with the table of owners when nothing has moved for `stall_after` seconds while somebody waits."""
        now = time.monotonic()
        waiting = list(self._flow.waiters())
        if not waiting or self._flow.progress != self._seen or self._since is None:
            self._seen, self._since = self._flow.progress, now
        elif self._flow.options.stall_after is not None and now - self._since >= self._flow.options.stall_after:
            self._since = None  # once for each stall
            alarm(
                f"pool {self._flow.pool.name!r}: nothing was granted for {self._flow.options.stall_after:g} s, and "
                f"nothing proves a deadlock\n{owner_table(owners_of(waiting))}",
                StallWarning,
            )


def owners_of(waiting: Iterable[Waiting]) -> list[OwnerInfo]:
    """Answer what each waits for and holds."""
    return [
        OwnerInfo(
            owner=label(one.owner),
            held=one.share.holdings.of(one.owner),
            waiting=one.nbytes,
            age=one.age,
        )
        for one in waiting
    ]


def _hints(lost: list[Waiting]) -> list[str]:
    first = owners_of(lost)[0]
    return [
        f"{first.owner} could take all it needs at once, with allocate_batch or lease({first.held + first.waiting})",
        "a larger limit",
        "fewer of these tasks at a time",
    ]
