"""Out of memory explained: why, who holds it and from where, in the error and in a file."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncmem import AsyncMemoryPool, LeakWarning, OutOfMemoryError, tag
from asyncmem.insight import Recording

from .support import MIB


def test_a_recorded_pool_names_tags_and_lines() -> None:
    """Also tags of blocks, which a pool that nobody records does not see."""
    with AsyncMemoryPool("simulated", limit="8 MiB") as pool:
        with Recording(pool), tag("attention"):
            held = pool.allocate(6 * MIB)
            with pytest.raises(OutOfMemoryError) as found:
                pool.allocate(4 * MIB)
        error = found.value
        assert error.holders == (("attention", 6 * MIB),)
        ((site, nbytes),) = error.sites
        assert (site.rpartition(":")[0], nbytes) == (__file__, 6 * MIB)
        assert f"made at {__file__}:" in str(error)
        with pytest.raises(OutOfMemoryError) as found:
            pool.allocate(4 * MIB)
        assert found.value.sites == ()
        held.free()


def test_the_cause_is_named() -> None:
    """The size, the limit, or pieces."""
    with AsyncMemoryPool("simulated", limit="8 MiB", segment_size="8 MiB") as pool:
        with pytest.raises(OutOfMemoryError, match="more than there may ever be") as found:
            pool.allocate(9 * MIB)
        assert found.value.cause == "size"
        held = [pool.allocate(MIB) for _ in range(8)]
        with pytest.raises(OutOfMemoryError, match="held below the limit") as found:
            pool.allocate(2 * MIB)
        assert found.value.cause == "limit"
        del held[::2]
        with pytest.raises(OutOfMemoryError, match="in pieces") as found:
            pool.allocate(2 * MIB)
        assert found.value.cause == "fragmentation"
        held.clear()


def test_a_snapshot_is_written_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the facts, who waits, the largest tags and lines, and the segments; the newest replaces the one before."""
    path = tmp_path / "oom.json"
    monkeypatch.setenv("ASYNCMEM_OOM_SNAPSHOT", str(path))
    with AsyncMemoryPool("simulated", limit="8 MiB", name="mine") as pool:
        with Recording(pool):
            held = pool.allocate(6 * MIB, tag="weights")
            for nbytes in (3 * MIB, 4 * MIB):
                with pytest.raises(OutOfMemoryError):
                    pool.allocate(nbytes)
            pool._opened.run(lambda: None).block(60)  # the worker writes
        held.free()
    found = json.loads(path.read_text())
    assert found["pool"] == "mine"
    assert found["facts"]["asked"] == 4 * MIB
    assert found["facts"]["cause"] == "limit"
    assert found["tags"] == [["weights", 6 * MIB]]
    assert found["sites"][0][0].startswith(f"{__file__}:")
    assert sum(one["nbytes"] for one in found["segments"]) == 8 * MIB
    assert found["waiters"] == []
    assert [one.name for one in tmp_path.iterdir()] == ["oom.json"]


def test_a_snapshot_that_cannot_be_written_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the same, and so is the pool."""
    with AsyncMemoryPool("simulated", limit="8 MiB", oom_snapshot=str(tmp_path / "no" / "oom.json")) as pool:
        jobs: list[Callable[[], None]] = []
        with monkeypatch.context() as patched:
            patched.setattr(pool._opened.worker, "submit", jobs.append)
            with pytest.raises(OutOfMemoryError):
                pool.allocate(9 * MIB)
        with pytest.warns(RuntimeWarning, match="could not be written"):
            jobs[0]()
        pool.allocate(MIB).free()


def test_a_pool_closed_under_its_buffers_names_the_lines_while_it_is_recorded() -> None:
    """So a leak is found without another run."""
    with Recording():
        pool = AsyncMemoryPool("simulated").__enter__()
        held = pool.allocate(MIB)
        with pytest.warns(LeakWarning, match=r"made 1 MiB at .*test_out_of_memory\.py:\d+"):
            pool.close()
        held.free()


def refused(pool: AsyncMemoryPool, nbytes: int) -> OutOfMemoryError:
    """Ask for too much."""
    with pytest.raises(OutOfMemoryError) as found:
        pool.allocate(nbytes)
    return found.value


def test_the_log_hears_of_each_refusal_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the error's words and facts; of what was served, waited or merely tried it hears nothing."""
    with caplog.at_level(logging.DEBUG, "asyncmem"), AsyncMemoryPool("simulated", limit="8 MiB", name="mine") as pool:
        held = pool.allocate(6 * MIB, tag="weights")
        assert pool.try_allocate(4 * MIB) is None
        assert not caplog.records
        errors = [refused(pool, 9 * MIB), refused(pool, 4 * MIB)]
        with pool.lease(MIB) as lease, pytest.raises(OutOfMemoryError) as found:
            lease.allocate(2 * MIB)
        errors.append(found.value)
        held.free()
    assert [record.name for record in caplog.records] == ["asyncmem"] * 3
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
    assert [record.getMessage() for record in caplog.records] == [f"pool 'mine': {error}" for error in errors]
    assert [vars(record)["facts"] for record in caplog.records] == [error.facts for error in errors]
    assert {vars(record)["pool"] for record in caplog.records} == {"mine"}
    assert {type(part) for record in caplog.records for part in record.args or ()} == {str}, "nothing that keeps frames"


def test_who_hears_the_log_may_use_the_pool() -> None:
    """The pool waits for nobody who does, and is in nobody's way."""
    heard: list[str] = []

    class Asking(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with pool.allocate(MIB):
                heard.append(record.getMessage())

    handler = Asking()
    logging.getLogger("asyncmem").addHandler(handler)
    try:
        with AsyncMemoryPool("simulated", limit="8 MiB") as pool:
            refused(pool, 9 * MIB)
            held = pool.allocate(6 * MIB)
            refused(pool, 4 * MIB)
            held.free()
    finally:
        logging.getLogger("asyncmem").removeHandler(handler)
    assert len(heard) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_handler_that_fails_fails_nobody_else() -> None:
    """Its error is reported as those of finalizers are, and the refusal is what the caller gets."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError(record.name)

    handler = Broken()
    logging.getLogger("asyncmem").addHandler(handler)
    try:
        with AsyncMemoryPool("simulated", limit="8 MiB") as pool:
            assert refused(pool, 9 * MIB).cause == "size"
    finally:
        logging.getLogger("asyncmem").removeHandler(handler)


def test_without_a_log_nothing_is_said() -> None:
    """A program that has set up no logging reads the error and nothing besides."""
    program = (
        "import asyncmem\n"
        "with asyncmem.AsyncMemoryPool('simulated', limit='1 MiB') as pool:\n"
        "    try:\n        pool.allocate('2 MiB')\n"
        "    except asyncmem.OutOfMemoryError:\n        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "")
