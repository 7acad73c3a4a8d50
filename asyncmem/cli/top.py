"""`asyncmem top`: the pools of a running process, or of a cluster's workers, as they are now."""

import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from asyncmem.cli.parameters import TIME
from asyncmem.cli.tables import COLOURS, UNLIMITED, Cell, output, show, table_of
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.insight.live.client import ClusterLook, Look, NotServing, PoolLook, ProcessLook, ask, serving
from asyncmem.text import printable, to_json

_HOW: Final = (
    "A process shows its pools if it was started with `asyncmem run --live PROGRAM`, or has called "
    "asyncmem.insight.serve_live()."
)
_HINT: Final = "q leaves"

AnyLook: TypeAlias = ProcessLook | ClusterLook


class _Source(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The number of a process, or the address of a scheduler."""

    name = "source"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> object:  # noqa: ANN401
        """Read text; an address has "://" in it."""
        if "://" in str(value):
            return value
        try:
            return click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter:
            expected = "the number of a process, or an address such as tcp://HOST:8786"
            self.fail(f"expected {expected}, got {value!r}", param, ctx)


@click.command()
@click.argument("source", metavar="[PID|ADDRESS]", type=_Source(), required=False)
@click.option("--interval", type=TIME, default="1 s", show_default=True, help="Time between two looks.")
@click.option("--once", is_flag=True, help="Show them once, and end; so it does without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known as JSON on standard output, once.")
def top(source: int | str | None, interval: float, *, once: bool, as_json: bool) -> None:
    """Show the pools of a running process: what is live, reserved and waited for, and what holds it.

    PID is the process; without it the only one that shows its pools. A process does after `asyncmem run --live PROGRAM`
    or a call of asyncmem.insight.serve_live(), to programs of the same user alone. Holders are known while they are
    recorded, as `run` does. Press q to leave.

    ADDRESS is that of a Dask scheduler, as in tcp://127.0.0.1:8786: all workers with a PoolPlugin are shown. For tls://
    certificates are found as Dask finds them, in its configuration.
    """
    first = _cluster(source) if isinstance(source, str) else _process(source)
    console = output()
    if as_json:
        click.echo(to_json(first, indent=2))
    elif once or not console.is_terminal:
        show(picture(first, width=console.width), console)
    else:
        _watch(first, interval, console)


def _process(process: int | None) -> ProcessLook:
    """Return what the process of that number shows, or the only one that shows its pools."""
    if process is None:
        found = serving()
        if not found:
            raise click.ClickException(f"no process shows its pools. {_HOW}")
        if len(found) > 1:
            raise click.UsageError(f"several processes show their pools; choose one:\n{listed(found)}")
        return found[0]
    try:
        return ask(process)
    except NotServing as error:
        others = serving()
        hint = f"These do:\n{listed(others)}" if others else _HOW
        raise click.ClickException(f"{error}. {hint}") from error
    except OSError as error:
        raise click.ClickException(f"process {process} does not answer: {error}") from error


def _cluster(scheduler: str) -> ClusterLook:
    """Return what the workers of a cluster show."""
    try:
        from asyncmem.distributed.looks import ask_cluster
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    try:
        return ask_cluster(scheduler)
    except OSError as error:
        raise click.ClickException(str(error)) from error


def _again(before: AnyLook) -> AnyLook:
    """Look once more at the same."""
    if "process" in before:
        return ask(before["process"], timeout=2)
    from asyncmem.distributed.looks import ask_cluster

    return ask_cluster(before["scheduler"], timeout=2)


def _watch(now: AnyLook, interval: float, console: Console) -> None:
    before, hint = None, _HINT
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(now, before, width=console.width, hint=hint), refresh=True)
            if "q" in key(max(interval, 0.05)).lower():
                return
            try:
                before, now, hint = now, _again(now), _HINT
            except TimeoutError:
                hint = f"{_HINT}, no answer now"  # it is busy, or stopped
            except OSError:
                break
    show(picture(now, width=console.width), console)
    ended = f"has ended, or shows its pools no more ({format_count(len(now['pools']), 'pool')})"
    click.echo(f"{_title(now)} {ended}", err=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits for a key for so many seconds, and returns it, or nothing.

    Keys are neither shown nor kept until the line ends; Ctrl-C interrupts as ever. The terminal is left as it was.
    """
    keyboard = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    before = [termios.tcgetattr(one) for one in keyboard]

    def key(seconds: float) -> str:
        ready, _, _ = select.select(keyboard, [], [], seconds)
        return os.read(ready[0], 64).decode(errors="replace") if ready else ""

    try:
        for one in keyboard:
            tty.setcbreak(one)
        yield key
    finally:
        for one, attributes in zip(keyboard, before, strict=True):
            termios.tcsetattr(one, termios.TCSADRAIN, attributes)


def listed(found: Sequence[ProcessLook]) -> str:
    """Return a line for each process: its number and its command line."""
    return "\n".join(f"  {one['process']}  {printable(' '.join(one['program']))}" for one in found)


# -- the screen --------------------------------------------------------------------------------------------------------

_BAR: Final = 20
_SHOWN: Final = 8
_WORDS: Final = ("pool", "device", "of the limit")
_SPARE: Final = ("of the limit", "device", "per second", "hits", "limit")
"""Columns that a narrow screen does without, the one that is missed least first."""


def picture(now: AnyLook, before: AnyLook | None = None, *, width: int = UNLIMITED, hint: str = "") -> Group:
    """Lay out what a process or a cluster shows: a line for each pool, the waiting requests, the holders.

    Args:
        now: What it shows now.
        before: What it showed before, for what happens in a second.
        width: Columns of the screen.
        hint: Stands in the first line, before the program, which may be longer than that.
    """
    return Group(*_parts(now, before, width, hint))


def _title(look: AnyLook) -> str:
    return f"process {look['process']}" if "process" in look else printable(look["scheduler"])


def _parts(now: AnyLook, before: AnyLook | None, width: int, hint: str) -> Iterator[RenderableType]:
    moment = time.strftime("%H:%M:%S", time.localtime(now["time"]))
    if "process" in now:
        rest = printable(" ".join(now["program"]))
    else:
        rest = format_count(len(now["workers"]), "worker")
        rest += f", {len(now['silent']):,} without a PoolPlugin" if now["silent"] else ""
    head = (moment, _title(now), hint, rest)
    yield Text("  ".join(filter(None, head)), style="bold", no_wrap=True, overflow="ellipsis")
    yield Text()
    if not now["pools"]:
        yield Text("No pool is open.")
        return
    yield _pools(now, before, width)
    waiting = sorted(
        ((pool, one) for pool in now["pools"] for one in pool["waiters"]), key=lambda pair: -pair[1]["age"]
    )
    if waiting:
        rows = [
            (
                format_duration(one["age"]), format_size(one["nbytes"]),
                printable(one["owner"]) + (" (the pool grows)" if one["growing"] else ""),
                _within(pool, str(one.get("share", ""))),
            )
            for pool, one in waiting[:_SHOWN]
        ]  # fmt: skip
        yield Text()
        yield table_of(("waiting", "wants", "owner", "pool"), rows, left=("owner", "pool"))
    for title, holders in (
        ("held by tag", (one for pool in now["pools"] for one in pool["tags"])),
        ("held by line", (one for pool in now["pools"] for one in pool["sites"])),
    ):
        sums: Counter[str] = Counter()
        for one in holders:
            sums[one["name"]] += one["nbytes"]
        if sums:
            held = [(format_size(nbytes), name) for name, nbytes in sums.most_common(_SHOWN)]
            yield Text()
            yield table_of(("bytes", title), held, left=(title,))


def _pools(now: Look, before: Look | None, width: int) -> Table:
    """Return the table of pools, with as many of its columns as the screen has room for."""
    earlier = dict(_shares(before)) if before else {}
    rows = [_cells(name, stats, earlier.get(name)) for name, stats in _shares(now)]
    headings, spare = list(rows[0]), list(_SPARE)
    while True:
        table = table_of(headings, [[row[heading] for heading in headings] for row in rows], left=_WORDS)
        if not spare or Console(width=UNLIMITED).measure(table).maximum <= width:
            return table
        headings.remove(spare.pop(0))


def _shares(look: Look) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the names and figures of pools, each followed by those of its budgets."""
    for pool in look["pools"]:
        name = _name(pool)
        at = pool.get("time", look["time"])
        yield name, {**pool["stats"], "closed": pool["closed"], "time": at}
        for stats in pool["budgets"]:
            yield _within(pool, str(stats["name"])), {**stats, "reserved_bytes": 0, "time": at}


def _within(pool: PoolLook, share: str) -> str:
    """Return the name of a budget or a lease of a pool, which begins with the pool's, or that alone."""
    name = str(pool["stats"]["name"])
    return printable(share if share == name or share.startswith(f"{name}/") else f"{name}/{share}" if share else name)


def _cells(name: str, stats: dict[str, Any], earlier: dict[str, Any] | None) -> dict[str, Cell]:
    return {
        "pool": name + (" (closed)" if stats.get("closed") else ""),
        "device": str(stats["device"]),
        "live": format_size(stats["allocated_bytes"]),
        "reserved": format_size(stats["reserved_bytes"]) if "closed" in stats else "-",
        "limit": format_size(stats["limit"]),
        "of the limit": _bar(stats),
        "waiting": _waiting(stats),
        "hits": format_share(stats["cache_hit_rate"]),
        "per second": _pace(stats, earlier),
    }


def _bar(stats: dict[str, Any]) -> Text:
    limit = max(stats["limit"], 1)
    live = min(round(_BAR * stats["allocated_bytes"] / limit), _BAR)
    reserved = min(round(_BAR * stats["reserved_bytes"] / limit), _BAR)
    colour = COLOURS.get(stats["pressure"], "")
    return Text.assemble(
        ("█" * live, colour), ("▒" * max(reserved - live, 0), colour), "·" * (_BAR - max(live, reserved))
    )


def _waiting(stats: dict[str, Any]) -> str:
    found = [f"{stats['waiting']:,} for {format_size(stats['waiting_bytes'])}"] if stats["waiting"] else []
    found += [f"{stats['growing']:,} growing"] if stats["growing"] else []
    return ", ".join(found) or "-"


def _pace(stats: dict[str, Any], earlier: dict[str, Any] | None) -> str:
    seconds = stats["time"] - earlier["time"] if earlier else 0
    if earlier is None or seconds <= 0 or stats["num_allocations"] < earlier["num_allocations"]:
        return "-"
    return f"{(stats['num_allocations'] - earlier['num_allocations']) / seconds:,.0f}"


def _name(pool: PoolLook) -> str:
    return printable(str(pool["stats"]["name"]))
