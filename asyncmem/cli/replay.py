"""`asyncmem replay`: what a pool would have reserved for a recorded program, and what that would have cost."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from asyncmem.cli.parameters import read_duration
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.replay import Model, Patience, Policy, Replay, Trace, fit, read, read_costs
from asyncmem.replay import replay as run
from asyncmem.replay.costs import H200
from asyncmem.replay.plot import page
from asyncmem.units import parse_size

SAMPLES = 2000
"""Moments that a plot shows, about."""

_WIDE = 240


@dataclass(frozen=True)
class Limit:
    """A limit as it was written: in bytes, or as a multiple of what a program needs at least."""

    nbytes: int = 0
    factor: float = 0.0

    def of(self, trace: Trace) -> int:
        """Answer the bytes for one program."""
        return int(trace.peak_requested * self.factor) if self.factor else self.nbytes


@dataclass(frozen=True)
class Entry:
    """One line of the table."""

    file: str
    replay: Replay
    fitted: int | None


def _read_limit(context: click.Context, parameter: click.Parameter, text: str | None) -> Limit | None:
    if text is None:
        return None
    try:
        if text.endswith("x"):
            return Limit(factor=_read_factor(text))
        return Limit(nbytes=parse_size(text, what="limit"))
    except InvalidRequest as error:
        raise click.BadParameter(f"expected {error.expected}, got {error.got}", ctx=context, param=parameter) from error


def _read_factor(text: str) -> float:
    try:
        factor = float(text[:-1])
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise InvalidRequest("limit", text, 'a size such as "40 GiB", or a multiple of what is needed such as "1.02x"')
    return factor


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="A kind of segments and settings, as in virtual,small_limit=512KiB; may be repeated, to compare.",
)
@click.option("--limit", callback=_read_limit, metavar="1.02x|SIZE", help="What may be reserved at most.")
@click.option(
    "--lag", callback=read_duration, default="0s", show_default=True, metavar="TIME", help="How late the GPU is."
)
@click.option("--patience", metavar="2%|TIME", help="How long growth may wait for work that is under way.")
@click.option("--pace", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Scales the recorded times.")
@click.option("--costs", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Costs of driver calls.")
@click.option("--fit", "fitting", is_flag=True, help="Also find the smallest limit that completes.")
@click.option("--of", "recorded", type=int, metavar="N", help="The device to replay, where a recording has several.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else.")
@click.option("--plot", "plot", metavar="OUT.HTML", type=click.Path(dir_okay=False, writable=True), help="Draw them.")
def replay(
    files: tuple[str, ...],
    policies: tuple[str, ...],
    limit: Limit | None,
    lag: float,
    patience: str | None,
    pace: float,
    costs: str | None,
    fitting: bool,
    recorded: int | None,
    as_json: bool,
    plot: str | None,
) -> None:
    r"""Say what a pool would have reserved for a recorded program, and what that would have cost.

    FILE is a recording: an .npz of columns, or a memory snapshot of PyTorch as pickle or JSON. It is replayed through
    the pool's own placement on a simulated device: in seconds, without a GPU, and the same every time. --lag says how
    much later the GPU does what it is told; driver calls cost what they do on an H200, unless --costs says otherwise.

    \b
    A POLICY is a kind of segments, and settings after commas:
      virtual         pages below reserved addresses; what is in no use is moved
                      (what a pool does with segments="paged")
      stream_ordered  segments of a pool of the driver's
      direct          each request from the driver
    take_back=off leaves pages where they are, patience=2% lets growth wait for that share of the time; the others
    are options of a pool: small_limit, strategy, segment_size, and those of the caches.

    Exits with 1 where a replay does not complete under its limit.
    """
    chosen = [_patient(Policy.parse(text), patience) for text in policies or ("virtual",)]
    model = Model(lag=lag, pace=pace, costs=read_costs(costs) if costs else H200)
    entries = [
        _replayed(file, read(file, recorded), policy, model, limit, samples=SAMPLES if plot else 0, fitting=fitting)
        for file in files
        for policy in chosen
    ]
    if plot:
        Path(plot).write_text(page(entry.replay for entry in entries), encoding="utf-8")
    if as_json:
        click.echo(json.dumps([_as_json(entry) for entry in entries], indent=2))
    else:
        console = Console(highlight=False)
        # What goes to a file or another program is not cut to the width of a screen.
        _print(entries, console if console.is_terminal else Console(highlight=False, width=_WIDE))
    if not all(entry.replay.completed for entry in entries):
        raise click.exceptions.Exit(1)


def _patient(policy: Policy, patience: str | None) -> Policy:
    return policy if patience is None else replace(policy, patience=Patience.parse(patience))


def _replayed(
    file: str, trace: Trace, policy: Policy, model: Model, limit: Limit | None, *, samples: int, fitting: bool
) -> Entry:
    found = run(trace, policy, model, limit=None if limit is None else limit.of(trace), samples=samples)
    return Entry(file, found, fit(trace, policy, model) if fitting else None)


def _as_json(entry: Entry) -> dict[str, object]:
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


def _print(entries: list[Entry], console: Console) -> None:
    console.print(_table(entries))
    for entry in entries:
        one = entry.replay
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
        _of_time(one.driver_seconds, one),
        *([f"{one.waits:,}", _of_time(one.wait_seconds, one)] if waited else []),
    )


def _of_time(seconds: float, one: Replay) -> str:
    share = f" ({format_share(seconds / one.duration)})" if one.duration else ""
    return format_duration(seconds) + share
