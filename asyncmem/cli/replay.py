"""`asyncmem replay`: what a pool would have reserved for a recorded program, and what that would have cost."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import click
from rich.console import Console

from asyncmem import readers
from asyncmem.cli.parameters import read_duration
from asyncmem.cli.replays import advice, live, table
from asyncmem.cli.replays.plot import page
from asyncmem.cli.reports.writing import written
from asyncmem.cli.tables import paper
from asyncmem.errors import InvalidRequest
from asyncmem.replay import Model, Policy, Trace, advise, fit, read, read_costs
from asyncmem.replay import replay as run
from asyncmem.replay.model import H200
from asyncmem.units import parse_size

SAMPLES = 2000
"""Moments that a plot shows, about."""

Traces: TypeAlias = list[tuple[str, Trace]]
"""What was read, with the names of the files."""


@dataclass(frozen=True)
class Limit:
    """A limit as it was written: in bytes, or as a multiple of what a program needs at least."""

    nbytes: int = 0
    factor: float = 0.0

    def of(self, trace: Trace) -> int:
        """Answer the bytes for one program."""
        return int(trace.peak_requested * self.factor) if self.factor else self.nbytes


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
@click.option("--device", metavar="NAME", help="Replay through a real pool: host, simulated, cuda:0, ...")
@click.option("--limit", callback=_read_limit, metavar="1.02x|SIZE", help="What may be reserved at most.")
@click.option(
    "--lag", callback=read_duration, default="0s", show_default=True, metavar="TIME", help="How late the GPU is."
)
@click.option("--patience", metavar="2%|TIME", help="How long growth may wait for work that is under way.")
@click.option("--pace", type=click.FloatRange(min=0), metavar="FACTOR", help="Scales the recorded times.")
@click.option("--costs", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Costs of driver calls.")
@click.option("--fit", "fitting", is_flag=True, help="Also find the smallest limit that completes.")
@click.option("--advise", "advising", is_flag=True, help="Say which options would have helped, each with its effect.")
@click.option("--of", "recorded", type=int, metavar="N", help="The device to replay, where a recording has several.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else.")
@click.option("--plot", "plot", metavar="OUT.HTML", type=click.Path(dir_okay=False, writable=True), help="Draw them.")
def replay(
    files: tuple[str, ...],
    policies: tuple[str, ...],
    device: str | None,
    limit: Limit | None,
    lag: float,
    patience: str | None,
    pace: float | None,
    costs: str | None,
    fitting: bool,
    advising: bool,
    recorded: int | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Say what a pool would have reserved for a recorded program, and what that would have cost.

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

    With --device the program goes through a pool of that device instead, and --lag keeps that busy for so long behind
    its recorded times: by kernels that spin, or by sleep on the host. With neither --lag nor --pace it goes as fast as
    it can there. All options of a pool may be settings then.

    With --advise the options are tried that could help the program as it is under --policy, stream_ordered unless that
    says otherwise, and lines of Python are printed that make a pool with those that do.

    Exits with 1 where a replay does not complete under its limit.
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    traces = [(file, read(file, recorded)) for file in files]
    model = Model(lag=lag, pace=1.0 if pace is None else pace, costs=read_costs(costs) if costs else H200)
    if device is not None:
        _refuse("--device", patience=patience, costs=costs, fit=fitting, advise=advising, plot=plot)
        completed = _on_device(device, traces, policies or ("auto",), lag, pace, limit, as_json=as_json)
    elif advising:
        _refuse("--advise", limit=limit, patience=patience, fit=fitting, plot=plot)
        completed = _advise(traces, policies, model, as_json=as_json)
    else:
        chosen = [_patient(Policy.parse(text), patience) for text in policies or ("virtual",)]
        completed = _on_model(traces, chosen, model, limit, fitting=fitting, plot=plot, as_json=as_json)
    if not completed:
        raise click.exceptions.Exit(1)


def _on_device(
    device: str,
    traces: Traces,
    policies: tuple[str, ...],
    lag: float,
    pace: float | None,
    limit: Limit | None,
    *,
    as_json: bool,
) -> bool:
    entries = [
        live.replayed(device, file, trace, policy, limit=_of(limit, trace), lag=lag, pace=pace)
        for file, trace in traces
        for policy in policies
    ]
    _tell(traces, map(live.as_json, entries), lambda console: live.show(entries, console), as_json=as_json)
    return all(entry.replay.completed for entry in entries)


def _advise(traces: Traces, policies: tuple[str, ...], model: Model, *, as_json: bool) -> bool:
    if len(policies) > 1:
        raise click.UsageError("--advise is about one policy: the one that the program has now")
    now = Policy.parse(policies[0]) if policies else None
    found = [(file, advise(trace, now, model)) for file, trace in traces]

    def show(console: Console) -> None:
        for _, one in found:
            advice.show(one, console)

    _tell(traces, (advice.as_json(file, one) for file, one in found), show, as_json=as_json)
    return True


def _on_model(
    traces: Traces,
    policies: list[Policy],
    model: Model,
    limit: Limit | None,
    *,
    fitting: bool,
    plot: str | None,
    as_json: bool,
) -> bool:
    entries = []
    for file, trace in traces:
        for policy in policies:
            found = run(trace, policy, model, limit=_of(limit, trace), samples=SAMPLES if plot else 0)
            entries.append(table.Entry(file, found, fit(trace, policy, model) if fitting else None))
    if plot:
        with written(Path(plot), force=True) as out:
            out.write(page(entry.replay for entry in entries).encode("utf-8"))
    _tell(traces, map(table.as_json, entries), lambda console: table.show(entries, console), as_json=as_json)
    return all(entry.replay.completed for entry in entries)


def _tell(
    traces: Traces, figures: Iterable[dict[str, object]], show: Callable[[Console], None], *, as_json: bool
) -> None:
    notes = {file: trace.note for file, trace in traces}
    for file, note in notes.items():
        if note:
            click.echo(f"{file}: {note}", err=True)
    if as_json:
        click.echo(json.dumps([{**one, "note": notes[str(one["file"])]} for one in figures], indent=2))
    else:
        show(paper(markup=True))


def _of(limit: Limit | None, trace: Trace) -> int | None:
    return None if limit is None else limit.of(trace)


def _patient(policy: Policy, patience: str | None) -> Policy:
    return policy if patience is None else replace(policy, patience=readers.patience(patience, "patience"))


def _refuse(mode: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise click.UsageError(f"--{name} does not go with {mode}")
