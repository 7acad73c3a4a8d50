"""Run the test suites of other libraries on their own memory and, beside that, over a pool; print what differs.

    python tests/suites/run.py --cupy ~/cupy --cuda-python ~/cuda-python --numba-cuda ~/numba-cuda --pytorch ~/pytorch

Each folder is a checkout of what is installed, at its version. `docs/how-to/run-on-your-gpu.md` has what was seen.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
PYTEST = (sys.executable, "-m", "pytest", "-p", "over_a_pool", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-q",
          "--tb=short", "--no-header", "--timeout=100", "--timeout-method=thread", "-o", "addopts=")  # fmt: skip
Results = dict[str, dict[str, str]]
IN_ORDER = "load"
"""Spreads tests so that two runs that are cut have run nearly the same."""


@dataclass(frozen=True)
class Suite:
    """Tests of a library in a checkout."""

    name: str
    library: str
    root: Path
    paths: tuple[str, ...]
    options: tuple[str, ...] = ()
    dist: str = "worksteal"
    """How pytest-xdist spreads them."""
    modules: tuple[Path, ...] = ()
    """Folders with what they import."""
    alone: tuple[str, ...] = ()
    """Files, or tests, of which each test has a process to itself, because it changes the card for the others."""

    @property
    def command(self) -> tuple[str, ...]:
        """What begins each of its runs."""
        return (*PYTEST, f"--rootdir={self.root}", *self.options)


def suites(folders: argparse.Namespace) -> Iterator[Suite]:
    """Yield what there is a folder for."""
    if folders.cuda_python:
        root = folders.cuda_python / "cuda_core/tests"
        memory = ("test_memory.py", "test_memory_peer_access.py", "memory", "graph/test_graph_memory_resource.py")
        modules = (root, folders.cuda_python / "cuda_python_test_helpers")
        alone = (
            "graph/test_graph_memory_resource.py::test_dmr_check_capture_state",
        )  # leaves a capture where it fails
        yield Suite("cuda.core memory", "cuda.core", root, memory, modules=modules, alone=alone)
    if folders.numba_cuda:
        spec = find_spec("numba_cuda")  # the tests come with it
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent / "numba/cuda/tests"
        resets = ("test_managed_alloc", "test_reset_device", "test_module_callbacks", "test_host_alloc",
                  "test_context_stack", "test_cuda_memory", "test_emm_plugins")  # fmt: skip
        alone = tuple(f"cudadrv/{name}.py" for name in resets)
        options = ("-p", "conftest", "-o", "consider_namespace_packages=true", "--ignore=benchmarks")
        modules = (folders.numba_cuda / "testing",)
        yield Suite("numba.cuda.tests", "numba", root, (".",), options, "loadscope", modules, alone)
    if folders.rmm:
        yield Suite("RMM", "rmm", folders.rmm / "python/rmm", ("rmm/tests",))
    if folders.cupy:
        memory = ("test_memory.py", "test_memory_hook.py", "memory_hooks_tests", "test_pinned_memory.py")
        paths = (*(f"tests/cupy_tests/cuda_tests/{name}" for name in memory), "tests/cupy_tests/core_tests")
        yield Suite("CuPy core and memory", "cupy", folders.cupy, paths, ("-m", "not multi_gpu"), IN_ORDER)
    if folders.pytorch:
        files = ("test_cuda.py", "test_torch.py", "test_autograd.py", "test_nn.py")
        alone = ("test_cuda.py::TestMemPool",)  # torch ends the process in some of them
        options = ("-k", f"cuda and ({folders.torch_tests})")
        yield Suite("PyTorch", "torch", folders.pytorch / "test", files, options, alone=alone)


@dataclass(frozen=True)
class Runner:
    """How all are run, and where what they say goes."""

    out: Path
    workers: int
    seconds: float

    def run(self, suite: Suite, *, pooled: bool, only: Iterable[str] = (), workers: int = 0) -> Results:
        """Run a suite, or some of its tests, and return each test's outcome."""
        mode = ("pool" if pooled else "plain") + ("-again" if only else "")
        results = self.out / f"{suite.name.replace(' ', '_')}-{mode}.jsonl"
        results.unlink(missing_ok=True)
        environ = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), *map(str, suite.modules), os.environ.get("PYTHONPATH", "")]),
            "SUITE_LIBRARY": suite.library if pooled else "",
            "SUITE_RESULTS": str(results),
            "SUITE_POOL": str(results.with_suffix(".pools")),
        }
        began = time.monotonic()
        with (self.out / "log.txt").open("a") as log, ThreadPoolExecutor(workers or self.workers) as threads:

            def call(*arguments: str, seconds: float = self.seconds) -> None:
                command = [*suite.command, *arguments]
                how = {"stdout": log, "stderr": log, "env": environ, "cwd": suite.root, "start_new_session": True}
                with subprocess.Popen(command, **how) as process:
                    try:
                        process.wait(seconds)
                    except subprocess.TimeoutExpired:
                        say(f"out of time: {arguments[-1]}")
                        os.killpg(process.pid, signal.SIGKILL)  # its workers, too

            tests = list(only) or [*suite.paths, *_tests(suite, environ)]
            alone = [test for test in tests if suite.alone and test.startswith(suite.alone)]
            together = [test for test in tests if test not in alone]
            if together:
                without = [f"--deselect={one}" for one in suite.alone]
                spread = ["-p", "xdist.plugin", f"-n{workers or self.workers}", f"--dist={suite.dist}"]
                spread += ["--maxschedchunk=4"] * (suite.dist == IN_ORDER)
                call(*spread, *without, *together)
            for test in alone:
                threads.submit(call, test, seconds=100)
        found = _read(results)
        counts = dict(Counter(row["outcome"] for row in found.values()))
        say(f"{suite.name}, {mode}: {counts} in {time.monotonic() - began:.0f} s")
        return found


def _tests(suite: Suite, environ: dict[str, str]) -> list[str]:
    """Return the tests that are to be alone, one by one."""
    if not suite.alone:
        return []
    command = [*suite.command, "--collect-only", *suite.alone]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, cwd=suite.root)
    return [line for line in said.stdout.splitlines() if "::" in line]


def _read(results: Path) -> Results:
    """Return the worst that was said of each test."""
    worst = ["passed", "xfailed", "skipped", "failed"]
    found: Results = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        row = json.loads(line)
        known = found.get(row["test"])
        if known is None or worst.index(known["outcome"]) < worst.index(row["outcome"]):
            found[row["test"]] = row
    return found


def compare(runner: Runner, suite: Suite) -> Iterator[str]:
    """Run a suite both ways, and what ends otherwise once more, with less beside it; yield its rows of the table."""
    with ThreadPoolExecutor(2) as both_at_once:
        plain, pooled = both_at_once.map(lambda pooled: runner.run(suite, pooled=pooled), (False, True))
    if lost := plain.keys() ^ pooled.keys():
        say(f"{suite.name}: {len(lost)} tests ran one way only, such as {min(lost)}; they do not count")
    plain, pooled = ({test: found[test] for test in sorted(plain.keys() & pooled.keys())} for found in (plain, pooled))
    differ = sorted(_failed(plain) ^ _failed(pooled))
    _write_down(runner.out / "failed-at-first.txt", suite, plain, pooled)
    if differ:
        plain |= runner.run(suite, pooled=False, only=differ, workers=4)
        pooled |= runner.run(suite, pooled=True, only=differ, workers=4)
    _write_down(runner.out / "failed.txt", suite, plain, pooled)
    for test in sorted(_failed(pooled) - _failed(plain)):
        say(f"NEW {suite.name} | {test} | {pooled[test]['said'][:300]}")
    for part in suite.paths if suite.library == "torch" else ("",):
        both = [{test: row for test, row in found.items() if test.startswith(part)} for found in (plain, pooled)]
        new = _failed(both[1]) - _failed(both[0])
        yield f"| {suite.name} {part} | {_counts(both[0])} | {_counts(both[1])} | {len(new)} |"


def _write_down(file: Path, suite: Suite, plain: Results, pooled: Results) -> None:
    """Write a line for each test that failed in one way or both, and how often each error was raised."""
    failed = {"plain": _failed(plain), "pool": _failed(pooled)}
    with file.open("a") as out:
        for way, found in (("plain", plain), ("pool", pooled)):
            for error, count in Counter(found[test]["said"][:200] for test in failed[way]).most_common(12):
                out.write(f"# {way} {count} x {error}\n")
        for test in sorted(failed["plain"] | failed["pool"]):
            ways = " ".join(way for way in failed if test in failed[way])
            said = [found[test]["said"][:300] for found in (plain, pooled)]
            out.write(" | ".join([ways, suite.name, test, *said]) + "\n")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _failed(results: Results) -> set[str]:
    return {test for test, row in results.items() if row["outcome"] == "failed"}


def _counts(results: Results) -> str:
    counts = Counter(row["outcome"] for row in results.values())
    return f"{counts['passed'] + counts['xfailed']} / {counts['failed']} / {counts['skipped']}"


def main() -> None:
    """Run what there is a folder for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("cupy", "cuda-python", "numba-cuda", "pytorch", "rmm"):
        parser.add_argument(f"--{name}", type=lambda folder: Path(folder).resolve(), metavar="FOLDER")
    parser.add_argument(
        "--torch-tests", default="cuda", metavar="EXPRESSION", help="fewer of PyTorch's, as pytest's -k"
    )
    parser.add_argument("--out", type=Path, default=Path("suites-out"))
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="for both ways together")
    parser.add_argument("--seconds", type=float, default=600, help="for one run of one suite")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    runner = Runner(chosen.out.resolve(), max(1, chosen.workers // 2), chosen.seconds)
    rows = [row for suite in suites(chosen) for row in compare(runner, suite)]
    say("| tests | on their own memory: passed / failed / skipped | over a pool | new failures |\n|---|---|---|---|")
    say("\n".join(rows))


if __name__ == "__main__":
    main()
