"""`asyncmem bench`: what allocations cost on this machine, each next to a floor measured in the same process."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, replace

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from asyncmem.cli.benchmarks import LONG_ROWS, ROWS
from asyncmem.cli.benchmarks.contention import TASKS
from asyncmem.cli.benchmarks.contention.table import print_contention
from asyncmem.cli.benchmarks.device import DEVICE_ROWS
from asyncmem.cli.benchmarks.measure import FULL, QUICK, Effort
from asyncmem.cli.benchmarks.result import Row
from asyncmem.cli.comparison import compare
from asyncmem.cli.machine import installed_version, look_around
from asyncmem.cli.tables import print_whole
from asyncmem.figures import format_duration

NAMES = list(dict.fromkeys([*ROWS, *LONG_ROWS, *DEVICE_ROWS]))


def read_tasks(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Read numbers of tasks, such as "20,200"."""
    try:
        tasks = tuple(int(one) for one in text.split(","))
    except ValueError:
        tasks = (0,)
    if min(tasks) < 1:
        raise click.BadParameter(f"expected numbers such as 20,200, got {text!r}", ctx=context, param=parameter)
    return tasks


@click.command()
@click.argument("rows", nargs=-1, metavar="[ROW]...", type=click.Choice(NAMES))
@click.option("--device", metavar="DEVICE", help="Measure the pool on this device: host, simulated, cuda:0.")
@click.option("--peers", is_flag=True, help="Also torch, CuPy, RMM, cuda.core and the driver; absent ones are named.")
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="A recording for the row `replay`; may be repeated.",
)
@click.option(
    "--tasks",
    metavar="N,N",
    default=",".join(map(str, TASKS)),
    callback=read_tasks,
    help="How many tasks `contention` has; by default 20 to 20,000.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else.")
@click.option("--quick", is_flag=True, help="Fewer and shorter repeats: for a look, not for a verdict.")
@click.option("--uvloop", is_flag=True, help="Run both sides on uvloop instead of asyncio's own loop (not `stall`).")
@click.option("--check", is_flag=True, help="Exit with 1 when a bound is not met.")
def bench(
    rows: tuple[str, ...],
    device: str | None,
    peers: bool,
    traces: tuple[str, ...],
    tasks: tuple[int, ...],
    as_json: bool,
    quick: bool,
    uvloop: bool,
    check: bool,
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

    With --device or --peers (then on cuda:0) it is the pool on that device instead, and with --peers other libraries'
    allocators beside it at the same work, each family in a process of its own, one after another; under five minutes
    for all. `hit`, `await_hit`, `churn` and `batch` are measured there with larger sizes, and in addition:

    \b
    large         1 MiB to 1 GiB, fixed and random sizes
    cross_stream  allocated on one stream and freed on another
    streams       matrix products handed over four streams: memory reserved, and time
    growth        400 blocks from nothing: how long one holds the caller's thread
    loop_stall    a ticking task's longest wait meanwhile, against none of that
    take_back     a training-like step while the worker takes pages back
    replay        recorded programs, each named by --trace, from no memory at all
    same_size, large_tensors, transformer_step, pressure, variable_sizes
                  what an earlier allocator was compared with PyTorch by
    """  # noqa: D301 - click wants the character itself
    if device is not None or peers:
        names = _of_device(_known(rows, list(DEVICE_ROWS), "with"), rows, traces)
        met = compare(
            names,
            device or "cuda:0",
            peers=peers,
            as_json=as_json,
            quick=quick,
            uvloop=_uvloop(uvloop),
            traces=traces,
        )
        if check and not met:
            raise click.exceptions.Exit(1)
        return
    names = _known(rows, [*ROWS, *(name for name in LONG_ROWS if name in rows)], "without")
    effort = replace(QUICK if quick else FULL, loop_factory=_loop_factory(uvloop))
    results = _measure(names, effort, tasks, quiet=as_json)
    if as_json:
        click.echo(json.dumps(_document(results, quick=quick, uvloop=uvloop), indent=2))
    else:
        _print(results, Console())
    if check and not all(row.met for row in results.values()):
        raise click.exceptions.Exit(1)


def _known(rows: tuple[str, ...], there: list[str], how: str) -> list[str]:
    """Answer the rows that are meant, in the table's order; one that is not measured in this way is a usage error."""
    for name in rows:
        if name not in there:
            raise click.UsageError(f"{name} is not measured {how} --device or --peers; there are: {', '.join(there)}")
    return [name for name in there if not rows or name in rows]


def _of_device(names: list[str], asked: tuple[str, ...], traces: tuple[str, ...]) -> list[str]:
    """Leave out rows that replay recordings where none is named; to ask for one of them then is a usage error."""
    recorded = [name for name in names if DEVICE_ROWS[name].recorded]
    if recorded and asked and not traces:
        raise click.UsageError(f"{recorded[0]} is about recorded programs: name them with --trace FILE")
    return names if traces else [name for name in names if name not in recorded]


def _uvloop(wanted: bool) -> bool:
    if wanted and installed_version("uvloop") is None:
        raise click.UsageError("uvloop is not installed; install it with: pip install uvloop")
    return wanted


def _loop_factory(uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if not _uvloop(uvloop):
        return asyncio.SelectorEventLoop
    import uvloop as package

    return package.Loop


def _measure(names: list[str], effort: Effort, tasks: tuple[int, ...], *, quiet: bool) -> dict[str, Row]:
    results = {}
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False
    )
    # Drawn between the rows only: a thread that redraws would be measured, too.
    with progress:
        task = progress.add_task("", visible=not quiet)
        for name in names:
            progress.update(task, description=f"measuring {name}", refresh=not quiet)
            results[name] = LONG_ROWS[name](effort, tasks) if name in LONG_ROWS else ROWS[name](effort)
    return results


def _document(results: dict[str, Row], *, quick: bool, uvloop: bool) -> dict[str, object]:
    return {
        "rows": {name: row.as_json() for name, row in results.items()},
        "machine": asdict(look_around()),
        "method": {"quick": quick, "loop": "uvloop" if uvloop else "asyncio"},
    }


def _print(results: dict[str, Row], console: Console) -> None:
    shown = {name: row for name, row in results.items() if name not in LONG_ROWS}
    if shown:
        print_whole(_table(shown), console)
    for name, row in results.items():
        if name in LONG_ROWS:
            print_contention(row, console)
            continue
        if row.broken:
            console.print(f"{name}: {row.broken}")


def _table(results: dict[str, Row]) -> Table:
    title = "The fastest repeat of each side, and the median beside it"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("row", overflow="fold")  # in a narrow terminal; figures are never cut
    for heading in ("asyncmem", "median", "floor", "median", "ratio", "at most"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bound", no_wrap=True)
    for name, row in results.items():
        parts = {f"{name} {case}": part for case, part in row.cases.items()} or {name: row}
        for label, part in parts.items():
            table.add_row(*_cells(label, part))
    return table


def _cells(label: str, row: Row) -> tuple[str, ...]:
    verdict = "[green]met[/]" if row.met else "[red]not met[/]"
    times = (format_duration(ns / 1e9) for ns in (row.ns, row.ns_median, row.floor_ns, row.floor_median_ns))
    return label, *times, f"{row.ratio:.2f}", f"{row.bound:.1f}", verdict
