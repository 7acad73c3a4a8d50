"""Which driver the tests of this process run over: the real one, or the fake in its place."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.compiler import find_compiler

from . import SONAMES, FakeDriver, build

_STARTS = {"cuda": "cuInit", "rocm": "hipInit"}


def load(cache: Path, vendor: str = "cuda") -> FakeDriver | None:
    """Load the fake, built into `cache` unless it is there, and return it; None where the real driver is to be used.

    `ASYNCMEM_TEST_CUDA`, or `ASYNCMEM_TEST_ROCM`, says "fake" or "real"; else a real driver that answers is used. Call
    this before anybody asks for the driver: the first library of its name is the only one of a process.
    """
    variable = f"ASYNCMEM_TEST_{vendor.upper()}"
    choice = os.environ.get(variable) or ("real" if _answers(vendor) else "fake")
    if choice == "real":
        return None
    if choice != "fake":
        raise ValueError(f"{variable} is {choice!r}, and must be 'fake' or 'real'")
    folder, unfinished = cache / _fingerprint(), cache / "unfinished"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker compiles, for some seconds; the others wait
        if not folder.exists():
            find_compiler()  # else the tests are skipped
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return FakeDriver(folder / SONAMES[vendor])


def _answers(vendor: str) -> bool:
    # In a process of its own: a driver that was loaded once, and has no device, could not be replaced here.
    probe = f"import ctypes; raise SystemExit(ctypes.CDLL({SONAMES[vendor]!r}).{_STARTS[vendor]}(0))"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0


def _fingerprint() -> str:
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in {".cpp", ".hpp"})
    text = b"".join(path.read_bytes() for path in [*sources, Path(__file__).with_name("__init__.py")])
    return hashlib.sha256(text).hexdigest()[:16]
