"""Which driver the tests of this process run over: the real one, or the fake in its place."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from . import SONAME, FakeDriver, build

_PROBE = f"import ctypes; raise SystemExit(ctypes.CDLL({SONAME!r}).cuInit(0))"


def load(cache: Path) -> FakeDriver | None:
    """Load the fake, built into `cache` unless it is there, and answer it; None where the real driver is to be used.

    `ASYNCMEM_TEST_CUDA` says "fake" or "real"; else a real driver that answers is used. Call this before anybody asks
    for the driver: the first library of its name is the only one of a process.
    """
    choice = os.environ.get("ASYNCMEM_TEST_CUDA") or ("real" if _answers() else "fake")
    if choice == "real":
        return None
    if choice != "fake":
        raise ValueError(f"ASYNCMEM_TEST_CUDA is {choice!r}, and must be 'fake' or 'real'")
    folder = cache / _fingerprint()
    if not (folder / SONAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / str(os.getpid())
        unfinished.mkdir()
        build(unfinished).replace(folder / SONAME)  # at once, so that no other session sees half of it
        unfinished.rmdir()
    return FakeDriver(folder / SONAME)


def _answers() -> bool:
    # In a process of its own: a driver that was loaded once, and has no device, could not be replaced here.
    return subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False).returncode == 0


def _fingerprint() -> str:
    sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in {".cpp", ".hpp"})
    text = b"".join(path.read_bytes() for path in [*sources, Path(__file__).with_name("__init__.py")])
    return hashlib.sha256(text).hexdigest()[:16]
