"""How replays on the model are shown: a table, and an object each."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from asyncmem.cli.tables import print_whole
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.replay import Replay
from asyncmem.replay.result import Outcome


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        file: What was replayed.
        replay: What became of it.
        fitted: The smallest limit that completes, where that was asked for.
    """

    file: str
    replay: Replay
    fitted: int | None


def as_json(entry: Entry) -> dict[str, object]:
    """Answer the figures of one replay by their names."""
    one = entry.replay
    found: dict[str, object] = {
        "file": entry.file,
        "policy": str(one.policy),
        "limit": one.limit,
        "completed": one.completed,
        "peak_requested": one.peak_requested,
        "peak_active": one.peak_active,
        "peak_reserved": one.peak_reserved,
        "reserved_over_requested": one.reserved_over_requested,
        "driver_calls": sum(one.driver_calls.values()),
        "driver_calls_by_name": dict(one.driver_calls),
        "driver_ms": one.driver_seconds * 1e3,
        "waits": one.waits,
        "wait_ms": one.wait_seconds * 1e3,
        "recorded_ms": one.duration * 1e3,
        "ns_per_op": one.ns_per_op,
        "largest_hole": one.largest_hole,
        "stranded_by_stream": list(one.stranded),
        "fragmentation": one.fragmentation,
    }
    if entry.fitted is not None:
        found["fit_over_requested"] = _over(entry.fitted, one)
    return found


def _over(nbytes: int, one: Replay) -> float:
    return nbytes / one.peak_requested if one.peak_requested else 1.0


def show(entries: list[Entry], console: Console) -> None:
    """Print the table, and below it what did not complete."""
    print_whole(_table(entries), console)
    show_failures([entry.replay for entry in entries], console)


def show_failures(replays: Sequence[Outcome], console: Console) -> None:
    """Name the requests that could not be served."""
    for one in replays:
        if not one.completed:
            wanted = f"row {one.failed_row:,} asks for {format_size(one.failed_bytes)}"
            console.print(f"{one.name}: out of memory under {format_size(one.limit or 0)}: {wanted}", soft_wrap=True)


def _table(entries: list[Entry]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("program", overflow="fold", min_width=12)
    table.add_column("policy", overflow="fold", min_width=7)
    waited = any(entry.replay.waits for entry in entries)
    fitted = any(entry.fitted is not None for entry in entries)
    headings = ["requested", "reserved", "ratio", *(["fits"] if fitted else []), "driver calls", "their time"]
    for heading in (*headings, *(["waits", "waited"] if waited else [])):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(*_cells(entry, waited=waited))
    return table


def _cells(entry: Entry, *, waited: bool) -> tuple[str, ...]:
    one = entry.replay
    return (
        one.name,
        str(one.policy),
        format_size(one.peak_requested),
        format_size(one.peak_reserved),
        f"{one.reserved_over_requested:.4f}" if one.completed else "[red]fails[/]",
        *([] if entry.fitted is None else [f"{_over(entry.fitted, one):.4f}"]),
        f"{sum(one.driver_calls.values()):,}",
        of_time(one.driver_seconds, one),
        *([f"{one.waits:,}", of_time(one.wait_seconds, one)] if waited else []),
    )


def of_time(seconds: float, one: Outcome) -> str:
    """Write a time, and its share of the program's."""
    share = f" ({format_share(seconds / one.duration)})" if one.duration else ""
    return format_duration(seconds) + share
