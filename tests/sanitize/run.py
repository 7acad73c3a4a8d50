"""Build the C++ core with a driver of its own under the sanitizers, and run it: `python tests/sanitize/run.py`.

Needs only g++ (or $CXX). Without Python in the process every report is about the heap.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "asyncmem" / "core"
SOURCES = [Path(__file__).with_name("history.cpp"), *(p for p in sorted(CORE.rglob("*.cpp")) if p.name != "_core.cpp")]
BUILDS = {
    "address,undefined": [("1", "30000"), ("3", "8000")],
    "thread": [("4", "5000")],
}


def build(sanitizers: str, folder: Path) -> Path:
    """Compile the core and the driver, the files side by side, and answer the program."""
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    program = folder / sanitizers.replace(",", "-")
    objects = [program.with_name(f"{program.name}-{source.stem}.o") for source in SOURCES]
    jobs = [
        subprocess.Popen([compiler, *flags, "-c", str(source), "-o", str(target)])
        for source, target in zip(SOURCES, objects, strict=True)
    ]
    if max(job.wait() for job in jobs):
        sys.exit(f"the core does not build under {sanitizers}")
    subprocess.run([compiler, *flags, *map(str, objects), "-o", str(program)], check=True)
    return program


def main() -> None:
    """Run every build; the first report of a sanitizer ends it with its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        for sanitizers, runs in BUILDS.items():
            program = build(sanitizers, Path(folder))
            for threads, steps in runs:
                print(f"{sanitizers}: ", end="", flush=True)  # noqa: T201 -- a command of the developer's
                finished = subprocess.run([program, threads, steps], check=False)
                if finished.returncode:
                    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
