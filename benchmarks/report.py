"""One run on a device: its rows measured, and printed as a table or as JSON."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Unpack

import click
from rich.console import Console
from rich.text import Text

from asyncmem.cli.bench import RunOptions, known_rows
from asyncmem.cli.machine import PACKAGES, describe_machine, find_nvidia, installed_version
from asyncmem.cli.tables import output, progress, show_table, table_of, verdict
from asyncmem.devices import device as find_device
from asyncmem.figures import format_duration
from asyncmem.text import printable, to_json
from benchmarks import alone, comparison
from benchmarks.allocators import OURS
from benchmarks.suite import FULL, QUICK, Measured, Run, Suite, Task, run


def measure(asked: Sequence[str], device: str, *, peers: bool, **options: Unpack[RunOptions]) -> bool:
    """Measure rows on a device, print the result, and return whether all bounds are met.

    Args:
        asked: Names of rows; none for all.
        device: The device's name: "cuda:0".
        peers: Whether other libraries' allocators are measured, too.
        **options: How to measure and print. Without recordings the rows that replay them are left out.

    Raises:
        BackendUnavailable: The device cannot be used here.
        InvalidRequest: There is no such device.
        UsageError: A row that was asked for is not there, or replays recordings and there are none, or the peers have
            no such device.
    """
    if peers and not device.startswith("cuda"):
        raise click.UsageError(f"the peers have no {device!r}: give --device cuda:0, or leave --peers out")
    suite = comparison.SUITE if peers else alone.SUITE
    traces, quick, as_json = options["traces"], options["quick"], options["as_json"]
    names = known_rows(asked, suite.rows, f"on {device} {'with' if peers else 'without'} --peers")
    recorded = [name for name in names if suite.rows[name].recorded and not traces]
    if recorded and asked:
        raise click.UsageError(f"{recorded[0]} is about recorded programs: name them with --trace FILE")
    names = [name for name in names if name not in recorded]
    find_device(device).close()
    task = Task(
        suite=suite.module,
        family=OURS,
        device=device,
        rows=tuple(names),
        effort=replace(QUICK if quick else FULL, uvloop=options["uvloop"]),
        traces=traces,
    )
    with progress("measuring", quiet=as_json, redraws=False) as report:
        found = run(task, suite.chosen(device, names), lambda name: report(f"measuring {name}"))
    lines = suite.judge(found.measured)
    if as_json:
        click.echo(to_json(document(lines, found) | _surroundings(suite, task, quick=quick), indent=2))
    else:
        console = output()
        show(lines, found, names, console)
        there = {name: installed_version(name) for name in ("asyncmem", *suite.packages, *PACKAGES)}
        console.print(", ".join(f"{name} {version}" for name, version in there.items() if version is not None))
    return not found.failed and all(one.ok is not False for one in lines)


def _surroundings(suite: Suite, task: Task, *, quick: bool) -> dict[str, object]:
    machine = describe_machine()
    machine["packages"] |= {name: installed_version(name) for name in suite.packages}
    loop = "uvloop" if task.effort.uvloop else "asyncio"
    return {
        "machine": machine,
        "nvidia": find_nvidia() if task.device.startswith("cuda") else None,
        "method": {"device": task.device, "quick": quick, "loop": loop},
    }


def document(lines: Iterable[Measured], found: Run) -> dict[str, object]:
    """Return the figures, and the families that were absent or failed, for JSON."""
    return {
        "figures": [one.as_json() for one in lines],
        "skipped": [asdict(one) for one in found.absent],
        "failed": [asdict(one) for one in found.failed],
    }


def show(lines: Sequence[Measured], found: Run, rows: Sequence[str], console: Console) -> None:
    """Print the table, below it the reasons of unlike rows, the bounds, and the families that were absent or failed."""
    ordered = [one for row in rows for one in lines if one.row == row]
    reasons = list(dict.fromkeys(one.unlike for one in ordered if one.unlike))
    console.print(
        "The fastest repeat, the median, the floor in the same process, and how many times asyncmem's fastest it is"
    )
    cells = []
    for one in ordered:
        number = f" {reasons.index(one.unlike) + 1})" if one.unlike else ""
        values = (_value(value, one.unit) for value in (one.min, one.median, one.floor))
        cells.append((f"{one.row} {one.case}".strip(), f"{one.peer}{number}", *values, _ratio(one)))
    headings = ("row", "peer", "min", "median", "floor", "to ours")
    show_table(table_of(headings, cells, left=("row", "peer")), console)
    for place, reason in enumerate(reasons, 1):
        console.print(f"{place}) {printable(reason)}")
    for one in ordered:
        if one.bound is not None or one.broken:
            name = " ".join(part for part in (one.row, one.case, one.peer) if part)
            result = Text("not measured") if one.ok is None else verdict(one.ok)
            console.print(Text.assemble(result, f": {printable(name)}: {printable(_asked(one))}"))
    for line in _notes(found):
        console.print(printable(line))


def _notes(found: Run) -> Iterator[str]:
    for absent in found.absent:
        yield f"skipped {absent.family}: {absent.reason}; {absent.install}"
    for failed in found.failed:
        yield f"failed {failed.peer} {failed.row}: {failed.error}"


def _ratio(one: Measured) -> str:
    return "" if one.ratio is None else f"{one.ratio:.2f}"


def _asked(one: Measured) -> str:
    unit = "ns" if one.row == "loop_stall" else ""
    bound = "" if one.bound is None else f"{one.sense} {_value(one.bound, unit)}, is {_value(one.held, unit)}"
    return "; ".join(part for part in (bound, one.broken) if part)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_duration(value / 1e9) if unit == "ns" else f"{value:.3g}"
