"""`AllocationTracker`: what is live in a pool, since when, and whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self, final

import numpy as np

from asyncmem.core import LOG_ROW, log_time_ns
from asyncmem.errors import InvalidRequest, LeakWarning
from asyncmem.figures import format_count, format_duration, format_size
from asyncmem.insight.groups import Group, grouped
from asyncmem.insight.names import Names, join_witness, leave_witness
from asyncmem.insight.profile import AroundPools
from asyncmem.pool.alarm import alarm
from asyncmem.text import quoted

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from asyncmem.core import Core, Witness
    from asyncmem.insight.names import Site
    from asyncmem.pool import AsyncMemoryPool

_SHOWN = 10


class LiveBuffer(NamedTuple):
    """A buffer that has not been freed."""

    id: int
    """Its number: the same for as long as it lives, and no other's while its pool is tracked."""
    nbytes: int
    """Bytes as they were asked for."""
    age: float
    """Seconds since it was allocated, or since tracking began if it is older."""
    tag: str | None
    """What it was allocated under,"""
    task: str | None
    """by which task,"""
    thread: str | None
    """on which thread,"""
    frames: tuple[Site, ...]
    """and by which lines, innermost first; empty for what is older than tracking."""
    address: int
    """Where on the device."""

    @property
    def site(self) -> Site | None:
        """The line that asked for it, None where that is not known."""
        return self.frames[0] if self.frames else None

    def __str__(self) -> str:
        """Return one line about it."""
        tag = f" tagged {quoted(self.tag)}" if self.tag else ""
        task = f" in task {quoted(self.task)}" if self.task else ""
        place = f", made at {self.site}" if self.site else ""
        return f"#{self.id}: {format_size(self.nbytes)}{tag}{task}, {format_duration(self.age)} old{place}"


@final
class AllocationTracker(AroundPools):
    """Knows all that is live in a pool while entered by ``with`` or ``async with``: ``find_old(60)``.

    What the block allocated and has not freed by its end is in `leaks`, and named in a `LeakWarning`. A lease is one
    allocation of its whole range until it ends. Any thread may ask.

    Args:
        pool: What to track; the block opens it if it is not open yet.
        frames: How many lines of the call are kept of each allocation.
        warn: Whether to warn of leaks at the end.
    """

    def __init__(self, pool: AsyncMemoryPool, *, frames: int = 1, warn: bool = True) -> None:
        self._pool = pool
        self._pools = (pool,)
        self._frames = frames
        self._warn = warn
        self._core: Core | None = None
        self._witness: Witness | None = None
        self._reader = 0
        self._first = 0  # the number of the first allocation of the block
        self._last: NDArray[np.void] | None = None  # what was live at the end
        self._ended = 0

    def __repr__(self) -> str:
        if self._core is None:
            return f"<asyncmem.insight.AllocationTracker of pool {quoted(self._pool.name)}: not begun>"
        held = f"{format_count(self.count, 'buffer')} of {format_size(self.nbytes)}"
        return f"<asyncmem.insight.AllocationTracker of pool {quoted(self._pool.name)}: {held}>"

    def __enter__(self) -> Self:
        """Begin; what is live already is known by its size alone, unless the pool is recorded.

        Raises:
            InvalidRequest: This tracker was used before.
            PoolClosed: The pool is closed.
        """
        if self._core is not None:
            raise InvalidRequest("with", self, "a tracker that was not used before")
        core = self._pool._open_core()
        self._witness = join_witness(self._frames)
        core.watch(self._witness)
        self._reader, held = core.open_log(0)
        numbers = np.frombuffer(held, LOG_ROW)["number"]
        self._first = int(numbers.max()) + 1 if len(numbers) else 0
        self._core = core
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End: what is live now stays known, as `leaks` does."""
        assert self._core is not None
        assert self._witness is not None
        self._last, self._ended = self._rows(), log_time_ns()
        self._core.close_log(self._reader)
        self._core.unwatch()
        leave_witness(self._witness, self._frames)
        if self._warn and (leaks := self.leaks):
            site = leaks[0].site
            alarm(self.report(), LeakWarning, None if site is None else f"{site.file}:{site.line}")

    def live(self) -> tuple[LiveBuffer, ...]:
        """Return what is live, oldest first; after the end, what was live then."""
        rows = self._rows().tolist()
        now, names = self._ended or log_time_ns(), self._names()
        return tuple(
            LiveBuffer(
                number, nbytes, max(now - time, 0) / 1e9, names.tag(tag), names.task(task), names.thread(thread),
                names.frames(site), address,
            )
            for time, nbytes, address, _, number, site, task, tag, thread, _, _, _ in rows
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many buffers are live."""
        return len(self._rows())

    @property
    def nbytes(self) -> int:
        """The bytes that they hold, as they were asked for."""
        return int(self._rows()["nbytes"].sum())

    def find_old(self, seconds: float) -> tuple[LiveBuffer, ...]:
        """Return what has been live for at least so long, oldest first."""
        return tuple(one for one in self.live() if one.age >= seconds)

    def by(self, column: str) -> tuple[Group, ...]:
        """Add up what is live by what it has in common, largest first.

        Args:
            column: "tag", "site", "task", "thread", or "nbytes" for the size.
        """
        rows = self._rows()
        return grouped(rows, self._names(), column)

    @property
    def leaks(self) -> tuple[LiveBuffer, ...]:
        """What the block has allocated and not freed by now, or by its end, largest first."""
        mine = (one for one in self.live() if one.id >= self._first)
        return tuple(sorted(mine, key=lambda one: (-one.nbytes, one.id)))

    def report(self) -> str:
        """Return `leaks` as text: what there is in all, and a line for each of the largest."""
        leaks = self.leaks
        nbytes = format_size(sum(one.nbytes for one in leaks))
        name = self._pool.name
        if not leaks:
            return f"pool {quoted(name)}: nothing that was allocated is still held"
        lines = [f"pool {quoted(name)}: {format_count(len(leaks), 'buffer')} of {nbytes} still held"]
        lines += [f"  {one}" for one in leaks[:_SHOWN]]
        if len(leaks) > _SHOWN:
            lines.append(f"  and {len(leaks) - _SHOWN:,} more")
        return "\n".join(lines)

    def _rows(self) -> NDArray[np.void]:
        if self._core is None:
            raise InvalidRequest("looking", self, 'a tracker that has begun: "with AllocationTracker(pool) as tracker"')
        return np.frombuffer(self._core.held(), LOG_ROW) if self._last is None else self._last

    def _names(self) -> Names:
        assert self._witness is not None
        return Names.of(self._witness, ())
