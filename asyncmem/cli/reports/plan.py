"""`asyncmem plan`: how little memory would do for what was recorded, and where each buffer would lie in it."""

from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console

from asyncmem.cli.reports.telling import file_argument, json_option, load, read_moment, tell
from asyncmem.cli.reports.writing import force_option, need_free, written
from asyncmem.figures import format_size
from asyncmem.insight import LifetimeAnalyzer, Records, ReuseSuggestions, SharedBuffer
from asyncmem.insight.plan_files import spelled
from asyncmem.insight.reserved import most_reserved
from asyncmem.pool.placement import ReusePlan

_MANY = 20_000
"""So many buffers take about ten seconds."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a plan comes to."""

    pool: str
    """Whose buffers it places,"""
    buffers: int
    """how many they are,"""
    total: int
    """and how many bytes they would take if each had memory of its own."""
    most_live: int
    """The most bytes of theirs that are live at once, rounded as they are placed."""
    peak: int
    """How long the range is that has a place for all of them."""
    most_reserved: int
    """The most bytes that the pool had from the device while it was recorded."""
    shared: tuple[SharedBuffer, ...]
    """Who could be one buffer, what saves the most first."""
    output: str | None
    """Where the plan was written to, None for nowhere."""


@click.command()
@file_argument
@click.option("--pool", "name", metavar="NAME", help="Which pool; the only one of the recording without it.")
@click.option("--since", metavar="TIME", callback=read_moment, help="Place what was allocated from here on,")
@click.option("--until", metavar="TIME", callback=read_moment, help="and before this: one step of a program, say.")
@click.option("-o", "--output", metavar="PLAN.json", help="Write the plan there.")
@force_option
@json_option
def plan(
    file: str,
    name: str | None,
    since: float | None,
    until: float | None,
    output: str | None,
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Say in how little memory the recorded buffers would do, if those that are never live together shared it.

    With -o each buffer's place is written down, which a program has a pool serve by:
    `pool.apply_plan(asyncmem.insight.read_plan("PLAN.json"))`. A plan is begun anew with every step, so give the times
    of one. What was live before is left out; what is not freed is live to the end. Ten thousand buffers take some
    seconds.
    """
    if output is not None:
        need_free(Path(output), force=force)
    records = load(file)
    name = _pool_of(records, name)
    analyzer = LifetimeAnalyzer.from_records(records.in_pool(name), since=since or 0.0, until=until)
    _warn_of_many(len(analyzer.lifetimes()))
    suggestions, found = analyzer.get_optimization_suggestions(), analyzer.compute_reuse_plan()
    if output is not None:
        with written(Path(output), force=force) as out:
            out.write(spelled(found).encode("utf-8"))
    planned = Planned(
        pool=name,
        buffers=len(found.places),
        total=found.total,
        most_live=found.lower_bound,
        peak=found.peak,
        most_reserved=most_reserved(records.in_pool(name)),
        shared=suggestions.shared,
        output=output,
    )

    def show(planned: Planned, console: Console) -> None:
        _show(planned, found, suggestions, console)

    tell(records, planned, show, as_json=as_json)


def _pool_of(records: Records, name: str | None) -> str:
    names = sorted({pool.name for pool in records.names.pools})
    if name in names:
        return name
    if name is None and len(names) == 1:
        return names[0]
    if not names:
        raise click.ClickException("the recording has no pool")
    message = f"expected one of {', '.join(names)}, got {name or 'none, and there are several'}"
    raise click.BadParameter(message, param_hint="--pool")


def _warn_of_many(buffers: int) -> None:
    if buffers > _MANY:
        click.echo(f"{buffers:,} buffers take a while to place: --since and --until take those of one step", err=True)


def _show(planned: Planned, plan: ReusePlan, suggestions: ReuseSuggestions, console: Console) -> None:
    console.print(f"{plan}", soft_wrap=True)
    console.print(f"Pool {planned.pool!r} had up to {format_size(planned.most_reserved)} from the device.")
    if suggestions.shared:
        console.print(f"\n{suggestions}", soft_wrap=True)
    if planned.output is not None:
        console.print(f"\n{planned.output} written: pool.apply_plan(asyncmem.insight.read_plan({planned.output!r}))")
