"""What the numbers in records stand for: sites, tasks, tags, threads and pools, each name kept once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.core import Witness


class Site(NamedTuple):
    """A line of a program."""

    file: str
    """Its file, as the interpreter names it."""
    line: int
    """Its number in the file."""
    function: str
    """The function that it is in, with its classes."""

    def __str__(self) -> str:
        """Answer ``file:line (function)``."""
        return f"{self.file}:{self.line} ({self.function})"


class PoolName(NamedTuple):
    """A pool that was recorded."""

    name: str
    """The pool's."""
    device: str
    """Name of its device, such as "cuda:0"."""
    limit: int
    """The most bytes that it might reserve when recording began."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Names:
    """The tables that records point into. Number 0 is what is not known.

    Attributes:
        places: Lines of programs.
        sites: Calls: the number of a place, and that of the caller's site.
        tasks: Names of tasks.
        tags: Tags.
        threads: Names of threads; None for one that only freed.
        pools: The pools that were recorded.
    """

    places: Sequence[Site | None]
    sites: Sequence[tuple[int, int]]
    tasks: Sequence[str]
    tags: Sequence[str]
    threads: Sequence[str | None]
    pools: Sequence[PoolName] = ()
    _frames: dict[int, tuple[Site, ...]] = field(default_factory=dict)  # those that were spelled out

    @classmethod
    def of(cls, witness: Witness, pools: Sequence[PoolName]) -> Names:
        """Take what a witness has seen so far."""
        return cls(
            places=[None, *(Site(*place) for place in witness.places[1:])],
            sites=list(witness.sites),
            tasks=list(witness.tasks),
            tags=list(witness.tags),
            threads=list(witness.threads),
            pools=list(pools),
        )

    def frames(self, site: int) -> tuple[Site, ...]:
        """Answer the lines that led to a call, innermost first; as many as were recorded."""
        known = self._frames.get(site)
        if known is None:
            place, caller = self.sites[site]
            line = self.places[place]
            known = (line, *self.frames(caller)) if site and line is not None else ()
            self._frames[site] = known
        return known

    def site(self, site: int) -> Site | None:
        """Answer the line of a call, None where that is not known."""
        return self.places[self.sites[site][0]] if site else None

    def task(self, number: int) -> str | None:
        """Answer a task's name, None outside of any."""
        return self.tasks[number] if number else None

    def tag(self, number: int) -> str | None:
        """Answer a tag, None without one."""
        return self.tags[number] if number else None

    def thread(self, number: int) -> str | None:
        """Answer a thread's name; one that only freed has none but its number."""
        if not number:
            return None
        known = self.threads[number] if number < len(self.threads) else None
        return known or f"thread {number}"
