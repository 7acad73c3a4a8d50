"""`asyncmem bench`: what allocations cost on this machine, each next to a floor measured in the same process.

A benchmark is a function that returns a `Row`; its docstring says what is compared with what.
"""

import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict, TypeVar, Unpack

import click
from rich.console import Console
from rich.text import Text

from asyncmem.cli.bench.allocations import await_hit, batch, buckets, churn, hit, large, scale
from asyncmem.cli.bench.contention import contention
from asyncmem.cli.bench.event_loop import handover, stall
from asyncmem.cli.bench.pipeline import pipeline
from asyncmem.cli.bench.timing import FULL, QUICK, TASKS, Effort, Row
from asyncmem.cli.machine import describe_machine, installed_version
from asyncmem.cli.parameters import json_option
from asyncmem.cli.tables import Cell, output, progress, show_table, table_of, verdict
from asyncmem.figures import format_duration
from asyncmem.text import to_json

Benchmark: TypeAlias = Callable[[Effort], Row]


def _on_loop(measure: Callable[[Effort], Coroutine[object, object, Row]]) -> Benchmark:
    return lambda effort: effort.run(measure(effort))


ROWS: Final[dict[str, Benchmark]] = {
    "hit": _on_loop(hit),
    "await_hit": _on_loop(await_hit),
    "churn": _on_loop(churn),
    "batch": _on_loop(batch),
    "large": _on_loop(large),
    "buckets": _on_loop(buckets),
    "handover": handover,
    "stall": stall,
    "pipeline": _on_loop(pipeline),
    "scale": _on_loop(scale),
    "contention": contention,
}
"""Each row's name and its benchmark. `scale` comes late because it leaves the process's own heap large."""

LONG: Final = "contention"
"""The row that is measured only if it is named, because it takes minutes."""

Command = TypeVar("Command", bound=Callable[..., object])


class RunOptions(TypedDict):
    """The options of `run_options`, but for `--check`."""

    traces: tuple[str, ...]
    as_json: bool
    quick: bool
    uvloop: bool


def run_options(command: Command) -> Command:
    """Add the options that say how rows are measured and printed, here and in the comparison."""
    file = click.Path(exists=True, dir_okay=False, resolve_path=True)
    text = "A recording for the row `replay`; may be repeated."
    options = (
        click.option("--trace", "traces", multiple=True, metavar="FILE", type=file, help=text),
        json_option,
        click.option("--quick", is_flag=True, help="Fewer and shorter repeats: for a look, not for a verdict."),
        click.option("--uvloop", is_flag=True, callback=need_uvloop, help="Use uvloop, not asyncio's own loop."),
        click.option("--check", is_flag=True, help="Exit with 1 if a bound is not met."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def need_uvloop(context: click.Context, parameter: click.Parameter, wanted: bool) -> bool:  # noqa: ARG001
    """Refuse the option if uvloop is not installed."""
    if wanted and installed_version("uvloop") is None:
        raise click.UsageError("uvloop is not installed; install it with: pip install uvloop", ctx=context)
    return wanted


def read_tasks(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Read numbers of tasks, such as "20,200"."""
    try:
        tasks = tuple(int(one) for one in text.split(","))
    except ValueError:
        tasks = (0,)
    if min(tasks) < 1:
        raise click.BadParameter(f"expected numbers such as 20,200, got {text!r}", ctx=context, param=parameter)
    return tasks


def complete_row(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:  # noqa: ARG001
    """Return the rows whose names begin so."""
    return [name for name in ROWS if name.startswith(begun)]


@click.command()
@click.argument("rows", nargs=-1, metavar="[ROW]...", shell_complete=complete_row)
@click.option("--device", metavar="DEVICE", help="Measure the pool on this device, in a checkout: cuda:0, simulated.")
@click.option(
    "--peers", is_flag=True, help="Also torch, CuPy, RMM and cuda.core, in a checkout; absent ones are named."
)
@click.option(
    "--tasks",
    metavar="N,N",
    default=",".join(map(str, TASKS)),
    callback=read_tasks,
    help="How many tasks `contention` has; by default 20 to 20,000.",
)
@run_options
def bench(
    rows: tuple[str, ...],
    device: str | None,
    peers: bool,
    tasks: tuple[int, ...],
    check: bool,
    **options: Unpack[RunOptions],
) -> None:
    """Measure what allocations cost, next to floors measured in the same process.

    ROW is one of the names in the table; without any, all but the last are measured, which takes about half a minute.

    \b
    hit        pool.allocate(4096) and drop          against object() and drop
    await_hit  await pool.allocate_async(4096)       against awaiting a trivial coroutine
    churn      random sizes, 1000 live               against object() in the same loop
    batch      allocate_batch of 100, per buffer     against object() and drop
    large      1 MiB to 1 GiB, one and four live     against hits of 1 MiB in the same loop
    buckets    BucketPool.try_get, return_buffer     against object() and drop
    handover   a free wakes a waiter, 1 and 10,000   against an asyncio.Queue hand-over
    stall      growing under 1 ms driver calls       p99 of the loop's holds against 100 µs
    pipeline   an item through three stages          against asyncio.Queue; the pace of 4, 10 and 4 ms
    scale      growth from 1,000 to 1,000,000 live   against the growth over object()
    contention 20 to 20,000 tasks share 16 MiB       against an asyncio.Semaphore(16); minutes

    Each side is timed several times, in turn; the ratio is between the fastest of each, and the medians stand beside
    it. What the figures do not say: they are of one process on one machine, with the garbage collector off and
    everything warm, on the host or the simulated device. A ratio moves by some 5 % from run to run, more where others
    use the machine; loop overhead of about 3 ns is in both sides of the first six rows. They say nothing about a GPU.

    With --device the pool on that device is measured instead, and on a GPU the driver's own calls beside it; with
    --peers (on cuda:0 without --device) so are other libraries' allocators. These programs and their rows are the
    folder benchmarks/ of asyncmem's source tree, so this works in a checkout only: it is `python -m benchmarks` there.
    """  # noqa: D301 - click wants the character itself
    if device is not None or peers:
        met = _comparison().measure(rows, device or "cuda:0", peers=peers, **options)
    else:
        met = _on_host(rows, tasks, options)
    if check and not met:
        raise click.exceptions.Exit(1)


def _comparison() -> Any:  # noqa: ANN401 -- a module that is not in the package
    """Return the module of the comparison, which is in the source tree and not in the package.

    Raises:
        click.ClickException: This is no checkout.
    """
    # At the end, so that the folder's asyncmem does not hide the installed one.
    if Path("benchmarks", "comparison.py").is_file():
        sys.path.append(str(Path.cwd()))
    try:
        return import_module("benchmarks.report")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "benchmarks":
            raise
        text = "--device and --peers are in the folder benchmarks/ of asyncmem's source tree: run it in a checkout"
        raise click.ClickException(text) from None


def known_rows(asked: Sequence[str], there: Iterable[str], how: str) -> list[str]:
    """Return the rows asked for, in the order in which they are shown; all if none is.

    Raises:
        UsageError: A row is not measured in this way.
    """
    names = list(there)
    for name in asked:
        if name not in names:
            raise click.UsageError(f"there is no row {name!r} {how}; there are: {', '.join(names)}")
    return [name for name in names if not asked or name in asked]


def _on_host(asked: tuple[str, ...], tasks: tuple[int, ...], options: RunOptions) -> bool:
    """Measure rows against floors on the host, print them, and return whether all bounds are met."""
    quick, uvloop, as_json = options["quick"], options["uvloop"], options["as_json"]
    names = known_rows(asked or [name for name in ROWS if name != LONG], ROWS, "without --device")
    effort = replace(QUICK if quick else FULL, uvloop=uvloop, tasks=tasks)
    results: dict[str, Row] = {}
    with progress("measuring", quiet=as_json, redraws=False) as report:
        for name in names:
            report(f"measuring {name}")
            results[name] = ROWS[name](effort)
    if as_json:
        document = {
            "rows": {name: row.as_json() for name, row in results.items()},
            "machine": describe_machine(),
            "method": {"quick": quick, "loop": "uvloop" if uvloop else "asyncio"},
        }
        click.echo(to_json(document, indent=2))
    else:
        _show(results, output())
    return all(row.met for row in results.values())


# -- the tables --------------------------------------------------------------------------------------------------------


def _show(results: Mapping[str, Row], console: Console) -> None:
    cases = [
        (f"{name} {part}".strip(), case)
        for name, row in results.items()
        for part, case in (row.cases or {"": row}).items()
    ]
    if timed := [(label, *_cells(case)) for label, case in cases if "program" not in case.figures]:
        headings = ("row", "asyncmem", "median", "floor", "median", "ratio", "at most", "bound")
        console.print("The fastest repeat of each side, and the median beside it")
        show_table(table_of(headings, timed, left=("row", "bound")), console)
    if programs := [_program_cells(case) for _, case in cases if "program" in case.figures]:
        headings = ("contention", "tasks", "steps/s", "of a semaphore", "share", "at least", "proofs", "bound")
        console.print("Steps a second, and a semaphore's; proofs: the time spent on looking for deadlocks")
        show_table(table_of(headings, programs, left=("contention", "bound")), console)
    for label, case in cases:
        if "bytes_each" in case.figures:
            console.print(label + ": {bytes_each} of {bytes_allowed} bytes each ({bytes_by})".format_map(case.figures))
        if case.broken:
            console.print(f"{label}: {case.broken}", soft_wrap=True)


def _cells(case: Row) -> list[Cell]:
    sides = (case.ours.ns, case.ours.median_ns, case.floor.ns, case.floor.median_ns)
    times = [format_duration(ns / 1e9) for ns in sides]
    return [*times, f"{case.ratio:.2f}", f"{case.bound:.1f}", _verdict(case)]


def _program_cells(case: Row) -> list[Cell]:
    """Return steps a second beside the semaphore's."""
    figures = case.figures
    counts = [figures[name] for name in ("program", "tasks", "steps_per_second", "floor_steps_per_second")]
    least = f"{figures['least_share']:.1f}" if figures["least_share"] else "-"
    return [*counts, f"{figures['share']:.2f}", least, f"{figures['proofs_share']:.2%}", _verdict(case)]


def _verdict(case: Row) -> Text:
    return verdict(case.met) if isfinite(case.bound) or case.broken else Text("")
