"""Compile the C++ scheduler with programs of its own, and run one: `python tests/scheduler/growth.py [MOST]`.

Needs only g++ (or $CXX). That one tells what each operation costs with 1,000 to MOST requests, a million if not told.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "asyncmem" / "core"
WHOLE = CORE / "whole.cpp"
PROGRAMS = [Path(__file__).with_name(f"{name}.cpp") for name in ("growth", "threads")]
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}"]


def build(folder: Path) -> Path:
    """Compile the files side by side, and return where the programs are, for the same sources from the last time."""
    sources = [*PROGRAMS, WHOLE]
    read = [*sources, *(one for one in sorted(CORE.rglob("*.?pp")) if one.name != "_core.cpp")]
    words = " ".join([COMPILER, *FLAGS]).encode()
    digest = hashlib.sha256(b"\0".join([words, *(one.read_bytes() for one in read)])).hexdigest()
    programs = folder / f"programs-{digest[:16]}"
    if programs.exists():
        return programs
    with tempfile.TemporaryDirectory(dir=folder) as drafts:
        objects = [Path(drafts) / f"{source.stem}.o" for source in sources]
        jobs = [
            subprocess.Popen([COMPILER, *FLAGS, "-c", str(source), "-o", str(target)])
            for source, target in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            if job.wait():
                raise subprocess.CalledProcessError(job.returncode, job.args)
        (Path(drafts) / "all").mkdir()
        for program, target in zip(PROGRAMS, objects, strict=False):
            made = Path(drafts) / "all" / program.stem
            subprocess.run([COMPILER, "-pthread", *map(str, [target, objects[-1]]), "-o", str(made)], check=True)
        for old in folder.glob("programs-*"):
            shutil.rmtree(old, ignore_errors=True)
        (Path(drafts) / "all").replace(programs)
    return programs


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(subprocess.run([build(Path(folder)) / "growth", *sys.argv[1:]], check=False).returncode)
