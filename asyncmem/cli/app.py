"""The group of commands; errors that a user can cause become a sentence and an exit code."""

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from asyncmem.cli.bench import bench
from asyncmem.cli.demo import demo
from asyncmem.cli.doctor import doctor
from asyncmem.cli.estimate import estimate
from asyncmem.cli.exports import export, plan, report
from asyncmem.cli.program import INTERRUPTED
from asyncmem.cli.replay import costs, journal, replay
from asyncmem.cli.reports import leaks, segments, stats, summary, table, timeline, tree, waits
from asyncmem.cli.run import run
from asyncmem.cli.top import top
from asyncmem.errors import AsyncmemError, InvalidRequest
from asyncmem.text import printable


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script by which a shell completes commands, options and files.

    \b
      bash   eval "$(asyncmem completion bash)"          in ~/.bashrc
      zsh    eval "$(asyncmem completion zsh)"           in ~/.zshrc
      fish   asyncmem completion fish | source           in ~/.config/fish/config.fish
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "asyncmem", "_ASYNCMEM_COMPLETE").source())


GROUPS: Final = {
    "Record a program": (run, top),
    "Look at a recording": (summary, stats, table, tree, timeline, segments, waits, leaks, report, export),
    "Plan memory": (estimate, replay, plan, journal),
    "Know the machine": (doctor, demo, bench, costs, completion),
}
"""The commands, as the help lists them."""

_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_WIDEST: Final = 2000
"""Characters of a line of an error."""


class WrongInput(click.ClickException):
    """A value that cannot be right, shown as its sentence; it exits as click's own usage errors do."""

    exit_code = 2


class Commands(click.Group):
    """Turns what a user may cause into a message; a defect of asyncmem keeps its traceback."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 -- click's
        """List the commands in groups, each with the whole first sentence of its docstring."""
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(one.name or "", one.get_short_help_str(limit=_WIDEST)) for one in group])

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:  # noqa: ANN401 -- click's own, passed on
        """Read the command line."""
        with _printable_messages():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that was named."""
        try:
            with _printable_messages():
                return super().invoke(ctx)
        except AsyncmemError as error:
            raise _refusal(error) from error
        except ExceptionGroup as group:
            raise _refusal(_only_error(group)) from group
        except OSError as error:
            if error.errno in _DISK_FULL:
                raise click.ClickException(f"the output cannot be written: {error.strerror}") from error
            if error.filename is None:
                raise
            raise click.FileError(str(error.filename), error.strerror) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


@contextmanager
def _printable_messages() -> Iterator[None]:
    # click repeats arguments as they are, and a file may have any name.
    try:
        yield
    except click.ClickException as error:
        # What it repeats begins no line of its own.
        lines = error.message.split("\n")
        error.message = "\n  ".join(printable(line, most=_WIDEST) for line in lines)  # type: ignore[misc]  # not shown yet
        raise


def _refusal(error: AsyncmemError) -> click.ClickException:
    return (WrongInput if isinstance(error, InvalidRequest) else click.ClickException)(str(error))


def _only_error(group: ExceptionGroup[Exception]) -> AsyncmemError:
    """Return the first error of asyncmem's in a group; a group that holds others is a defect."""
    ours, others = group.split(AsyncmemError)
    if ours is None or others is not None:
        raise group
    first = ours.exceptions[0]
    return _only_error(first) if isinstance(first, ExceptionGroup) else first


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("asyncmem"), prog_name="asyncmem")
def commands() -> None:
    """Await GPU memory the way you await a socket."""


for group in GROUPS.values():
    for command in group:
        commands.add_command(command)


def app() -> int:
    """Run the group on this process's arguments, and return the exit code."""
    try:
        commands.main(prog_name="asyncmem")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
