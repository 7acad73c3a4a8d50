"""`asyncmem replay`: what a pool would have reserved for a recorded program, and what that would have cost."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import click

from asyncmem import AsyncMemoryPool, readers
from asyncmem.cli.parameters import (
    SIZE,
    STANDARD_OUTPUT,
    TIME,
    Quantity,
    force_option,
    json_option,
    need_free,
    written,
)
from asyncmem.cli.recordings import load, plain, pool_of, pool_option, program_of
from asyncmem.cli.replays import Entry, advice_as_json, figures_of, page, show_advice, show_replays
from asyncmem.cli.tables import output, progress
from asyncmem.devices import Device, Simulated
from asyncmem.devices import device as make_device
from asyncmem.files import open_file
from asyncmem.insight.names import PoolName
from asyncmem.readers import Patience
from asyncmem.replay import Model, Policy, Replay, Trace, advise, fit, pool_options, read, read_costs
from asyncmem.replay import replay as run
from asyncmem.replay import replay_on as run_live
from asyncmem.replay.model import H200
from asyncmem.replay.policy import policy_like
from asyncmem.text import printable, to_json

SAMPLES: Final = 2000
"""About how many moments a plot shows."""

_RECORDS: Final = b"asyncmem"
"""How a file that `asyncmem run` wrote begins."""
_AS_RECORDED: Final = "recorded"
"""The name that stands for the device of a recording."""

Limit: TypeAlias = Callable[[Trace], int]
"""Returns the bytes that may be reserved for a program."""


@dataclass(frozen=True)
class Recorded:
    """A program that was read from a file."""

    file: str
    trace: Trace
    pool: PoolName | None = None
    """The pool that `asyncmem run` recorded; None for other files."""

    def limit(self, limit: Limit | None) -> int | None:
        """Return the bytes that may be reserved: those asked for, else those of the recorded pool, else any number."""
        if limit is not None:
            return limit(self.trace)
        return None if self.pool is None else self.pool.limit

    def figures(self, found: dict[str, object]) -> dict[str, object]:
        """Return figures of it with what is missing in the recording, and the pool that was recorded."""
        pool = {} if self.pool is None else {"recorded": plain(self.pool)}
        return {**found, "note": self.trace.note, **pool}


class _LimitType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    name = "limit"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        if not isinstance(value, str) or not value.endswith("x"):
            nbytes = SIZE.convert(value, param, ctx)
            return lambda _: nbytes
        try:
            factor = float(value[:-1])
        except ValueError:
            factor = 0.0
        if not 0 < factor < 1e6:
            self.fail(f'expected a size such as "40 GiB", or a multiple such as "1.02x", got {value!r}', param, ctx)
        return lambda trace: int(trace.peak_requested * factor)


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
@click.option("--limit", type=_LimitType(), metavar="1.02x|SIZE", help="What may be reserved at most.")
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
      stream_ordered  segments of a pool of the driver's
      direct          each request from the driver

    take_back=off leaves pages where they are, patience=2% lets growth wait for that share of the time; the others
    are options of a pool: small_limit, strategy, segment_size, and those of the caches.

    With --device the program goes through a pool of that device instead, "recorded" for the one it was recorded on, and
    --lag keeps that busy for so long behind its recorded times: by kernels that spin, or by sleep on the host. With
    neither --lag nor --pace it goes as fast as it can there. All options of a pool may be settings then.

    With --advise the options are tried that could help the program as it is under --policy, stream_ordered unless that
    says otherwise, and lines of Python are printed that make a pool with those that do.

    Exits with 1 if a replay does not complete under its limit.
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    if plot == STANDARD_OUTPUT and as_json:
        raise click.UsageError('--json and "--plot -" both write to standard output')
    if plot is not None:
        need_free(plot, force=force)
    programs = [_read(file, recorded, name) for file in files]
    model = Model(lag=lag, pace=1.0 if pace is None else pace, costs=read_costs(costs) if costs else H200)
    if advising:
        _refuse("--advise", limit=limit, patience=patience, fit=fitting, plot=plot, device=device)
        _advise(programs, policies, model, as_json=as_json)
        return
    if device is not None:
        _refuse("--device", patience=patience, costs=costs, fit=fitting, plot=plot)
        found = [_on_device(device, one, policies, one.limit(limit), lag=lag, pace=pace) for one in programs]
    else:
        samples = SAMPLES if plot else 0
        found = [
            _on_model(one, policies, patience, model, one.limit(limit), samples=samples, fitting=fitting)
            for one in programs
        ]
    entries = [(one, entry) for one, some in zip(programs, found, strict=True) for entry in some]
    _print(entries, plot, force=force, as_json=as_json)
    if not all(entry.replay.completed for _, entry in entries):
        raise click.exceptions.Exit(1)


def _print(entries: list[tuple[Recorded, Entry]], plot: str | None, *, force: bool, as_json: bool) -> None:
    if plot:
        drawn = page(one.replay for _, one in entries if isinstance(one.replay, Replay))
        with written(plot, force=force) as out:
            out.write(drawn.encode("utf-8"))
    if as_json:
        click.echo(to_json([one.figures(figures_of(entry)) for one, entry in entries], indent=2))
    elif plot != STANDARD_OUTPUT:
        show_replays([entry for _, entry in entries], output())


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
    name = pool_of(records, pool)
    found = next(one for one in records.names.pools if one.name == name)
    return Recorded(file, program_of(records, name), found)


def _policy_of(one: Recorded) -> str | None:
    """Return the policy of the model that comes closest to the recorded pool's options."""
    return None if one.pool is None else policy_like(one.pool.options)


def _on_model(
    one: Recorded,
    policies: tuple[str, ...],
    patience: Patience | None,
    model: Model,
    limit: int | None,
    *,
    samples: int,
    fitting: bool,
) -> list[Entry]:
    entries = []
    for policy in map(Policy.parse, policies or (_policy_of(one) or "paged",)):
        chosen = policy if patience is None else replace(policy, patience=patience)
        with progress(f"replaying {one.trace.name}"):
            found = run(one.trace, chosen, model, limit=limit, samples=samples)
            fitted = fit(one.trace, chosen, model) if fitting else None
        entries.append(Entry(one.file, str(policy), found, fitted))
    return entries


def _on_device(
    device: str, one: Recorded, policies: tuple[str, ...], limit: int | None, *, lag: float, pace: float | None
) -> list[Entry]:
    if device == _AS_RECORDED:
        if one.pool is None:
            raise click.UsageError(f'"--device {_AS_RECORDED}" is for what `asyncmem run` recorded')
        device = one.pool.device
    entries = []
    for policy in policies or ("auto" if one.pool is None else one.pool.options,):
        options = pool_options(policy)
        if limit is not None:
            options = options.replace(limit=limit)
        with (
            progress(f"replaying {one.trace.name} on {device}", redraws=False),
            closing(_opened(device, late=lag > 0)) as opened,
            AsyncMemoryPool(opened, options=options) as pool,
        ):
            entries.append(Entry(one.file, policy, run_live(pool, one.trace, lag=lag, pace=pace)))
    return entries


def _opened(name: str, *, late: bool) -> Device:
    found = make_device(name)
    if late and isinstance(found, Simulated):
        # A pool's worker goes by real time, from which a virtual clock runs away.
        return Simulated(clock="wall", index=int(found.name.partition(":")[2]))
    return found


def _advise(programs: list[Recorded], policies: tuple[str, ...], model: Model, *, as_json: bool) -> None:
    if len(policies) > 1:
        raise click.UsageError("--advise is about one policy: the one that the program has now")
    found = []
    for one in programs:
        given = policies[0] if policies else _policy_of(one)
        with progress(f"trying options for {one.trace.name}"):
            found.append((one, advise(one.trace, None if given is None else Policy.parse(given), model)))
    if as_json:
        click.echo(to_json([one.figures(advice_as_json(one.file, advice)) for one, advice in found], indent=2))
        return
    for one, advice in found:
        show_advice(one.file, advice, output())


def _refuse(mode: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise click.UsageError(f"--{name} does not go with {mode}")
