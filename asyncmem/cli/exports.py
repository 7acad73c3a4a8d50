"""The commands that make a file of a recording: a page for a browser, what other programs read, and a pool's plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from asyncmem.cli.parameters import (
    STANDARD_OUTPUT,
    TIME,
    check_output,
    files_argument,
    force_option,
    json_option,
    load,
    pool_of,
    pool_option,
    print_json,
    within,
    written,
)  # fmt: skip
from asyncmem.cli.tables import output as standard_output
from asyncmem.cli.tables import progress
from asyncmem.figures import format_size
from asyncmem.insight import LifetimeAnalyzer, reports
from asyncmem.insight.exports import FORMATS
from asyncmem.insight.pictures import page
from asyncmem.insight.plans import spelled
from asyncmem.text import printable, quoted

_FIGURES: Final = (reports.summary, reports.timeline, reports.segments, reports.tree, reports.waits, reports.leaks)
"""What the page draws."""

_MANY: Final = 20_000
"""How many buffers take about ten seconds to place."""


@click.command()
@files_argument
@click.option(
    "-o",
    "--output",
    metavar="OUT.html",
    help='The page; "-" is standard output. Without it the first FILE\'s name with .html.',
)
@force_option
@json_option
def report(files: Sequence[str], output: str | None, *, force: bool, as_json: bool) -> None:
    """Draw a recording in one page, which a browser shows without a network.

    What was live over time by tag, with what was reserved, the limit, growth, waits and refusals; the segments with
    their holes, at the peak and at the end; and as icicles by the lines of the program: what was live at the peak,
    what was never freed, and what waited for how long. --json prints the figures of it.
    """
    path = output or str(Path(files[0]).with_suffix(".html"))
    check_output(path, force=force, sources=files, as_json=as_json)
    records = load(*files)
    with progress(f"drawing {files[0]}"):
        drawn = page(records, Path(files[0]).name).encode("utf-8", "xmlcharrefreplace")
        figures = {one.__name__: one(records) for one in _FIGURES} if as_json else {}
    with written(path, force=force) as out:
        out.write(drawn)
    if as_json:
        print_json(records, {"output": path, "nbytes": len(drawn), **figures})
    elif path != STANDARD_OUTPUT:
        click.echo(f"{printable(path)} written, {format_size(len(drawn))}: open it in a browser")


@click.command()
@files_argument
@click.option("--to", "to", type=click.Choice(tuple(FORMATS)), required=True, help="The format.")
@click.option(
    "-o",
    "--output",
    metavar="OUT",
    help='The file; "-" is standard output. Without it the first FILE\'s name with the ending of the format.',
)
@force_option
def export(files: Sequence[str], to: str, output: str | None, *, force: bool) -> None:
    """Write a recording in a format that other programs read.

    \b
      torch      a snapshot of PyTorch's memory, for its viewer (pytorch.org/memory_viz)
      perfetto   Chrome's JSON for ui.perfetto.dev: counters of what is live and
                 reserved, with waits, growth and trims below them
      csv        one record a line, below a line of names
      json       the same as objects, with all lines of each call
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    ending, write = FORMATS[to]
    path = output or str(Path(files[0]).with_suffix(ending))
    check_output(path, force=force, sources=files)
    records = load(*files)
    with progress(f"writing {path}"), written(path, force=force) as out:
        write(records, out)
    click.echo(f"{len(records):,} records written to {printable(path)}", err=True)


@click.command()
@files_argument
@pool_option
@click.option("--since", metavar="TIME", type=TIME, help="Place only what was allocated from here on,")
@click.option("--until", metavar="TIME", type=TIME, help="and before this: one step of a program, say.")
@click.option("-o", "--output", metavar="PLAN.json", help='Write the plan to this file; "-" is standard output.')
@force_option
@json_option
def plan(
    files: Sequence[str],
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
        check_output(output, force=force, sources=files, as_json=as_json)
    records = load(*files)
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
