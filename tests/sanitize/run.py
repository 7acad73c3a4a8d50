"""Build the C++ core with drivers of its own under the sanitizers, and run them: `python tests/sanitize/run.py`.

Needs only g++ (or $CXX). Without Python in the process every report is about the core.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
CORE = TESTS.parent / "asyncmem" / "core"
HEAP = [source for source in sorted(CORE.glob("*.cpp")) if source.name != "_core.cpp"]
SCHEDULER = sorted(CORE.glob("scheduler/*.cpp"))
HISTORY, GROWTH = TESTS / "sanitize" / "history.cpp", TESTS / "scheduler" / "growth.cpp"
RUNS = {
    # The history of a heap by threads and steps; then every operation of the scheduler with so many requests.
    "address,undefined": [(HISTORY, "1", "30000"), (HISTORY, "3", "8000"), (GROWTH, "1000")],
    "thread": [(HISTORY, "4", "5000")],
}


def build(sanitizers: str, drivers: list[Path], folder: Path) -> list[Path]:
    """Compile the core and its drivers, the files side by side, and return the programs."""
    compiler = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O0", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    sources = [*drivers, *HEAP, *(SCHEDULER if GROWTH in drivers else [])]
    objects = [folder / f"{sanitizers}-{source.stem}.o" for source in sources]
    jobs = [
        subprocess.Popen([compiler, *flags, "-c", str(source), "-o", str(target)])
        for source, target in zip(sources, objects, strict=True)
    ]
    if max(job.wait() for job in jobs):
        sys.exit(f"the core does not build under {sanitizers}")
    core = objects[len(drivers) :]
    programs = [folder / f"{sanitizers}-{driver.stem}" for driver in drivers]
    for driver, program in zip(objects, programs, strict=False):
        subprocess.run([compiler, *flags, *map(str, [driver, *core]), "-o", str(program)], check=True)
    return programs


def main() -> None:
    """Run all; the first report of a sanitizer ends it with its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        for sanitizers, runs in RUNS.items():
            drivers = list(dict.fromkeys(driver for driver, *_ in runs))
            programs = dict(zip(drivers, build(sanitizers, drivers, Path(folder)), strict=True))
            for driver, *arguments in runs:
                print(f"{sanitizers}, {driver.stem}: ", flush=True)  # noqa: T201 -- a command of the developer's
                finished = subprocess.run([programs[driver], *arguments], check=False)
                if finished.returncode:
                    sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
