"""Compile the C++ scheduler with a program of its own, and run it: `python tests/scheduler/growth.py [MOST]`.

Needs only g++ (or $CXX). It tells what each operation costs with 1,000 to MOST requests, a million if not told.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "asyncmem" / "core"
PROGRAM = Path(__file__).with_suffix(".cpp")
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}"]
SIDE_BY_SIDE = 2


def build(folder: Path) -> Path:
    """Compile, some files side by side, and return the program; what is there for these sources is used again."""
    sources = [PROGRAM, *(one for one in sorted(CORE.rglob("*.cpp")) if one.name != "_core.cpp")]
    read = [*sources, *sorted(CORE.rglob("*.hpp"))]
    words = " ".join([COMPILER, *FLAGS]).encode()
    digest = hashlib.sha256(b"\0".join([words, *(one.read_bytes() for one in read)])).hexdigest()
    program = folder / f"growth-{digest[:16]}"
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(dir=folder) as drafts:
        objects = [Path(drafts) / f"{source.stem}.o" for source in sources]
        jobs: list[subprocess.Popen[bytes]] = []
        for source, target in zip(sources, objects, strict=True):
            if len(jobs) == SIDE_BY_SIDE:
                _end(jobs.pop(0))
            jobs.append(subprocess.Popen([COMPILER, *FLAGS, "-c", str(source), "-o", str(target)]))
        for job in jobs:
            _end(job)
        draft = Path(drafts) / "growth"
        subprocess.run([COMPILER, "-pthread", *map(str, objects), "-o", str(draft)], check=True)
        for old in folder.glob("growth-*"):
            old.unlink(missing_ok=True)
        draft.replace(program)
    return program


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.wait():
        raise subprocess.CalledProcessError(job.returncode, job.args)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(subprocess.run([build(Path(folder)), *sys.argv[1:]], check=False).returncode)
