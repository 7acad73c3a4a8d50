"""`asyncmem replay`: what a pool would have reserved for a recorded program, and what that would have cost.

Beside it `costs`, which measures what a replay assumes, and `journal`, the replay of a single pool's decisions.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Final, TypeAlias

import click
import numpy as np

from asyncmem import AsyncMemoryPool, readers
from asyncmem.cli.parameters import (
    STANDARD_OUTPUT,
    TIME,
    Quantity,
    check_output,
    force_option,
    json_option,
    load,
    pool_of,
    pool_option,
    refuse,
    written,
)
from asyncmem.cli.replays import Entry, Recorded, advice_as_json, figures_of, page, show_advice, show_replays
from asyncmem.cli.tables import output, progress, show_table, table_of
from asyncmem.core import Kind
from asyncmem.devices import Simulated
from asyncmem.devices import device as make_device
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_duration, format_size
from asyncmem.files import open_file
from asyncmem.readers import Patience
from asyncmem.replay import (
    Journal,
    Model,
    Policy,
    Replay,
    Trace,
    advise,
    fit,
    measure_costs,
    pool_options,
    read,
    read_costs,
)
from asyncmem.replay import replay as run
from asyncmem.replay import replay_on as run_live
from asyncmem.replay.model import H200, policy_like
from asyncmem.replay.trace import trace_of
from asyncmem.text import printable, to_json
from asyncmem.units import parse_size

SAMPLES: Final = 2000
"""About how many moments a plot shows."""

_RECORDS: Final = b"asyncmem"
"""How a file that `asyncmem run` wrote begins."""

Limit: TypeAlias = Callable[[Trace], int]
"""Returns the bytes that may be reserved for a program."""


def _read_limit(text: str) -> Limit:
    if not text.endswith("x"):
        nbytes = parse_size(text)
        return lambda _: nbytes
    try:
        factor = float(text[:-1])
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e6:
        raise InvalidRequest("limit", text, 'a size such as "40 GiB", or a multiple such as "1.02x"')
    return lambda trace: int(trace.peak_requested * factor)


_LIMIT: Final = Quantity("limit", _read_limit, ("MiB", "B"))
_PATIENCE: Final = Quantity("patience", lambda text: readers.patience(text, "patience"), ("ms", "%"))


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help="A kind of segments and settings, as in paged,small_limit=512KiB; may be repeated, to compare.",
)
@click.option("--device", metavar="NAME", help="Replay through a real pool: host, simulated, cuda:0, or recorded.")
@click.option("--limit", type=_LIMIT, metavar="1.02x|SIZE", help="What may be reserved at most.")
@click.option("--lag", type=TIME, default="0s", show_default=True, metavar="TIME", help="How late the GPU is.")
@click.option("--patience", type=_PATIENCE, metavar="2%|TIME", help="How long growth may wait for unfinished work.")
@click.option("--pace", type=click.FloatRange(min=0), metavar="FACTOR", help="Scales the recorded times.")
@click.option("--costs", metavar="FILE", type=click.Path(exists=True, dir_okay=False), help="Costs of driver calls.")
@click.option("--fit", "fitting", is_flag=True, help="Also find the smallest limit that completes.")
@click.option("--advise", "advising", is_flag=True, help="List the options that would have helped, and their effect.")
@click.option("--of", "recorded", type=int, metavar="N", help="The device to replay, if a snapshot has several.")
@pool_option
@json_option
@click.option("--plot", metavar="OUT.HTML", help='Draw them in this file; "-" is standard output.')
@force_option
def replay(
    files: tuple[str, ...],
    policies: tuple[str, ...],
    device: str | None,
    limit: Limit | None,
    lag: float,
    patience: Patience | None,
    pace: float | None,
    costs: str | None,
    recorded: int | None,
    name: str | None,
    plot: str | None,
    *,
    fitting: bool,
    advising: bool,
    as_json: bool,
    force: bool,
) -> None:
    """Compute what a pool would have reserved for a recorded program, and what that would have cost.

    FILE is a recording: of `asyncmem run`, an .npz of columns, or a memory snapshot of PyTorch as pickle or JSON. It is
    replayed through the pool's own placement on a simulated device: in seconds, without a GPU, and the same every time.
    --lag is how far the GPU is behind the program; driver calls cost what they do on an H200, unless --costs says
    otherwise. What `asyncmem run` recorded is replayed with its pool's limit and options, unless others are given.

    \b
    A POLICY is a kind of segments, and settings after commas:
      paged           pages below reserved addresses; what is in no use is moved
      stream_ordered  segments of a pool of the driver's, which become one where they lie side by side
      apart           segments that never become one, as those of the host
      direct          each request from the driver

    take_back=off leaves pages where they are, patience=2% lets growth wait for that share of the time; the others
    are options of a pool: small_limit, strategy, segment_size, and those of the caches.

    With --device the program goes through a pool of that device instead, "recorded" for the one it was recorded on, and
    --lag keeps that busy for so long behind its recorded times: by kernels that spin, or by sleep on the host. With
    neither --lag nor --pace it goes as fast as it can there. All options of a pool may be settings then.

    With --advise the options are tried that could help the program as it is under --policy, stream_ordered unless that
    says otherwise, and lines of Python are printed that make a pool with those that do. For a recording of
    `asyncmem run` they have the pool's device, limit and other settings, too.

    Exits with 1 if a replay does not complete under its limit.
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    if plot is not None:
        check_output(plot, force=force, as_json=as_json, option="--plot")
    programs = [_read(file, recorded, name) for file in files]
    model = Model(lag=lag, pace=1.0 if pace is None else pace, costs=read_costs(costs) if costs else H200)
    if advising:
        refuse("does not go with --advise", limit=limit, patience=patience, fit=fitting, plot=plot, device=device)
        _advise(programs, policies, model, as_json=as_json)
        return
    if device is not None:
        refuse("does not go with --device", patience=patience, costs=costs, fit=fitting, plot=plot)

    def replayed(one: Recorded, text: str) -> Entry:
        most = one.limit if limit is None else limit(one.trace)
        if device is not None:
            return _on_device(device, one, text, most, lag=lag, pace=pace)
        policy = Policy.parse(text)
        chosen = policy if patience is None else replace(policy, patience=patience)
        with progress(f"replaying {one.trace.name}"):
            found = run(one.trace, chosen, model, limit=most, samples=SAMPLES if plot else 0)
            return Entry(one, str(policy), found, fit(one.trace, chosen, model) if fitting else None)

    entries = [replayed(one, text) for one in programs for text in policies or (_policy_of(one, device),)]
    _print(entries, plot, force=force, as_json=as_json)
    if not all(entry.replay.completed for entry in entries):
        raise click.exceptions.Exit(1)


def _read(file: str, device: int | None, pool: str | None) -> Recorded:
    with open_file(file) as opened:
        is_ours = opened.read(len(_RECORDS)) == _RECORDS
    if not is_ours:
        if pool is not None:
            raise click.UsageError("--pool is for what `asyncmem run` recorded")
        trace = read(file, device)
        if trace.note:
            click.echo(f"{printable(file)}: {printable(trace.note)}", err=True)
        return Recorded(file, trace)
    if device is not None:
        raise click.UsageError("--of is for snapshots; --pool chooses a pool that `asyncmem run` recorded")
    records = load(file)
    found = pool_of(records, pool)
    rows = records.in_pool(found.name).rows
    known = rows["number"][(rows["kind"] == Kind.ALLOCATED) | (rows["kind"] == Kind.HELD)]
    rows = rows[(rows["kind"] <= Kind.HELD) & np.isin(rows["number"], known)]
    trace = trace_of(rows, records.began, name=found.name, device=found.device, note=records.note)
    return Recorded(file, trace, found)


def _policy_of(one: Recorded, device: str | None) -> str:
    """Return the options of the recorded pool, or the policy of the model that comes closest to them."""
    if one.pool is None:
        return "paged" if device is None else "auto"
    return policy_like(one.pool.options) if device is None else one.pool.options


def _on_device(device: str, one: Recorded, policy: str, limit: int | None, *, lag: float, pace: float | None) -> Entry:
    if device == "recorded":
        if one.pool is None:
            raise click.UsageError('"--device recorded" is for what `asyncmem run` recorded')
        device = one.pool.device
    options = pool_options(policy)
    if limit is not None:
        options = options.replace(limit=limit)
    found = make_device(device)
    if lag > 0 and isinstance(found, Simulated):
        # A pool's worker goes by real time, from which a virtual clock runs away.
        found = Simulated(clock="wall", index=int(found.name.partition(":")[2]))
    with (
        progress(f"replaying {one.trace.name} on {device}", redraws=False),
        closing(found),
        AsyncMemoryPool(found, options=options) as pool,
    ):
        return Entry(one, policy, run_live(pool, one.trace, lag=lag, pace=pace))


def _print(entries: list[Entry], plot: str | None, *, force: bool, as_json: bool) -> None:
    if plot:
        drawn = page(entry.replay for entry in entries if isinstance(entry.replay, Replay))
        with written(plot, force=force) as out:
            out.write(drawn.encode("utf-8"))
    if as_json:
        click.echo(to_json([figures_of(entry) | entry.program.about() for entry in entries], indent=2))
    elif plot != STANDARD_OUTPUT:
        show_replays(entries, output())


def _advise(programs: list[Recorded], policies: tuple[str, ...], model: Model, *, as_json: bool) -> None:
    if len(policies) > 1:
        raise click.UsageError("--advise is about one policy: the one that the program has now")
    found = []
    for one in programs:
        given = policies[0] if policies else one.pool and _policy_of(one, None)
        with progress(f"trying options for {one.trace.name}"):
            policy = None if given is None else Policy.parse(given)
            found.append((one, advise(one.trace, policy, model, device=one.device)))
    if as_json:
        click.echo(to_json([advice_as_json(*pair) | pair[0].about() for pair in found], indent=2))
        return
    for one, advice in found:
        show_advice(one, advice, output())


@click.command()
@click.option("--device", "name", default="auto", show_default=True, metavar="NAME", help="Measure this device.")
@click.option("--json", "as_json", is_flag=True, help="Print what `replay --costs` reads, and nothing else.")
def costs(name: str, *, as_json: bool) -> None:
    """Measure what the driver's calls for memory take on this machine.

    A replay assumes the calls of an H200, made from C. In a virtual machine, or on another card, they may take several
    times as long, and a pool that moves memory does so less often there. This measures how long they take:

    \b
      asyncmem costs --device cuda:0 --json > costs.json
      asyncmem replay --costs costs.json program.npz

    The names are the CUDA driver's, whatever the device; calls that have no counterpart there are left out. It takes
    about a second, and up to half of the device's free memory meanwhile.
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    with closing(make_device(name)) as device, progress(f"measuring the driver calls of {device.name}"):
        found = measure_costs(device)
        label = device.name
    if as_json:
        click.echo(to_json({call: [[nbytes, round(ns)] for nbytes, ns in curve] for call, curve in found.items()}))
        return
    sizes = sorted({nbytes for curve in found.values() for nbytes, _ in curve})
    curves = {call: {nbytes: format_duration(ns / 1e9) for nbytes, ns in curve} for call, curve in found.items()}
    rows = [(call, *(curve.get(nbytes, "") for nbytes in sizes)) for call, curve in curves.items()]
    show_table(table_of((label, *map(format_size, sizes)), rows, left=(label,)), output())


# -- journal: the calls of a pool's heap and scheduler -----------------------------------------------------------------


def _read_changes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, object]:
    changes: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise click.BadParameter(f"expected SETTING=VALUE, got {text!r}", ctx=context, param=parameter)
        try:
            changes[name] = json.loads(value)
        except ValueError:
            changes[name] = parse_size(value, what=name)
    return changes


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(exists=True, dir_okay=False))
@click.option("--replay", "replaying", is_flag=True, help="Replay the calls on a fresh scheduler, and compare effects.")
@click.option(
    "--with",
    "changes",
    multiple=True,
    metavar="SETTING=VALUE",
    callback=_read_changes,
    help="Replay with another setting of the scheduler, as in bypass=0; may be repeated.",
)
def journal(file: str, changes: dict[str, object], *, replaying: bool) -> None:
    """Print the calls of a pool's heap and scheduler, and what they decided.

    FILE was written by a pool with the option `journal`. Each call is a line, with its time in seconds if it has one;
    below it are its effects. Requests are numbered in their order.

    With --replay, or --with, the calls are made on a fresh heap and scheduler instead, and the first call is printed
    whose effects differ. Exits with 1 if there is one.
    """
    found = Journal(file)
    if not (replaying or changes):
        for line in found.lines():
            click.echo(line)
        return
    with progress(f"replaying {file}"):
        difference = found.replay(**changes)
    if difference is None:
        click.echo(f"{printable(file)}: the same is decided again")
        return
    click.echo(f"{printable(file)}, {difference}")
    raise click.exceptions.Exit(1)
