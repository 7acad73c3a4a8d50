"""Rows, families of allocators and bounds that are measured together on one device.

torch reads its configuration once, and every library keeps memory and contexts to itself, so one family never runs
beside another: each has a process of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from asyncmem.cli.bench.timing import Effort, Number, Timing
from benchmarks.allocators import OURS, Allocator, AsyncmemPool

LEAST: Final = "at least"
MOST: Final = "at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure with the floor beside it."""

    row: str
    case: str = ""
    """Which part of the row, if it has several."""
    peer: str
    unit: str = "ns"
    """Of the figures that follow: "ns", or "" for a ratio."""
    min: float
    median: float
    floor: float | None = None
    """What `object()`, or whatever the row says, took in the same process; the minimum of its repeats."""
    beside: float | None = None
    """The minimum of asyncmem, doing the same in the same process in turn with this peer, if that was measured."""
    unlike: str | None = None
    """What this peer does differently, if it is not the same work."""
    figures: Mapping[str, Number] = field(default_factory=dict)
    """Further figures of the row, each with its unit in its name."""
    broken: str = ""
    """A promise that did not hold, in words."""
    ratio: float | None = None
    """This peer's minimum over asyncmem's of the same case, in the same process if it was measured there, too."""
    held: float | None = None
    """What is compared with the bound."""
    bound: float | None = None
    sense: str | None = None
    """"at least" or "at most"."""

    @property
    def ok(self) -> bool | None:
        """Whether everything asked held; None if nothing was asked."""
        if self.broken:
            return False
        if self.bound is None or self.held is None:
            return None
        return self.held >= self.bound if self.sense == LEAST else self.held <= self.bound

    def as_json(self) -> dict[str, object]:
        """Return a mapping for JSON."""
        line = asdict(self) | {"ok": self.ok}
        return line if self.broken else {name: value for name, value in line.items() if name != "broken"}


def timed(
    row: str,
    peer: Allocator,
    theirs: Timing,
    floor: Timing | None = None,
    beside: Timing | None = None,
    *,
    case: str = "",
    **figures: Number,
) -> Measured:
    """Return the usual figure: an allocator's times, the floor's, and asyncmem's beside it."""
    return Measured(
        row=row,
        case=case,
        peer=peer.name,
        min=theirs.ns,
        median=theirs.median_ns,
        floor=None if floor is None else floor.ns,
        beside=None if beside is None else beside.ns,
        unlike=peer.unlike.get(row),
        figures=figures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The work of one process."""

    suite: str
    """The module whose `SUITE` has the rows."""
    family: str
    device: str
    rows: tuple[str, ...]
    effort: Effort
    traces: tuple[str, ...] = ()
    """Files with recordings, for the row `replay`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One comparison that several allocators take part in."""

    measure: Callable[[Allocator, Task], Iterator[Measured]]
    families: tuple[str, ...] | None = None
    """The families that take part; None for all general ones."""
    early: bool = False
    """Whether it comes first in its process, before anything has been reserved there."""
    recorded: bool = False
    """Whether it replays recordings, and is measured only if some are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Allocators that are measured in one process."""

    name: str
    peers: tuple[Callable[[str], Allocator], ...]
    """Make each of them for a device such as "cuda:0", and import its library."""
    module: str = ""
    """What has to be importable; "" for nothing."""
    install: str = ""
    """How to get it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the process is started with."""
    beside: bool = True
    """Whether asyncmem's pool takes turns with its members in their process."""
    general: bool = True
    """Whether it takes part in the rows that name no families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """A family that was not measured."""

    family: str
    reason: str
    install: str = ""


def absent(one: Family) -> Absent | None:
    """Return what is missing for a family, by name, or None. Imports none of its modules."""
    if not one.module:
        return None
    try:
        found = find_spec(one.module) is not None
    except ModuleNotFoundError:  # a package above it is not there
        found = False
    return None if found else Absent(family=one.name, reason=f"{one.module} is not installed", install=one.install)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What is asked of one peer in one row."""

    row: str
    peer: str
    bound: float
    case: str | None = None
    """The case it is about; None for every one of the row."""
    sense: str = LEAST
    """Whether the bound is the least or the most that is asked for."""
    held: str = "ratio"
    """What is compared with it: "ratio", "min", or the name of a further figure."""

    def concerns(self, one: Measured) -> bool:
        """Return whether it is about this figure."""
        return (self.row, self.peer) == (one.row, one.peer) and self.case in (None, one.case)

    def judge(self, one: Measured) -> Measured:
        """Return the figure with the bound beside it; what this run has not measured is not compared."""
        held = {"ratio": one.ratio, "min": one.min, **one.figures}.get(self.held)
        return replace(one, held=None if held is None else float(held), bound=self.bound, sense=self.sense)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Rows, the families that take part in them, and the bounds that they are held to."""

    module: str
    """The module that has it as `SUITE`, for the processes of the families."""
    rows: Mapping[str, DeviceRow]
    """In the order in which they are shown."""
    families: tuple[Family, ...]
    """In the order in which they are measured."""
    bounds: tuple[Bound, ...]
    packages: tuple[str, ...] = ()
    """The distributions whose versions belong to the figures, besides those of any report."""

    def family(self, name: str) -> Family:
        """Return a family by its name."""
        return next(one for one in self.families if one.name == name)

    def takes_part(self, one: Family, row: str) -> bool:
        """Return whether a family is measured in a row."""
        named = self.rows[row].families
        return one.general if named is None else one.name in named

    def chosen(self, device: str, rows: Iterable[str]) -> list[Family]:
        """Return the families that take part in some of the rows on a device."""
        able = [one for one in self.families if one.name == OURS or device.startswith("cuda")]
        return [one for one in able if any(self.takes_part(one, row) for row in rows)]

    def judge(self, measured: Iterable[Measured]) -> list[Measured]:
        """Put every figure beside asyncmem's and compare it with its bound."""
        lines = list(measured)
        ours = {(one.row, one.case): one.min for one in lines if one.peer == OURS}
        found = []
        for one in lines:
            base = one.beside or ours.get((one.row, one.case), 0)
            line = replace(one, ratio=one.min / base if base > 0 else None)
            bound = next((each for each in self.bounds if each.concerns(one)), None)
            found.append(line if bound is None else bound.judge(line))
        return found


# -- processes ---------------------------------------------------------------------------------------------------------

CHILD_SECONDS: Final = 240.0
"""How long one family may take, the import of its libraries included."""

_CHILD: Final = f"from {__name__} import main; main()"

FULL: Final = Effort(repeats=15, repeat_ns=5_000_000, share=1.0)
QUICK: Final = Effort(repeats=5, repeat_ns=2_000_000, share=0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A row that a peer could not complete."""

    family: str
    peer: str
    row: str
    error: str


@dataclass(slots=True)
class Run:
    """The result of one run."""

    measured: list[Measured] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)


def run(task: Task, families: Iterable[Family], report: Callable[[str], None]) -> Run:
    """Measure the families one after another; those whose library is not installed are listed.

    Args:
        task: What to measure; its family is replaced by each in turn.
        families: The families to measure.
        report: Given the name of each before it begins.
    """
    found = Run()
    for one in families:
        missing = absent(one)
        if missing is not None:
            found.absent.append(missing)
            continue
        report(one.name)
        out, error = _start(replace(task, family=one.name), one)
        for line in out.splitlines():
            collect(line, found)
        if error:
            found.failed.append(Failed(family=one.name, peer=one.name, row="", error=error))
    return found


def _start(task: Task, one: Family) -> tuple[str, str]:
    """Return what the process of a family printed, and why it ended early; nothing if it did not."""
    command = [sys.executable, "-P", "-c", _CHILD, json.dumps(asdict(task))]
    # It imports the same modules as this process, from whichever folder either is started.
    path = os.pathsep.join(each or os.curdir for each in sys.path)
    environment = {**os.environ, "PYTHONPATH": path, **one.environment}
    with subprocess.Popen(  # noqa: S603 - our own interpreter with our own module
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            out, error = child.communicate(timeout=CHILD_SECONDS)
            ended = f"exit status {child.returncode}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            child.kill()
            out, error = child.communicate()
            ended = f"not done after {CHILD_SECONDS:g} s"
    last = " ".join(error.strip().splitlines()[-1:])
    return out, f"its process ended early, {ended}: {last}" if ended else ""


def collect(line: str, found: Run) -> None:
    """Read one line of a child's output."""
    fields = json.loads(line)
    if "measured" in fields:
        found.measured.append(Measured(**fields["measured"]))
    else:
        found.failed.append(Failed(**fields["failed"]))


def measure(task: Task) -> Iterator[Measured | Failed]:
    """Measure the rows for each peer of a family in turn; a row that fails leaves the others alone."""
    suite: Suite = import_module(task.suite).SUITE
    one = suite.family(task.family)
    rows = [name for name in task.rows if suite.takes_part(one, name)]
    rows.sort(key=lambda name: not suite.rows[name].early)
    if not rows:
        return
    for make in one.peers:
        peer = make(task.device)
        peer.beside = AsyncmemPool(task.device) if one.beside else None
        try:
            for name in rows:
                if not peer.rows or name in peer.rows:
                    yield from _row(suite, peer, name, task)
        finally:
            if peer.beside is not None:
                peer.beside.close()
            peer.close()


def _row(suite: Suite, peer: Allocator, name: str, task: Task) -> Iterator[Measured | Failed]:
    try:
        yield from suite.rows[name].measure(peer, task)
    except Exception as error:  # noqa: BLE001 - whatever a library raises ends one row of one peer, not the run
        text = f"{type(error).__name__}: {error}"
        yield Failed(family=task.family, peer=peer.name, row=name, error=text)


def main() -> None:
    """Measure the task that is the process's argument, and write each result as a line of JSON as it comes.

    What libraries print on standard output goes to standard error.
    """
    fields = json.loads(sys.argv[1])
    task = Task(**(fields | {"effort": Effort(**fields["effort"])}))
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        for one in measure(task):
            kind = "measured" if isinstance(one, Measured) else "failed"
            results.write(json.dumps({kind: asdict(one)}) + "\n")
            results.flush()
