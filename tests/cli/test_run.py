"""`asyncmem run`: a program as it is without us, and a file with what its pools did."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from asyncmem.insight import Kind, read

Invoke = Callable[..., Result]
Done = subprocess.CompletedProcess[str]

LAST_WORDS = "asyncmem: recorded. To see it: asyncmem report (or summary) "


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a program."""

    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def python(*arguments: object) -> Done:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def recorded(*arguments: object) -> Done:
    return python("-m", "asyncmem", "run", *arguments)


ALIKE = {
    "what it sees": "import sys, __main__ as m\nprint(sys.argv, sys.path[0], __file__, vars(m) is globals(), __name__)",
    "an error": "def fail():\n    raise KeyError('x') from ValueError('y')\nfail()",
    "a mistake": "print('never')\nx = = 1",
    "a status": "import sys; sys.exit(7)",
    "no status": "import sys; sys.exit()",
    "last words": "import atexit, sys; atexit.register(print, 'bye'); sys.exit('why')",
}


@pytest.mark.parametrize("text", ALIKE.values(), ids=ALIKE)
def test_a_program_is_as_it_is_without_us(script: Callable[[str], Path], text: str) -> None:
    """What it prints, what it sees of itself, its tracebacks and its exit status are the interpreter's."""
    path = script(text)
    file = path.with_suffix(".amem")
    with_us = recorded("-o", file, path, "-x", "--help")
    without = python(path, "-x", "--help")
    assert (with_us.returncode, with_us.stdout) == (without.returncode, without.stdout)
    assert with_us.stderr == f"{without.stderr}{LAST_WORDS}{file}\n"
    assert not read(file).note


POOLED = """
import sys, threading
import asyncmem

def take():
    return pool.allocate("1 MiB", tag="mine")

def later():
    threading.main_thread().join()
    take().free()

pool = asyncmem.AsyncMemoryPool("simulated", name="first").__enter__()
kept = take()
threading.Thread(target=later).start()
"""


def test_all_pools_are_recorded_to_the_end(script: Callable[[str], Path]) -> None:
    """Also what another thread does when the program's last line is long done; lines end where the program begins."""
    path = script(POOLED)
    file = path.with_suffix(".amem")
    done = recorded(path, "argument", "-o", file, "--frames", "30")
    assert done.returncode == 0
    records = read(file)
    taken = records.of(Kind.ALLOCATED)
    assert [one.pool for one in taken] == ["first", "first"]
    assert [site.function for site in taken[0].frames] == ["take", "<module>"]
    assert [one.function for one in taken[1].frames][:2] == ["take", "later"]
    assert [one.tag for one in records.live_at()] == ["mine"]


def test_a_module_runs_as_with_m(tmp_path: Path) -> None:
    """By its name, a package by its `__main__`, with relative imports."""
    package = tmp_path / "parcel"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "other.py").write_text("word = 'said'", encoding="utf-8")
    (package / "__main__.py").write_text("import sys\nfrom .other import word\nprint(word, sys.argv, __name__)")
    file = tmp_path / "out.amem"
    # The folder of the tests stays the current one, which finds asyncmem; so the package is found by its path.
    environment = {
        **os.environ,
        # An empty part would be the current folder, which may have a source tree without its compiled parts.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "asyncmem", "run", "-o", str(file), "-m", "parcel", "a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert done.stdout == f"said {[str(package / '__main__.py'), 'a']} __main__\n", done.stderr
    assert done.returncode == 0


def test_ctrl_c_ends_it_as_it_ends_the_interpreter(script: Callable[[str], Path]) -> None:
    """By the signal, with the program's traceback, and with a file that is whole."""
    path = script("import time\nprint('ready', flush=True)\nwhile True:\n    time.sleep(1)")
    file = path.with_suffix(".amem")
    command = [sys.executable, "-m", "asyncmem", "run", "-o", str(file), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=100)
    assert child.returncode == -signal.SIGINT
    assert errors.splitlines()[-2] == "KeyboardInterrupt"
    assert "asyncmem" not in errors.partition(LAST_WORDS)[0].replace(str(path), "")
    assert not read(file).note


def test_a_file_is_not_written_over(script: Callable[[str], Path]) -> None:
    """Unless that is said; the program does not run then."""
    path = script("print('it runs')")
    file = path.with_suffix(".amem")
    file.write_text("precious")
    done = recorded("-o", file, path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--force" in done.stderr
    assert file.read_text() == "precious"
    assert recorded("--force", "-o", file, path).stdout == "it runs\n"
    assert not read(file).note


def test_a_second_run_says_where_force_stands(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the program, as behind it it is the program's; no option is blamed that was not given."""
    monkeypatch.chdir(tmp_path)
    Path("waits.py").touch()
    Path("waits.amem").touch()
    for command in (["waits.py"], ["waits.py", "--force"]):
        refused = invoke("run", *command)
        assert refused.exit_code == 2
        said = "--force before the program (asyncmem run --force waits.py) overwrites it, -o names another"
        assert said in refused.output
        assert "Invalid value" not in refused.output


RECORDS_ITSELF = """
import sys
from asyncmem.insight import Recording
try:
    with Recording(file=sys.argv[1], force=True):
        pass
except FileExistsError as error:
    print("refused")
"""


def test_a_recording_is_not_overwritten_by_its_program(script: Callable[[str], Path]) -> None:
    """Neither by a recording of its own nor by another process; and a program is not overwritten by its recording."""
    path = script(RECORDS_ITSELF)
    file = path.with_suffix(".amem")
    assert recorded("-o", file, path, file).stdout == "refused\n"
    assert not read(file).note
    command = [sys.executable, "-m", "asyncmem", "run", "--force", "-o", str(file), "-m", "this"]
    again = script(f"import subprocess\nsubprocess.run({command})")
    done = recorded("--force", "-o", file, again)
    assert "It is being written" in done.stderr
    assert not read(file).note
    text = again.read_text()
    refused = recorded("--force", "-o", again, again)
    assert refused.returncode == 2
    assert "choose another name" in refused.stderr
    assert again.read_text() == text
    assert recorded("-o", "-", again).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "nowhere.py"),
        (["-m", "nowhere.at.all"], "nowhere"),
        (["-m", "sys"], "sys"),
        (["--frames", "0", "x.py"], "--frames"),
        ([], "PROGRAM"),
    ],
)
def test_what_cannot_run_is_named(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """Without a traceback, and no file is made."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = sorted(Path().iterdir())
    result = invoke("run", *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert sorted(Path().iterdir()) == before
