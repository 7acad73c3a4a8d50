"""One family's process: `python -m asyncmem.cli.benchmarks.device.child '{"family": ..., ...}'`.

Its standard output carries one JSON object a line and nothing else; what libraries print there goes to standard error.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TextIO

from asyncmem.cli.benchmarks.device import DEVICE_ROWS
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.device.where import Where
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.peers import family
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.peer import Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A row that a peer did not come through."""

    family: str
    peer: str
    row: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process has to measure."""

    family: str
    device: str
    rows: tuple[str, ...]
    repeats: int
    repeat_ns: int
    share: float
    uvloop: bool = False
    traces: tuple[str, ...] = ()

    def effort(self) -> Effort:
        """Make the effort, with its kind of event loop."""
        factory = asyncio.SelectorEventLoop
        if self.uvloop:
            import uvloop

            return Effort(self.repeats, self.repeat_ns, self.share, uvloop.Loop)
        return Effort(self.repeats, self.repeat_ns, self.share, factory)


def measure(task: Task) -> Iterator[Measured | Failed]:
    """Measure the rows for each peer of a family in turn; a row that fails leaves the others alone."""
    effort = task.effort()
    rows = [name for name in task.rows if task.family in DEVICE_ROWS[name].families]
    rows.sort(key=lambda name: not DEVICE_ROWS[name].early)
    if not rows:
        return
    one = family(task.family)
    for make in one.make(task.device):
        peer = make()
        ours = Ours(task.device) if one.peer else None
        peer.beside = ours
        try:
            for name in rows:
                if not peer.rows or name in peer.rows:
                    yield from _row(peer, name, effort, task)
        finally:
            if ours is not None:
                ours.close()
            peer.close()


def _row(peer: Peer, name: str, effort: Effort, task: Task) -> Iterator[Measured | Failed]:
    try:
        yield from DEVICE_ROWS[name].measure(peer, effort, Where(device=task.device, traces=task.traces))
    except Exception as error:  # noqa: BLE001 - whatever a library raises ends one row of one peer, not the run
        text = f"{type(error).__name__}: {error}"
        yield Failed(family=task.family, peer=peer.name, row=name, error=text)


def main(text: str, out: TextIO) -> None:
    """Read a task, measure it and write what was found as it comes."""
    fields = json.loads(text)
    for one in measure(Task(**(fields | {name: tuple(fields[name]) for name in ("rows", "traces")}))):
        kind = "measured" if isinstance(one, Measured) else "failed"
        out.write(json.dumps({kind: asdict(one)}) + "\n")
        out.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        main(sys.argv[1], results)
