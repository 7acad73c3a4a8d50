"""The command line as a whole: help, exit codes, a missing extra, an interruption."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import asyncmem.cli
from asyncmem.cli.app import GROUPS, Commands
from asyncmem.cli.program import INTERRUPTED
from asyncmem.errors import InvalidRequest, PoolClosed
from tests.cli.commands import COMMANDS

Invoke = Callable[..., Result]


def test_help_lists_every_command(invoke: Invoke) -> None:
    """`asyncmem --help` has the commands in groups, each with the whole first sentence of its docstring."""
    result = invoke("--help")
    assert result.exit_code == 0
    assert "...\n" not in result.output.partition("\n")[2]
    words = " ".join(result.output.split())
    for title, group in GROUPS.items():
        assert f"{title}: {next(iter(group))} " in words
        for name in group:
            command = COMMANDS[name]
            assert f"\n  {name} " in result.output
            sentence = " ".join((command.help or "").split("\n\n")[0].split())
            assert sentence.removesuffix(".") in words


@pytest.mark.parametrize("command", ["doctor", "demo", "bench", "replay"])
def test_a_command_explains_itself(invoke: Invoke, command: str) -> None:
    """Each command's help says what its options do."""
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


def test_an_unknown_command_is_a_usage_error(invoke: Invoke) -> None:
    """A name that is no command exits with 2 and says so."""
    result = invoke("demmo")
    assert result.exit_code == 2
    assert "demmo" in result.output


def a_command_that_raises(error: BaseException) -> click.Group:
    """Make a command line whose only command raises."""
    group = Commands("asyncmem")

    @group.command()
    def stumble() -> None:
        raise error

    return group


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("limit", "x", "bytes"), 2),
        (PoolClosed("demo"), 1),
        (ExceptionGroup("tasks", [ExceptionGroup("inner", [PoolClosed("demo")])]), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
    ],
    ids=["wrong input", "another error", "one out of several tasks", "a full disk"],
)
def test_what_a_user_can_cause_is_a_sentence_and_an_exit_code(error: Exception, code: int) -> None:
    """What a user can cause is shown as its sentence, without a traceback."""
    result = CliRunner().invoke(a_command_that_raises(error), ["stumble"])
    assert result.exit_code == code
    assert result.output.startswith("Error: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "defect",
    [
        ZeroDivisionError(),
        OSError(errno.EBADF, "Bad file descriptor"),
        ExceptionGroup("tasks", [PoolClosed("demo"), ZeroDivisionError()]),
    ],
)
def test_a_defect_keeps_its_traceback(defect: Exception) -> None:
    """An error that is not ours is not hidden, also when one of ours stands beside it."""
    result = CliRunner().invoke(a_command_that_raises(defect), ["stumble"])
    assert result.exception is defect


def test_an_interruption_ends_with_the_shells_code() -> None:
    """Ctrl-C inside a command exits with 130 and one word."""
    result = CliRunner().invoke(a_command_that_raises(KeyboardInterrupt()), ["stumble"])
    assert result.exit_code == INTERRUPTED
    assert result.output == "interrupted\n"


def test_a_command_imports_no_other() -> None:
    """So that it starts as soon as it can: `asyncmem run` stands before a program."""
    code = (
        "import sys; from asyncmem.cli.app import commands; commands.main(['run', '--help'], standalone_mode=False); "
        "print(*(name for name in sys.modules if name.startswith('asyncmem.cli.')), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    imported = {name.removeprefix("asyncmem.cli.") for name in ran.stderr.split()}
    assert "run" in imported
    assert not imported & ({module for group in GROUPS.values() for module in group.values()} - {"app", "run"})


@pytest.mark.parametrize("package", ["click", "rich"])
def test_without_the_extra_it_says_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where click or rich is missing, the command names it and the extra, and exits with 1."""
    for name in [name for name in sys.modules if name.startswith(("asyncmem.cli.", "click", "rich"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert asyncmem.cli.main() == 1
    message = capsys.readouterr().err
    assert package in message
    assert "pip install 'asyncmem[cli]'" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--limit", "64"],
        ["estimate", __file__, "--room", "80"],
        ["tree", __file__, "--at", "3"],
        ["plan", __file__, "--since", "0.5"],
        ["top", "--interval", "2"],
    ],
    ids=" ".join,
)
def test_a_number_without_a_unit_is_refused(invoke: Invoke, arguments: list[str]) -> None:
    """Each of two units may be meant; both are named."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert f"'{arguments[-1]}' has no unit: write \"{arguments[-1]} " in result.output


@pytest.mark.parametrize("arguments", [["doctor"], ["bench", "hit", "--quick"], ["costs", "--device", "simulated"]])
@pytest.mark.may_block
def test_lines_into_a_pipe_are_neither_wrapped_nor_filled_up(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Whatever `COLUMNS` says: each line is as long as its words."""
    monkeypatch.setenv("COLUMNS", "30")
    narrow = invoke(*arguments).stdout.splitlines()
    assert max(map(len, narrow)) > 50
    assert [line for line in narrow if line.endswith(" ")] == []


def complete(shell: str, words: str, place: int) -> str:
    """Return what the command tells a shell that completes a command line."""
    environment = {**os.environ, "_ASYNCMEM_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = words.split(" ")[place] if shell == "fish" else str(place)
    command = [sys.executable, "-m", "asyncmem"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_options_and_rows(invoke: Invoke, shell: str) -> None:
    """The script of each asks the command in its own way."""
    script = invoke("completion", shell)
    assert script.exit_code == 0
    assert f"_ASYNCMEM_COMPLETE={shell}_complete" in script.stdout
    assert "replay" in complete(shell, "asyncmem re", 1)
    assert "--advise" in complete(shell, "asyncmem replay --ad", 2)
    assert "await_hit" in complete(shell, "asyncmem bench aw", 2)
    assert invoke("completion", "tcsh").exit_code == 2


BASH = shutil.which("bash") or ""


@pytest.mark.skipif(not BASH, reason="needs bash")
def test_bash_completes(tmp_path: Path) -> None:
    """As its own users have it: the script is read at its start, and completes by the command on `PATH`."""
    command = tmp_path / "asyncmem"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m asyncmem "$@"\n')
    command.chmod(0o755)
    program = (
        'eval "$(asyncmem completion bash)"; COMP_WORDS=(asyncmem replay --adv); COMP_CWORD=2; '
        '_asyncmem_completion asyncmem; echo "${COMPREPLY[@]}"'
    )
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([BASH, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "--advise\n"


def run_module(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `python -m asyncmem` in a process of its own."""
    command = [sys.executable, "-m", "asyncmem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_it_runs_as_a_module() -> None:
    """`python -m asyncmem` is the same command."""
    result = run_module("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("asyncmem")


def test_wrong_input_ends_a_process_with_two() -> None:
    """The exit code reaches the shell, and the message its error output."""
    result = run_module("demo", "--limit", "much")
    assert result.returncode == 2
    assert "--limit" in result.stderr
    assert "Traceback" not in result.stderr


@contextmanager
def demo_on_a_terminal() -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Start a long demo whose output is a terminal; return the process and our end of that."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "asyncmem", "demo", "--seconds", "60"]
    child = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    try:
        yield child, ours
    finally:
        child.kill()
        child.wait()
        os.close(ours)


def read_until(terminal: int, mark: bytes) -> bytes:
    """Read what a terminal shows until the mark has come, or nothing comes any more."""
    shown = b""
    while mark not in shown:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        shown += part
    return shown


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_ctrl_c_leaves_a_clean_terminal() -> None:
    """An interrupted demo exits with 130, without a traceback, and shows the cursor again."""
    with demo_on_a_terminal() as (child, terminal):
        assert b"items" in read_until(terminal, b"a second")
        child.send_signal(signal.SIGINT)
        rest = read_until(terminal, b"interrupted")
        assert b"interrupted" in rest
        assert b"\x1b[?25h" in rest
        assert b"Traceback" not in rest
        assert child.wait(timeout=100) == INTERRUPTED


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_long_work_is_shown_on_the_terminal_of_errors_alone() -> None:
    """What is being done and for how long; standard output is a pipe, and has the figures and nothing else."""
    ours, theirs = os.openpty()
    trace = Path(__file__).parents[1] / "traces" / "gnn_sampled.npz"
    command = [sys.executable, "-m", "asyncmem", "replay", str(trace), "--fit", "--json"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as child:
        os.close(theirs)
        shown = read_until(ours, b"replaying gnn_sampled")
        assert child.stdout is not None
        assert json.loads(child.stdout.read())[0]["completed"] is True
    os.close(ours)
    assert b"replaying gnn_sampled" in shown
    assert child.returncode == 0
