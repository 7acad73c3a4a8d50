"""`asyncmem run`: a program with all its pools recorded into a file."""

import atexit
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Final

import click

from asyncmem.cli.parameters import STANDARD_OUTPUT, check_output, force_option
from asyncmem.cli.program import INTERRUPTED, Program
from asyncmem.insight import Recording, serve_live
from asyncmem.text import printable

_KEEP: Final = 1 << 20
"""Records of a pool that may wait for the thread that writes them: a busy loop makes so many in a second."""


class _RunCommand(click.Command):
    """Takes the file's option behind the program too: `asyncmem run train.py --epochs 3 -o run.amem`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command line."""
        given = list(args)
        rest = super().parse_args(ctx, args)
        behind = _own_options(ctx.params.get("arguments", ()))
        if not behind:
            return rest
        ctx.params.clear()
        return super().parse_args(ctx, [*given[-behind:], *given[:-behind]])


def _own_options(arguments: tuple[str, ...]) -> int:
    """Return how many of the last arguments are options of this command and not the program's."""
    for at, (option, value) in enumerate(pairwise(arguments)):
        if option in {"-o", "--output"} and value.endswith(".amem"):
            return len(arguments) - at
    return 0


@click.command(cls=_RunCommand, context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="PROGRAM is a module, as with python -m.")
@click.option("-o", "--output", metavar="FILE.amem", help="The recording; without it PROGRAM's name with .amem.")
@force_option
@click.option(
    "--frames", type=click.IntRange(1, 128), default=8, show_default=True, help="Lines kept of each call that asks."
)
@click.option("--live", is_flag=True, help="Show its pools to `asyncmem top` meanwhile.")
@click.argument("program", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")
@click.pass_context
def run(
    context: click.Context,
    program: str,
    arguments: tuple[str, ...],
    output: str | None,
    frames: int,
    *,
    is_module: bool,
    force: bool,
    live: bool,
) -> None:
    """Run a Python program and record what its pools do into a file.

    PROGRAM and its ARGUMENTS are as after `python`, and so are its output and its exit status. Every pool of the
    process is recorded until it ends; processes that it starts are not. Options stand before PROGRAM; those from
    `-o FILE.amem` on may stand at the end as well.

    The file can be read while the program runs, and after a crash: begin with `asyncmem summary FILE.amem`.
    """
    path = output or f"{program if is_module else Path(program).stem}.amem"
    if path == STANDARD_OUTPUT:
        raise click.BadParameter("expected a file: standard output is the program's", param_hint="-o")
    try:
        found = Program(program, is_module=is_module)
        again = f"asyncmem run --force {'-m ' if is_module else ''}{printable(program)}"
        check_output(path, force=force, sources=[found.file], forcing=f"--force before the program ({again})")
        recording = Recording(file=path, frames=frames, force=force, keep=_KEEP)
        recording.__enter__()
        if live:
            _serve()
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.FileError(path, error.strerror) from error
    status, process = 0, os.getpid()

    def end() -> None:
        if os.getpid() != process:  # a fork that ends on its own
            return
        try:
            recording.__exit__(None, None, None)
        except OSError as error:
            sys.stderr.write(f"asyncmem: {printable(path)} is incomplete: {error.strerror}\n")
        else:
            sys.stderr.write(f"asyncmem: recorded. To see it: asyncmem report (or summary) {printable(path)}\n")
        if status == INTERRUPTED:
            _die_by_interruption()

    # At exit, because other threads may go on for longer than the program's own last line.
    atexit.register(end)
    status = found.run(arguments)
    context.exit(status)


def _serve() -> None:
    try:
        serve_live()
    except OSError as error:
        click.echo(f"asyncmem: live view unavailable: {printable(str(error))}", err=True)
    else:
        click.echo(f"asyncmem: live view: asyncmem top {os.getpid()}", err=True)


def _die_by_interruption() -> None:
    # As the interpreter does, so that a shell's loop around the program ends too.
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
