"""What the numbers in records stand for (sites, tasks, tags, threads, pools), and the witness that gives them."""

from __future__ import annotations

import os
import platform
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple, final

from asyncmem.core import Witness
from asyncmem.pool.owners import current_tag
from asyncmem.text import printable

_PACKAGE: Final = Path(__file__).parents[1]
_NOT_SKIPPED: Final = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("cli", "testing"))
"""Folders of asyncmem whose lines count as a program's."""

_changing = threading.Lock()
_known: weakref.ref[Witness] | None = None
_depths: list[int] = []


class Site(NamedTuple):
    """A line of a program.

    Attributes:
        file: Its file, as the interpreter names it.
        line: Its number in the file.
        function: The function that it is in, with its classes.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return ``file:line (function)``."""
        return f"{printable(self.file)}:{self.line} ({printable(self.function)})"


class PoolName(NamedTuple):
    """A pool that was recorded.

    Attributes:
        name: The pool's.
        device: Name of its device, such as "cuda:0".
        limit: The most bytes that it might reserve when recording began.
        options: Its other options that were not at their defaults, as text: "paged,overlap=0".
    """

    name: str
    device: str
    limit: int
    options: str = ""


class Origin(NamedTuple):
    """The process that was recorded.

    Attributes:
        program: The command line.
        process: Its number.
        host: Name of the machine.
        python: Version of Python.
        asyncmem: Version of asyncmem.
    """

    program: tuple[str, ...] = ()
    process: int = 0
    host: str = ""
    python: str = ""
    asyncmem: str = ""

    @classmethod
    def of_this_process(cls) -> Origin:
        """Return this process's."""
        from asyncmem import __version__

        return cls(tuple(sys.orig_argv), os.getpid(), platform.node(), platform.python_version(), __version__)


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Names:
    """The tables that records point into. Number 0 stands for what is not known.

    Attributes:
        places: Lines of programs.
        sites: Calls: the number of a place, and that of the caller's site.
        tasks: Names of tasks.
        tags: Tags.
        threads: Names of threads; None for one that only freed.
        pools: The pools that were recorded.
    """

    places: list[Site | None]
    sites: list[tuple[int, int]]
    tasks: list[str]
    tags: list[str]
    threads: list[str | None]
    pools: list[PoolName]
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
        """Return the lines that led to a call, innermost first; as many as were recorded."""
        known = self._frames.get(site)
        if known is None:
            place, caller = self.sites[site]
            line = self.places[place]
            known = (line, *self.frames(caller)) if site and line is not None else ()
            self._frames[site] = known
        return known

    def site(self, site: int) -> Site | None:
        """Return the line of a call, None where that is not known."""
        return self.places[self.sites[site][0]] if site else None

    def task(self, number: int) -> str | None:
        """Return a task's name, None outside of any."""
        return self.tasks[number] or None

    def tag(self, number: int) -> str | None:
        """Return a tag, None without one."""
        return self.tags[number] or None

    def pool(self, number: int) -> str:
        """Return a pool's name."""
        return self.pools[number].name

    def thread(self, number: int) -> str | None:
        """Return a thread's name; one that only freed has none but its number."""
        if not number:
            return None
        known = self.threads[number] if number < len(self.threads) else None
        return known or f"thread {number}"


def join_witness(frames: int) -> Witness:
    """Return the one witness of the process. It keeps at least so many frames of each call until `leave_witness`."""
    global _known  # noqa: PLW0603 -- one a process
    with _changing:
        witness = _known() if _known is not None else None
        if witness is None:
            witness = Witness(current_tag, _skipped(), _NOT_SKIPPED)
            _known = weakref.ref(witness)
        _depths.append(frames)
        witness.frames = max(_depths)
        return witness


def leave_witness(witness: Witness, frames: int) -> None:
    """Undo one `join_witness`."""
    with _changing:
        _depths.remove(frames)
        witness.frames = max(_depths, default=1)


def _skipped() -> tuple[str, ...]:
    """Return the folders whose lines are left out: ours, and those of event loops, which ask for nothing themselves."""
    loops = [spec.origin for spec in map(find_spec, ("asyncio", "trio", "anyio")) if spec is not None and spec.origin]
    return tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *(Path(origin).parent for origin in loops)))
