"""`asyncmem top`: a process's pools on a screen, or once for a script."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from click.testing import Result
from rich.console import Console

from asyncmem import AsyncMemoryPool, tag
from asyncmem.cli.top import picture
from asyncmem.insight import LiveServer, MemoryTracker, serve_live
from asyncmem.insight.live import server
from asyncmem.insight.live.server import ProcessLook, look

Invoke = Callable[..., Result]

MIB = 1 << 20

SERVING = (
    "import sys; from asyncmem.insight import serve_live; serve_live(); print('ready', flush=True); sys.stdin.read()"
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where sockets lie; its name is short, as a socket's has to be."""
    with tempfile.TemporaryDirectory(prefix="am") as found:
        monkeypatch.setenv("XDG_RUNTIME_DIR", found)
        monkeypatch.setenv("TMPDIR", found)
        monkeypatch.setattr(tempfile, "tempdir", found)
        yield found


@pytest.fixture
def live(folder: str) -> Iterator[LiveServer]:
    """This process serves."""
    with serve_live() as found:
        assert str(found.path).startswith(folder)
        yield found


@pytest.fixture
def pool() -> Iterator[AsyncMemoryPool]:
    """A quarter is live of what it may have."""
    with AsyncMemoryPool("simulated", name="mine [here]", limit="64 MiB") as found, found.allocate("16 MiB"):
        yield found


def shown(now: ProcessLook, before: ProcessLook | None = None, *, width: int = 200) -> list[str]:
    console = Console(width=width, color_system=None, markup=False)
    with console.capture() as captured:
        console.print(picture(now, before, width=width))
    return [line.rstrip() for line in captured.get().splitlines()]


def line_of(lines: list[str], start: str) -> list[str]:
    (found,) = (line for line in lines if line.startswith(start))
    return found.removeprefix(start).split()


@pytest.mark.usefixtures("live", "pool")
def test_a_pipe_gets_the_pools_once(invoke: Invoke) -> None:
    """The only process that serves needs no number."""
    for arguments in ((), ("--once",), (str(os.getpid()),)):
        result = invoke("top", *arguments)
        assert result.exit_code == 0, result.output
        figures = line_of(result.stdout.splitlines(), "mine [here]")
        assert figures[:7] == ["simulated:0", "16", "MiB", *figures[3:5], "64", "MiB"]
        assert "\x1b" not in result.stdout


@pytest.mark.usefixtures("live")
def test_json_is_what_the_process_says(invoke: Invoke, pool: AsyncMemoryPool) -> None:
    """All of it, and nothing else on standard output."""
    result = invoke("top", "--once", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found.keys() == look().keys()
    (mine,) = (one for one in found["pools"] if one["stats"]["name"] == pool.name)
    assert (mine["stats"]["active_bytes"], mine["stats"]["limit"]) == (16 * MIB, 64 * MIB)


@pytest.mark.usefixtures("folder")
def test_without_a_process_it_says_how_to_start_one(invoke: Invoke) -> None:
    """Whether one was named or not."""
    for arguments in ((), ("1",), ("--json",)):
        result = invoke("top", *arguments)
        assert result.exit_code == 1
        assert "asyncmem run --live PROGRAM" in result.stderr
        assert "serve_live()" in result.stderr
        assert result.stdout == ""
    for wrong in ("0", "abc"):
        refused = invoke("top", wrong)
        assert refused.exit_code == 2
        assert "expected the number of a process, or an address such as tcp://HOST:8786, got" in refused.stderr
    assert invoke("top", "--interval", "never").exit_code == 2


@pytest.mark.usefixtures("live")
def test_of_several_processes_one_must_be_named(invoke: Invoke) -> None:
    """They are listed; another number is told of them too."""
    with subprocess.Popen([sys.executable, "-c", SERVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        result = invoke("top")
        assert result.exit_code == 2
        assert f"  {other.pid}  -c\n" in result.stderr
        assert f"  {os.getpid()}  " in result.stderr
        assert invoke("top", str(other.pid)).stdout.splitlines()[2:] == ["No pool is open."]
        missing = invoke("top", "1")
        assert missing.exit_code == 1
        assert f"  {other.pid}  -c\n" in missing.stderr
        other.communicate()


def test_run_live_shows_the_pools_of_its_program(folder: str, tmp_path: Path) -> None:
    """While it runs, under the program's name; it says how to look on."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys, asyncmem\n"
        "with asyncmem.AsyncMemoryPool('simulated', name='theirs') as pool, pool.allocate('1 MiB'):\n"
        "    subprocess.run([sys.executable, '-m', 'asyncmem', 'top', str(os.getpid())], check=True)\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "asyncmem", "run", "--live", "-o", str(tmp_path / "run.amem"), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"  {program}")
    assert line_of(lines, "theirs")[1:3] == ["1", "MiB"]
    assert any(line.endswith(f"1 MiB  {program}:2") for line in lines)
    assert "live view: asyncmem top " in done.stderr
    assert not list(Path(folder).rglob("*.sock"))


def test_a_picture_has_who_waits_and_who_holds() -> None:
    """The longest wait and the most bytes first, over all pools; what happens in a second is since the last look."""
    with (
        AsyncMemoryPool("simulated", name="first", limit="64 MiB") as pool,
        AsyncMemoryPool("simulated", name="second", limit="1 GiB") as other,
        MemoryTracker(pool, other),
    ):
        with tag("weights\x1b[2J"):
            held = [pool.allocate("32 MiB"), other.allocate("1 MiB")]
        held.append(pool.allocate("8 MiB", tag="cache"))
        before = look()
        for _ in range(10):
            other.allocate("1 MiB").free()
        now = look()
        for one in held:
            one.free()
    now["time"] = before["time"] + 2
    now["pools"] = [one for one in now["pools"] if one["stats"]["name"] in {"first", "second"}]
    waits: list[Any] = [
        {"owner": f"task {n}", "nbytes": n, "age": n / 10, "tag": None, "growing": n == 2} for n in range(1, 4)
    ]
    waits[0]["share"], waits[2]["share"] = "first/lease", "gold"
    now["pools"][0]["waiters"], now["pools"][1]["waiters"] = waits[::2], waits[1:2]
    now["pools"][1]["closed"] = True
    lines = shown(now, before)
    assert line_of(lines, "first")[-1] == "0"
    assert line_of(lines, "second (closed)")[-1] == "5"
    bar = line_of(lines, "first")[-4]
    assert bar.count("█") == round(20 * 40 / 64)
    assert len(bar) == 20
    at = next(number for number, line in enumerate(lines) if "wants" in line)
    assert [line.split()[-1] for line in lines[at + 1 : at + 4]] == ["first/gold", "second", "first/lease"]
    assert lines[at + 1].split() == ["300", "ms", "3", "B", "task", "3", "first/gold"]
    assert "task 2 (the pool grows)" in lines[at + 2]
    at = next(number for number, line in enumerate(lines) if "held by tag" in line)
    assert lines[at + 1 : at + 3] == [r"33 MiB  weights\x1b[2J", " 8 MiB  cache"]
    assert not [line for line in lines if "\x1b" in line]
    assert line_of(shown(now), "first")[-1] == "-"


def test_budgets_follow_their_pool() -> None:
    """A budget has a line of its own below its pool, with what it holds of its limit."""
    with (
        AsyncMemoryPool("simulated", name="shared", limit="64 MiB") as pool,
        pool.budget("gold", limit="32 MiB") as gold,
    ):
        before = look()
        gold.allocate("1 MiB").free()
        with gold.allocate("8 MiB"):
            now = look()
    now["time"] = before["time"] + 1
    now["pools"] = [one for one in now["pools"] if one["stats"]["name"] == "shared"]
    lines = shown(now, before)
    assert lines.index(next(line for line in lines if line.startswith("shared/gold"))) == 1 + lines.index(
        next(line for line in lines if line.startswith("shared "))
    )
    found = line_of(lines, "shared/gold")
    assert (found[-4].count("█"), found[-1]) == (5, "2")


@pytest.mark.parametrize(("width", "columns"), [(200, 9), (80, 8), (60, 6), (45, 4)])
def test_a_narrow_screen_does_without_some_columns(pool: AsyncMemoryPool, width: int, columns: int) -> None:
    """Each pool keeps its line, its name and its figures; what is missed least is left out."""
    now = look()
    now["pools"] = [one for one in now["pools"] if one["stats"]["name"] == pool.name]
    lines = shown(now, width=width)
    headings = next(line for line in lines if line.startswith("pool "))
    assert len(headings.replace("of the limit", "bar").replace("per second", "pace").split()) == columns
    assert line_of(lines, "mine [here]")
    assert "16 MiB" in next(line for line in lines if line.startswith("mine"))
    assert "waiting" in headings
    assert max(map(len, lines)) <= width


# -- on a terminal -------------------------------------------------------------------------------------------------


class Terminal:
    """A terminal on which a command runs."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))
        self._theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.text = ""
        environment = os.environ | {"TERM": "xterm-256color"}
        environment.pop("COLUMNS", None)
        command = [sys.executable, "-m", "asyncmem", *arguments]
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def press(self, key: str) -> None:
        os.write(self._ours, key.encode())

    def expect(self, text: str) -> None:
        """Read until a text comes; what is read before is forgotten."""
        end = time.monotonic() + 100
        while text not in self.text:
            assert self._read(end - time.monotonic()), f"no {text!r} in {self.text!r}"
        self.text = self.text.partition(text)[2]

    def end(self) -> int:
        """Read to the end, and return the exit code; the terminal must be as it was."""
        end = time.monotonic() + 100
        while self.process.poll() is None or self._read(0):
            self._read(0.05)
            assert time.monotonic() < end, self.text
        assert termios.tcgetattr(self._theirs) == self.before
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(seconds, 0))
        if ready:
            self.text += os.read(self._ours, 1 << 16).decode(errors="replace")
        return bool(ready)


LEAVE = "\x1b[?1049l"
"""Gives the terminal's ordinary screen back."""


@pytest.mark.usefixtures("live", "pool")
def test_a_terminal_shows_them_again_and_again_until_q() -> None:
    """Full-screen; it is left as it was."""
    with Terminal("top", "--interval", "10 ms") as terminal:
        terminal.expect("\x1b[?1049h")
        for _ in range(3):
            terminal.expect("q leaves")
            terminal.expect("mine [here]")
        terminal.press("q")
        assert terminal.end() == 0
        assert LEAVE in terminal.text


@pytest.mark.usefixtures("live")
def test_an_interruption_leaves_with_130() -> None:
    """And the terminal as it was."""
    with Terminal("top", "--interval", "1 min") as terminal:
        terminal.expect("q leaves")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert LEAVE in terminal.text


@pytest.mark.usefixtures("pool")
def test_the_end_of_the_process_is_told(live: LiveServer) -> None:
    """With what was seen last, on the ordinary screen."""
    with Terminal("top", "--interval", "10 ms") as terminal:
        terminal.expect("mine [here]")
        live.close()
        assert terminal.end() == 0
        _, _, last = terminal.text.partition(LEAVE)
        assert "mine [here]" in last
        assert f"process {os.getpid()} has ended" in last


@pytest.mark.usefixtures("live", "pool")
def test_a_process_that_is_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen last stays, and it is said; later it goes on."""
    said, free = look(), threading.Event()

    def busy() -> ProcessLook:
        assert free.wait(100)
        return said

    with Terminal("top", "--interval", "10 ms") as terminal:
        terminal.expect("mine [here]")
        monkeypatch.setattr(server, "look", busy)
        terminal.expect("q leaves, no answer now")
        terminal.expect("mine [here]")
        free.set()
        terminal.expect("q leaves  ")
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.usefixtures("live", "pool")
def test_a_terminal_can_be_asked_for_one_look() -> None:
    """In colours, and not full-screen."""
    with Terminal("top", "--once") as terminal:
        assert terminal.end() == 0
        assert "mine [here]" in terminal.text
        assert "\x1b[?1049h" not in terminal.text
