"""What a person is shown of `asyncmem bench contention`."""

from math import isfinite

from rich.console import Console
from rich.table import Table

from asyncmem.cli.benchmarks.result import Row
from asyncmem.cli.tables import columns, print_whole
from asyncmem.figures import format_duration


def print_contention(row: Row, console: Console) -> None:
    """Print steps a second beside the semaphore's, then what has a time of its own."""
    print_whole(_programs(row), console)
    console.print()
    print_whole(_others(row), console)
    for name, case in row.cases.items():
        if case.broken:
            console.print(f"contention {name}: {case.broken}")


def _programs(row: Row) -> Table:
    headings = ("contention", "tasks", "steps/s", "of a semaphore", "share", "at least", "proofs", "bound")
    table = columns(*headings, left=("contention", "bound"))
    table.title = "Steps a second, and a semaphore's; proofs: the time spent on looking for deadlocks"
    table.title_justify = "left"
    for case in row.cases.values():
        if "program" not in case.figures:
            continue
        figures = case.figures
        least = figures["least_share"]
        table.add_row(
            str(figures["program"]), f"{figures['tasks']:,}", f"{figures['steps_per_second']:,}",
            f"{figures['floor_steps_per_second']:,}", f"{figures['share']:.2f}", f"{least:.1f}" if least else "-",
            f"{figures['proofs_share']:.2%}", _verdict(case),
        )  # fmt: skip
    return table


def _others(row: Row) -> Table:
    headings = ("contention", "asyncmem", "against", "ratio", "at most", "bytes each", "bound")
    table = columns(*headings, left=("contention", "bound"))
    for name, case in row.cases.items():
        if "program" in case.figures:
            continue
        nbytes = case.figures.get("bytes_each")
        of_bytes = "" if nbytes is None else f"{nbytes} of {case.figures['bytes_allowed']} ({case.figures['bytes_by']})"
        times = (format_duration(ns / 1e9) for ns in (case.ns, case.floor_ns))
        table.add_row(name, *times, f"{case.ratio:.2f}", f"{case.bound:.1f}", of_bytes, _verdict(case))
    return table


def _verdict(case: Row) -> str:
    if not isfinite(case.bound) and not case.broken:
        return ""
    return "[green]met[/]" if case.met else "[red]not met[/]"
