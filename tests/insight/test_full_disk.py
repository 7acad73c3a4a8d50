"""What is written beside a program: a full disk costs the program nothing, and what is there stays readable."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError
from asyncmem.insight import Recording, read
from asyncmem.pool.appended import AppendedFile
from asyncmem.replay import Journal

from .support import MIB

LIMITED = """if True:
    import asyncmem, resource, sys, time, warnings
    from asyncmem.insight import Recording

    warnings.simplefilter("always")
    file, how, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
    options = {"journal": file} if how == "journal" else {}
    with asyncmem.AsyncMemoryPool("simulated", limit="64 MiB", stall_after=None, **options) as pool:
        recording = None
        if how == "recording":
            recording = Recording(pool, file=file).__enter__()
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        for turn in range(40):
            for size in range(200):
                pool.allocate(1000 + size * 977 + turn, tag=f"{turn}-{size}").free()
            if turn % 8 == 0:
                (recording._spool.drain if recording else pool._opened.journal.write)()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        pool.allocate(1000).free()  # there is room again
        if recording:
            for _ in range(2):
                try:
                    recording.__exit__(None, None, None)
                except OSError as error:
                    print("raised", error.strerror)
                    break
        pool.check()
        print("alive", pool._opened.worker.alive)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of files")
@pytest.mark.parametrize("most", [4000, 40_000])
@pytest.mark.parametrize("how", ["recording", "journal"])
def test_a_full_disk_costs_the_program_nothing_and_leaves_a_readable_file(tmp_path: Path, how: str, most: int) -> None:
    """What came before it is there, what came after is not, the worker lives, and it is said once."""
    file = tmp_path / "run.amem"
    command = [sys.executable, "-c", LIMITED, str(file), how, str(most)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.endswith("alive True\n")
    assert (ended.stdout + ended.stderr).count(os.strerror(errno.EFBIG)) == 1
    assert file.stat().st_size <= most
    if how == "recording":
        assert "not ended" in read(file).note
    else:
        assert bool(list(Journal(file).lines())) == (most > 4000)  # which has room for the heading


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_the_error_of_a_program_is_not_lost_to_that_of_its_recording(tmp_path: Path) -> None:
    """Where both fail, the program's goes on, and the file's is a warning."""
    with AsyncMemoryPool("simulated") as pool:
        recording = Recording(pool, file=tmp_path / "run.amem").__enter__()
        assert recording._spool is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, recording._spool._file.fileno())
        os.close(full)
        with pytest.warns(RuntimeWarning, match="could not be written to its end"):
            recording.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert not pool._opened.core.logged


def test_an_appended_file_ends_with_a_whole_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk takes a part of a piece and then no more; what comes with the next room follows the last whole one."""
    file = AppendedFile(tmp_path / "file", "xb")
    file.write(b"whole,")
    real = file._file

    class Full:
        def write(self, left: memoryview) -> int:
            if len(left) > 3:
                return real.write(left[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        file.write(b"broken")
    assert (tmp_path / "file").read_bytes() == b"whole,"
    monkeypatch.undo()
    file.close()


# -- the snapshot of an out-of-memory error ----------------------------------------------------------------------------


def link_out(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "kept").write_text("kept")
    (folder / "in" / "oom.json").symlink_to(folder / "elsewhere" / "kept")


def link_to_nothing_outside(folder: Path) -> None:
    (folder / "in" / "oom.json").symlink_to(folder / "late")


def link_to_itself(folder: Path) -> None:
    (folder / "in" / "oom.json").symlink_to("oom.json")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "in" / "oom.json")


def a_folder(folder: Path) -> None:
    (folder / "in" / "oom.json").mkdir()


@pytest.mark.parametrize("there", [link_out, link_to_nothing_outside, link_to_itself, fifo, a_folder])
def test_a_snapshot_replaces_regular_files_only(tmp_path: Path, there: Callable[[Path], None]) -> None:
    """What else is there stays as it is, with a warning; nothing is written behind a link out of the folder."""
    (tmp_path / "in").mkdir()
    there(tmp_path)
    before = look(tmp_path)
    with pytest.warns(RuntimeWarning, match="could not be written"):
        run_out_of_memory(str(tmp_path / "in" / "oom.json"))
    assert look(tmp_path) == before


def test_a_snapshot_follows_a_link_within_its_folder(tmp_path: Path) -> None:
    """The link stays, and the file that it names is replaced; a draft that somebody has laid out is not written to."""
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "oom.json").symlink_to("newest.json")
    (tmp_path / "newest.json.part").symlink_to("kept")
    run_out_of_memory(str(tmp_path / "oom.json"))
    assert (tmp_path / "oom.json").is_symlink()
    assert (tmp_path / "newest.json").read_text().startswith("{")
    assert (tmp_path / "kept").read_text() == "kept"


def test_a_snapshot_without_room_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written beside it first, and what came of that is removed."""
    path = tmp_path / "oom.json"
    path.write_text("before")

    def replace(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.warns(RuntimeWarning, match="No space"):
            run_out_of_memory(str(path))
    assert look(tmp_path) == {str(path): "before"}


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_may_have_are_refused(name: str) -> None:
    """At once, and not when it is too late."""
    for option in ("oom_snapshot", "journal"):
        with pytest.raises(InvalidRequest, match=f"{option}: expected the name of a file"):
            AsyncMemoryPool("simulated", **{option: name})  # type: ignore[arg-type]  # either of them


def run_out_of_memory(path: str) -> None:
    with AsyncMemoryPool("simulated", limit="1 MiB", oom_snapshot=path) as pool:
        with pytest.raises(OutOfMemoryError):
            pool.allocate(2 * MIB)
        pool._opened.run(lambda: None).block(60)  # the worker writes


def look(folder: Path) -> dict[str, str]:
    """What a folder has: names, and what is behind them."""
    found = {}
    for path in folder.rglob("*"):
        kind = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else "other"
        found[str(path)] = kind
    return found
