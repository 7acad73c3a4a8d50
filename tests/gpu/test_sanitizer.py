"""compute-sanitizer sees into our segments: it finds who writes outside of a block, and nothing in who does not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FOUND = 99

# A process under the checker starts slowly, and every launch in it is waited for.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """The program, from the path or from where the toolkit is put; skipped where it is not installed."""
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    return found


def run(sanitizer: str, deed: str, *options: str) -> subprocess.CompletedProcess[str]:
    settings = ["--force-blocking-launches", "--destroy-on-device-error=kernel", f"--error-exitcode={FOUND}", *options]
    settings.append("--report-api-errors=no")  # asking an older driver for a newer function is no error
    program = [sys.executable, str(HERE / "trespass.py"), deed]
    return subprocess.run([sanitizer, *settings, *program], capture_output=True, text=True, check=False)


def test_a_program_that_keeps_to_its_blocks_is_clean(sanitizer: str) -> None:
    """Nothing is found in a program that uses its memory to the last word, on several streams."""
    done = run(sanitizer, "nothing")
    assert "told, done" in done.stdout
    assert "not told" not in done.stdout
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("deed", ["past", "before", "freed"])
def test_a_write_outside_of_a_block_is_found(sanitizer: str, deed: str) -> None:
    """A word written past a block, before it, or to one that was freed is found, though the segment is there."""
    done = run(sanitizer, deed)
    assert "Invalid __global__ write" in done.stdout, done.stdout[-4000:]
    assert done.returncode == FOUND


def test_a_checker_that_is_told_nothing_finds_nothing(sanitizer: str) -> None:
    """The control: with annotations off the same write goes unseen, so it is the annotations that find it."""
    done = run(sanitizer, "past", "--nvtx=no")
    assert "not told, done" in done.stdout
    assert done.returncode == 0, done.stdout[-4000:]
