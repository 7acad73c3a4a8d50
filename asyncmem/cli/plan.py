"""`asyncmem plan`: how little memory the recorded buffers would need, and where each of them would lie in it."""

from typing import Final

import click

from asyncmem.cli.parameters import STANDARD_OUTPUT, TIME, force_option, json_option, need_free, written
from asyncmem.cli.recordings import file_argument, load, pool_of, pool_option, print_json, within
from asyncmem.cli.tables import output as standard_output
from asyncmem.cli.tables import progress
from asyncmem.figures import format_size
from asyncmem.insight import LifetimeAnalyzer
from asyncmem.insight.plan_files import spelled
from asyncmem.text import printable, quoted

_MANY: Final = 20_000
"""How many buffers take about ten seconds."""


@click.command()
@file_argument
@pool_option
@click.option("--since", metavar="TIME", type=TIME, help="Place only what was allocated from here on,")
@click.option("--until", metavar="TIME", type=TIME, help="and before this: one step of a program, say.")
@click.option("-o", "--output", metavar="PLAN.json", help='Write the plan to this file; "-" is standard output.')
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
    """Compute how little memory the recorded buffers need if those that are never live together share it.

    With -o the place of each buffer is written to a file, by which a pool serves a program:
    `pool.apply_plan(asyncmem.insight.read_plan("PLAN.json"))`. A plan starts anew with every step, so give the times
    of one. What was live before is left out; what is not freed is live to the end. Ten thousand buffers take some
    seconds.
    """
    if output is not None:
        need_free(output, force=force, source=file, as_json=as_json)
    records = load(file)
    start, end = within(records, since, "--since"), within(records, until, "--until")
    if start is not None and end is not None and end <= start:
        raise click.BadParameter("expected a time after --since", param_hint="--until")
    pool = pool_of(records, name).name
    records = records.in_pool(pool)
    analyzer = LifetimeAnalyzer.from_records(records, since=start or 0.0, until=end)
    buffers = len(analyzer.lifetimes())
    if buffers > _MANY:
        click.echo(f"{buffers:,} buffers take a while to place: --since and --until take those of one step", err=True)
    with progress(f"placing {buffers:,} buffers"):
        suggestions, found = analyzer.get_optimization_suggestions(), analyzer.compute_reuse_plan()
    if output is not None:
        with written(output, force=force) as out:
            out.write(spelled(found).encode("utf-8"))
    if as_json:
        # Sizes are bytes; `shared` has buffers that could be one, what saves most first.
        figures = {
            "pool": pool,
            "buffers": len(found.places),
            "total": found.total,
            "most_live": found.lower_bound,
            "peak": found.peak,
            "most_reserved": records.most_reserved(),
            "shared": suggestions.shared,
            "output": output,
        }
        print_json(records, figures)
    elif output != STANDARD_OUTPUT:
        console = standard_output()
        console.print(str(found), soft_wrap=True)
        console.print(f"Pool {quoted(pool)} had up to {format_size(records.most_reserved())} from the device.")
        if suggestions.shared:
            console.print(f"\n{suggestions}", soft_wrap=True)
        if output is not None:
            use = f"pool.apply_plan(asyncmem.insight.read_plan({output!r}))"
            console.print(f"\n{printable(output)} written: {use}", soft_wrap=True)
