"""`asyncmem top`: the pools of a running process, as they are now."""

import json
from collections.abc import Sequence

import click
from rich.console import Console
from rich.live import Live

from asyncmem.cli.live.picture import ended, picture, plain
from asyncmem.cli.parameters import read_duration
from asyncmem.cli.tables import paper
from asyncmem.insight.live.client import NotServing, ask, serving
from asyncmem.insight.live.look import ProcessLook

_HOW = (
    "A process shows its pools where it was started with `asyncmem run --live PROGRAM`, or has called "
    "asyncmem.insight.serve_live()."
)

_HINT = "q leaves"


@click.command()
@click.argument("process", metavar="[PID]", type=click.IntRange(min=1), required=False)
@click.option("--interval", callback=read_duration, default="1 s", show_default=True, help="How often it is asked.")
@click.option("--once", is_flag=True, help="Show them once, and end; so it does where there is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print all that is known as JSON on standard output, once.")
def top(process: int | None, interval: float, *, once: bool, as_json: bool) -> None:
    """Show the pools of a running process: what is live, reserved and waited for, and who holds it.

    PID is the process; the only one that shows its pools without it. A process does after `asyncmem run --live PROGRAM`
    or a call of asyncmem.insight.serve_live(), to programs of the same user alone. Who holds what is known while it is
    recorded, as `run` does. Press q to leave.
    """
    first = _only() if process is None else _asked(process)
    console = paper()
    if as_json:
        click.echo(json.dumps(first, indent=2))
    elif once or not console.is_terminal:
        console.print(picture(first))
    else:
        _watch(first, interval, console)


def _watch(now: ProcessLook, interval: float, console: Console) -> None:
    from asyncmem.cli.live.keyboard import pressed

    before, hint = None, _HINT
    with pressed() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(picture(now, before, hint=hint), refresh=True)
            if "q" in key(max(interval, 0.05)).lower():
                return
            try:
                before, now, hint = now, ask(now["process"], timeout=2), _HINT
            except TimeoutError:
                hint = f"{_HINT}, no answer now"  # it is busy, or stopped
            except OSError:
                break
    console.print(picture(now))
    click.echo(ended(now), err=True)


def _only() -> ProcessLook:
    found = serving()
    if not found:
        raise click.ClickException(f"no process shows its pools. {_HOW}")
    if len(found) > 1:
        raise click.UsageError(f"several processes show their pools; say which:\n{_listed(found)}")
    return found[0]


def _listed(found: Sequence[ProcessLook]) -> str:
    return "\n".join(f"  {one['process']}  {plain(' '.join(one['program']))}" for one in found)


def _asked(process: int) -> ProcessLook:
    try:
        return ask(process)
    except NotServing as error:
        others = serving()
        hint = f"These do:\n{_listed(others)}" if others else _HOW
        raise click.ClickException(f"{error}. {hint}") from error
    except OSError as error:
        raise click.ClickException(f"process {process} does not answer: {error}") from error
