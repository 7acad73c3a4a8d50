"""Build the C++ core with drivers of its own under the sanitizers, and run them: `python tests/sanitize/run.py`.

Needs only g++ (or $CXX). Without Python in the process every report is about the core.

`--python` builds the compiled module under the thread sanitizer instead, and has the interpreter at hand run
`tests/soak/onlookers.py` with it; that needs Cython and all that the tests need.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
CORE = TESTS.parent / "asyncmem" / "core"
WHOLE = CORE / "whole.cpp"
HISTORY, ROUTES = (TESTS / "sanitize" / f"{name}.cpp" for name in ("history", "routes"))
GROWTH, THREADS = (TESTS / "scheduler" / f"{name}.cpp" for name in ("growth", "threads"))
COMPILER = os.environ.get("CXX", "g++")
RUNS = {
    # The history of a heap by threads and steps; then every operation of the scheduler with so many requests; then
    # requests in so many rounds, while another thread frees; and other libraries' threads and steps.
    "address,undefined": [(HISTORY, "1", "30000"), (HISTORY, "3", "8000"), (GROWTH, "1000"), (ROUTES, "4", "20000")],
    "thread": [(HISTORY, "4", "5000"), (THREADS, "2000"), (ROUTES, "4", "5000")],
}


def build(sanitizers: str, drivers: list[Path], folder: Path) -> list[Path]:
    """Compile the core and its drivers, the files side by side, and return the programs."""
    flags = ["-std=c++20", "-O0", "-g1", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
    objects = compile_all([*drivers, WHOLE], flags, folder)
    programs = [folder / f"{sanitizers}-{driver.stem}" for driver in drivers]
    for driver, program in zip(objects, programs, strict=False):
        subprocess.run([COMPILER, *flags, *map(str, [driver, objects[-1]]), "-o", str(program)], check=True)
    return programs


def compile_all(sources: list[Path], flags: list[str], folder: Path) -> list[Path]:
    """Compile files side by side, and return the objects."""
    objects = [folder / f"{source.stem}.o" for source in sources]
    jobs = [
        subprocess.Popen([COMPILER, *flags, "-c", str(source), "-o", str(target)])
        for source, target in zip(sources, objects, strict=True)
    ]
    if max(job.wait() for job in jobs):
        sys.exit(f"this does not build: {' '.join(flags)}")
    return objects


def run_python(folder: Path) -> int:
    """Build the compiled module under the thread sanitizer, beside a copy of the package, and let threads use it.

    The interpreter itself is as it was built. The sanitizer sees its locks, as calls of pthread, and every access of
    the module. What is suppressed is libc's own, and a buffer of the socket module.
    """
    package = shutil.copytree(CORE.parent, folder / "asyncmem", ignore=shutil.ignore_patterns("_core.*.so"))
    generated = folder / "_core.cpp"
    subprocess.run(
        [sys.executable, "-m", "cython", "-3", "--cplus", package / "core/_core.pyx", "-o", generated], check=True
    )
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-fvisibility=hidden", '-DCYTHON_EXTERN_C=extern "C"', f"-I{CORE}"]
    flags += [f"-I{sysconfig.get_path('include')}", "-fsanitize=thread"]
    objects = compile_all([generated, WHOLE], flags, folder)
    module = package / f"core/_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([COMPILER, "-shared", "-fsanitize=thread", *map(str, objects), "-o", str(module)], check=True)
    library = subprocess.run([COMPILER, "-print-file-name=libtsan.so"], capture_output=True, check=True, text=True)
    suppressions = folder / "suppressions"
    suppressions.write_text("race:_socket.\nrace:_dl_deallocate_tls\n")
    settings = {
        "LD_PRELOAD": library.stdout.strip(), "TSAN_OPTIONS": f"suppressions={suppressions} exitcode=66",
        "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    onlookers = [sys.executable, TESTS / "soak/onlookers.py", "--hours", "0.02"]
    return subprocess.run(onlookers, env=os.environ | settings, check=False).returncode


def main() -> None:
    """Run all; the first report of a sanitizer ends it with its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        if "--python" in sys.argv[1:]:
            sys.exit(run_python(Path(folder)))
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
