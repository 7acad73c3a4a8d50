"""`asyncmem demo`: a pipeline that wants several times the memory there is, and waits instead of failing."""

import functools
import json

import click
from rich.console import Console

import asyncmem
from asyncmem.cli.demonstration.display import display
from asyncmem.cli.demonstration.pipeline import Outcome, run
from asyncmem.cli.demonstration.plan import Plan
from asyncmem.cli.demonstration.report import as_json, as_table, shortcomings
from asyncmem.cli.demonstration.stages import device_for
from asyncmem.cli.parameters import read_size
from asyncmem.devices import Device
from asyncmem.figures import format_size


@click.command()
@click.option("--device", "name", default="host", show_default=True, help='Where to run: "host" or "simulated".')
@click.option(
    "--limit",
    callback=read_size,
    metavar="SIZE",
    default="32 MiB",
    show_default=True,
    help="What the pool may reserve.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.1, max=3600), default=5.0, show_default=True, help="How long to run."
)
@click.option("--json", "print_json", is_flag=True, help="Print only the report, as JSON on standard output.")
def demo(name: str, limit: int, seconds: float, print_json: bool) -> None:
    """Run a pipeline of three stages in far less memory than it wants.

    Items are decoded, transformed and reduced, each stage on a stream of its own; on the host this is real numpy work.
    So many items are in flight that together they would need five times the limit. Those that find no memory wait
    their turn. The report says how often and how long, what the pool reserved at most, how long the event loop was
    ever held up, and whether every result is right. Exits with 1 when anything of that went wrong.
    """
    plan = Plan.for_limit(limit, seconds)
    device = device_for(name)
    try:
        outcome = _run(device, plan, Console(quiet=print_json))
    finally:
        device.close()
    if print_json:
        click.echo(json.dumps(as_json(outcome), indent=2))
    problems = shortcomings(outcome)
    for problem in problems:
        click.echo(f"not as it should be: {problem}", err=True)
    if problems:
        raise click.exceptions.Exit(1)


def _run(device: Device, plan: Plan, console: Console) -> Outcome:
    console.print(
        f"decode, transform, reduce on {device.name}: {plan.in_flight} items at once want {format_size(plan.demand)}, "
        f"the limit is {format_size(plan.limit)}",
        soft_wrap=True,
    )
    with display(console, plan) as show:
        outcome = asyncmem.run(functools.partial(run, device, plan, show))
    console.print(as_table(outcome))
    return outcome
