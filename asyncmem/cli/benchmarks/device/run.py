"""One run: the families one after another, each in a process of its own, on a device that is otherwise left alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from asyncmem.cli.benchmarks.device import DEVICE_ROWS
from asyncmem.cli.benchmarks.device.child import Failed, Task
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.peers import FAMILIES, Absent, Family, absent
from asyncmem.cli.benchmarks.peers.family import OURS

CHILD_SECONDS: Final = 240.0
"""How long one family may take, the import of its libraries included."""

FULL: Final = Effort(repeats=15, repeat_ns=5_000_000, share=1.0)
QUICK: Final = Effort(repeats=5, repeat_ns=2_000_000, share=0.25)


@dataclass(slots=True)
class Run:
    """What one run found."""

    measured: list[Measured] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)


def chosen(device: str, rows: Sequence[str], *, peers: bool) -> list[Family]:
    """Answer the families that take part in some of the rows on a device."""
    taking = {name for row in rows for name in DEVICE_ROWS[row].families}
    able = [one for one in FAMILIES if one.name in taking and (peers or not one.peer)]
    return [one for one in able if one.name == OURS or device.startswith("cuda")]


def run(task: Task, families: Sequence[Family], report: Callable[[str], None]) -> Run:
    """Measure the families one after another; those whose library is not installed are noted by name.

    Args:
        task: What to measure; its family is replaced by each in turn.
        families: Whom to measure.
        report: Told the name of each before it begins.
    """
    found = Run()
    for one in families:
        missing = absent(one)
        if missing is not None:
            found.absent.append(missing)
            continue
        report(one.name)
        _measure(replace(task, family=one.name), one, found)
    return found


def _measure(task: Task, one: Family, found: Run) -> None:
    command = [sys.executable, "-m", "asyncmem.cli.benchmarks.device.child", json.dumps(asdict(task))]
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter with our own module
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            check=False,
            env={**os.environ, **one.environment},
        )
        out, error = child.stdout, child.stderr
        ended = "" if child.returncode == 0 else f"exit status {child.returncode}"
    except subprocess.TimeoutExpired as late:
        out, error = _text(late.stdout), _text(late.stderr)
        ended = f"not done after {CHILD_SECONDS:g} s"
    for line in out.splitlines():
        collect(line, found)
    if ended:
        last = error.strip().splitlines()[-1:]
        reason = f"its process ended early, {ended}: {' '.join(last)}"
        found.failed.append(Failed(family=one.name, peer=one.name, row="", error=reason))


def collect(line: str, found: Run) -> None:
    """Read one line of a child's output."""
    fields = json.loads(line)
    if "measured" in fields:
        found.measured.append(Measured(**fields["measured"]))
    else:
        found.failed.append(Failed(**fields["failed"]))


def _text(given: str | bytes | None) -> str:
    return given.decode(errors="replace") if isinstance(given, bytes) else given or ""
