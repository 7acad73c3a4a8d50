"""The result of a run as a table and as JSON. In a narrow terminal names are broken, and nothing is cut."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asyncmem.cli.benchmarks.device.asked import Entry
from asyncmem.cli.benchmarks.device.run import Run
from asyncmem.cli.tables import print_whole
from asyncmem.figures import format_duration

VERDICTS = {True: "[green]met[/]", False: "[red]not met[/]", None: "not measured"}


def document(entries: Iterable[Entry], found: Run) -> dict[str, object]:
    """Answer the entries, and who was absent or failed, for JSON."""
    return {
        "figures": [one.as_json() for one in entries],
        "skipped": [asdict(one) for one in found.absent],
        "failed": [asdict(one) for one in found.failed],
    }


def show(entries: Sequence[Entry], found: Run, rows: Sequence[str], console: Console) -> None:
    """Print the table, below it the unlike rows' reasons and what is asked for, and who was absent or failed."""
    ordered = [one for row in rows for one in entries if one.measured.row == row]
    reasons = _numbered(ordered)
    print_whole(_table(ordered, reasons), console)
    for reason, number in reasons.items():
        console.print(f"{number}) {escape(reason)}")
    for one in ordered:
        if one.bound is not None or one.measured.broken:
            console.print(f"{VERDICTS[one.ok]}: {escape(_label(one))}: {escape(_asked(one))}", highlight=False)
    for line in _notes(found):
        console.print(escape(line))


def _notes(found: Run) -> Iterator[str]:
    for absent in found.absent:
        yield f"skipped {absent.family}: {absent.reason}; {absent.install}"
    for failed in found.failed:
        yield f"failed {failed.peer} {failed.row}: {failed.error}"


def _numbered(entries: Iterable[Entry]) -> dict[str, int]:
    reasons: dict[str, int] = {}
    for one in entries:
        if one.measured.unlike:
            reasons.setdefault(one.measured.unlike, len(reasons) + 1)
    return reasons


def _table(entries: Iterable[Entry], reasons: dict[str, int]) -> Table:
    title = "The fastest repeat, the median, the floor in the same process, and how many times asyncmem's fastest it is"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    for heading in ("row", "peer"):
        table.add_column(heading, overflow="fold")
    for heading in ("min", "median", "floor", "to ours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in entries:
        table.add_row(*_cells(one, reasons))
    return table


def _cells(one: Entry, reasons: dict[str, int]) -> tuple[str, ...]:
    measured = one.measured
    number = reasons.get(measured.unlike or "")
    return (
        escape(f"{measured.row} {measured.case}".strip()),
        escape(measured.peer) + ("" if number is None else f" {number})"),
        *(_value(value, measured.unit) for value in (measured.min, measured.median, measured.floor)),
        "" if one.ratio is None else f"{one.ratio:.2f}",
    )


def _label(one: Entry) -> str:
    return " ".join(part for part in (one.measured.row, one.measured.case, one.measured.peer) if part)


def _asked(one: Entry) -> str:
    unit = "ns" if one.measured.row == "loop_stall" else ""
    bound = "" if one.bound is None else f"{one.sense} {_value(one.bound, unit)}, is {_value(one.held, unit)}"
    return "; ".join(part for part in (bound, one.measured.broken) if part)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_duration(value / 1e9) if unit == "ns" else f"{value:.3g}"
