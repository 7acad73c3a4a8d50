"""The group of commands; errors that a user can cause become a sentence and an exit code."""

import errno
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Any, Final

import click
from click.shell_completion import get_completion_class

from asyncmem.cli.program import INTERRUPTED
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


GROUPS: Final[Mapping[str, Mapping[str, str]]] = {
    "Record a program": {"run": "run", "top": "top"},
    "Look at a recording": {
        **dict.fromkeys(("summary", "stats", "table", "tree", "timeline", "segments", "waits", "leaks"), "reports"),
        **dict.fromkeys(("report", "export"), "exports"),
    },
    "Plan memory": {"estimate": "estimate", "replay": "replay", "plan": "exports", "journal": "replay"},
    "Know the machine": {"doctor": "doctor", "demo": "demo", "bench": "bench", "costs": "replay", "completion": "app"},
}
"""The commands, as the help lists them, and the module of each: it is imported once the command is asked for."""

_MODULES: Final = {name: module for group in GROUPS.values() for name, module in group.items()}

_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_WIDEST: Final = 2000
"""Characters of a line of an error."""


class WrongInput(click.ClickException):
    """A value that cannot be right, shown as its sentence; it exits as click's own usage errors do."""

    exit_code = 2


class Commands(click.Group):
    """Turns what a user may cause into a message; a defect of asyncmem keeps its traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 -- click's
        """Name the commands."""
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; or all of them where none has that name, as click then says which is the nearest."""
        for name in [cmd_name] if cmd_name in _MODULES else _MODULES:
            if name not in self.commands:
                self.commands[name] = getattr(import_module(f"asyncmem.cli.{_MODULES[name]}"), name)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands in groups, each with the whole first sentence of its docstring."""
        for title, group in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in group]
            with formatter.section(title):
                formatter.write_dl([(name, one.get_short_help_str(limit=_WIDEST)) for name, one in found if one])

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


def app() -> int:
    """Run the group on this process's arguments, and return the exit code."""
    try:
        commands.main(prog_name="asyncmem")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
