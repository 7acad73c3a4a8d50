"""The group of commands, and what becomes of errors: a sentence and an exit code where the user can do something."""

import errno
import sys
from importlib.metadata import version

import click

from asyncmem.cli.bench import bench
from asyncmem.cli.costs import costs
from asyncmem.cli.demo import demo
from asyncmem.cli.doctor import doctor
from asyncmem.cli.estimate import estimate
from asyncmem.cli.journal import journal
from asyncmem.cli.program import INTERRUPTED
from asyncmem.cli.replay import replay
from asyncmem.cli.reports import REPORTS
from asyncmem.cli.run import run
from asyncmem.cli.top import top
from asyncmem.errors import AsyncmemError, InvalidRequest

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What becomes of standard output where it is a file on a disk that is full."""


class Refusal(click.ClickException):
    """An error of asyncmem, shown as its sentence."""

    exit_code = 1


class WrongInput(Refusal):
    """A value that cannot be right; it exits as click's own usage errors do."""

    exit_code = 2


class Commands(click.Group):
    """Turns what a user may cause into a message; a defect of asyncmem keeps its traceback."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command that was named."""
        try:
            return super().invoke(ctx)
        except AsyncmemError as error:
            raise _refusal(error) from error
        except ExceptionGroup as group:
            raise _refusal(_only_error(group)) from group
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise Refusal(f"the output cannot be written: {error.strerror}") from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None


def _refusal(error: AsyncmemError) -> Refusal:
    return (WrongInput if isinstance(error, InvalidRequest) else Refusal)(str(error))


def _only_error(group: ExceptionGroup[Exception]) -> AsyncmemError:
    """Take the first error of asyncmem's out of what several tasks raised; a group that holds others is a defect."""
    ours, others = group.split(AsyncmemError)
    if ours is None or others is not None:
        raise group
    first = ours.exceptions[0]
    return _only_error(first) if isinstance(first, ExceptionGroup) else first


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("asyncmem"), prog_name="asyncmem")
def commands() -> None:
    """Await GPU memory the way you await a socket."""


for command in (doctor, demo, bench, replay, journal, costs, estimate, run, top, *REPORTS):
    commands.add_command(command)


def app() -> int:
    """Run the group on this process's arguments, and answer the exit code."""
    try:
        commands.main(prog_name="asyncmem")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
