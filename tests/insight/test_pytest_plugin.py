"""The marks for pytest: a test with too much at once, or that leaves buffers behind, fails and names the lines."""

import os
import sys
from pathlib import Path

import pytest

import asyncmem
import asyncmem.insight.trackers  # the tests within tests take it from here

pytest_plugins = ["pytester"]

# Said by name, because asyncmem may run from its sources, where no installation has told pytest of the plugin.
PLUGIN = ("-p", "pytest_asyncmem", "-p", "no:cacheprovider")

HEAD = """
import pytest

from asyncmem import AsyncMemoryPool

POOL = AsyncMemoryPool("simulated", name="theirs")
HELD = []

@pytest.fixture(scope="module", autouse=True)
def the_end():
    yield
    HELD.clear()
    POOL.close()
"""


@pytest.fixture
def tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Somebody's tests, in a folder of their own."""
    # A build leaves metadata beside the sources, which pytest would take for those of an installed plugin.
    monkeypatch.setattr(sys, "path", [one for one in sys.path if not Path(one, "asyncmem.egg-info").exists()])
    monkeypatch.setenv("PYTHONPATH", str(Path(asyncmem.__file__).parents[1]), prepend=os.pathsep)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    return pytester


def run(tests: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    """Run tests in this process, all warnings being errors."""
    tests.makepyfile(HEAD + text)
    return tests.runpytest_inprocess(*PLUGIN, "-W", "error", "--strict-markers", *options)


def line_of(tests: pytest.Pytester, text: str) -> str:
    """The place of a line of those tests, as failures name it."""
    (path,) = tests.path.glob("test_*.py")
    number = path.read_text(encoding="utf-8").splitlines().index(text) + 1
    return f"{path}:{number}"


def test_a_test_over_its_limit_fails_and_names_the_lines(tests: pytest.Pytester) -> None:
    """The lines of what was live at the peak, most bytes first; what was freed before, or came after, is not theirs."""
    result = run(
        tests,
        """
@pytest.mark.asyncmem_limit("3 MiB")
def test_large():
    early = POOL.allocate("3 MiB")
    early.free()
    first = [POOL.allocate(1 << 20) for _ in range(2)]
    second = POOL.allocate("1.5 MiB")
    first.clear()
    late = POOL.allocate("2 MiB")
""",
    )
    result.assert_outcomes(failed=1)
    large = line_of(tests, "    first = [POOL.allocate(1 << 20) for _ in range(2)]")
    small = line_of(tests, '    second = POOL.allocate("1.5 MiB")')
    result.stdout.fnmatch_lines(
        [
            "asyncmem_limit: 3.50 MiB were live at once where 3 MiB are allowed:",
            f"  2 MiB in 2 buffers at {large} (test_large*)",
            f"  1.50 MiB in 1 buffer at {small} (test_large)",
        ],
        consecutive=True,
    )


def test_a_test_within_its_limit_passes(tests: pytest.Pytester) -> None:
    """To the byte; what others hold does not count, and does not make room when it is freed meanwhile."""
    result = run(
        tests,
        """
@pytest.fixture
def model():
    return POOL.allocate("8 MiB")

@pytest.mark.asyncmem_limit(1 << 20)
def test_exactly(model):
    for _ in range(3):
        POOL.allocate(1 << 20).free()

@pytest.mark.asyncmem_limit(1 << 20)
def test_not_quite(model):
    model.free()
    POOL.allocate((1 << 20) + 1).free()
""",
    )
    result.assert_outcomes(passed=1, failed=1)


def test_the_limit_is_over_all_pools(tests: pytest.Pytester) -> None:
    """Those that the test makes as well, closed or not."""
    result = run(
        tests,
        """
@pytest.mark.asyncmem_limit("2 MiB")
def test_two():
    with AsyncMemoryPool("simulated", name="second") as pool:
        one, other = POOL.allocate("1.5 MiB"), pool.allocate("1 MiB")
        one.free(), other.free()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["asyncmem_limit: 2.50 MiB were live at once where 2 MiB are allowed:"])


def test_one_leak_among_100_000_allocations_is_named(tests: pytest.Pytester) -> None:
    """With its file and line."""
    result = run(
        tests,
        """
def plant():
    HELD.append(POOL.allocate(4096))

@pytest.mark.asyncmem_no_leaks
def test_leaks():
    for step in range(100_000):
        POOL.allocate(512).free()
        if step == 77_777:
            plant()
""",
    )
    result.assert_outcomes(failed=1)
    place = line_of(tests, "    HELD.append(POOL.allocate(4096))")
    result.stdout.fnmatch_lines(
        [
            "asyncmem_no_leaks: 1 buffer of 4 KiB still live after the test that allocated them:",
            f"  4 KiB in 1 buffer at {place} (plant)",
        ],
        consecutive=True,
    )


def test_what_is_not_the_tests_own_is_no_leak(tests: pytest.Pytester) -> None:
    """A later test is not blamed for an earlier one's."""
    result = run(
        tests,
        """
@pytest.fixture
def input():
    with POOL.allocate(4096) as buffer:
        yield buffer

@pytest.mark.asyncmem_no_leaks
def test_fixture(input):
    held = POOL.allocate(4096)

@pytest.mark.asyncmem_no_leaks
def test_leaks():
    HELD.append(POOL.allocate(4096))

@pytest.mark.asyncmem_no_leaks
@pytest.mark.parametrize("nbytes", [512, 4096])
def test_later(nbytes):
    POOL.allocate(nbytes)
    HELD.append(AsyncMemoryPool("simulated", name="idle"))

def test_unmarked():
    HELD.append(POOL.allocate(4096))
""",
    )
    result.assert_outcomes(passed=4, failed=1)


def test_what_only_the_garbage_collector_frees_is_a_leak(tests: pytest.Pytester) -> None:
    """It may never run, and memory would wait for it; the next test has nothing of that."""
    result = run(
        tests,
        """
@pytest.mark.asyncmem_no_leaks
def test_ring():
    ring = [POOL.allocate(4096)]
    ring.append(ring)

@pytest.mark.asyncmem_no_leaks
def test_later():
    POOL.allocate(512)
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["asyncmem_no_leaks: 1 buffer of 4 KiB in reference cycles, live until the garbage collector runs:"]
    )


def test_asynchronous_tests_are_watched(tests: pytest.Pytester) -> None:
    """Of pytest-asyncio and of anyio, on asyncio and on trio."""
    result = run(
        tests,
        """
async def leak():
    async with AsyncMemoryPool("simulated", name="other") as pool:
        HELD.append(await pool.allocate_async(1000))

@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param

@pytest.mark.filterwarnings("ignore::asyncmem.LeakWarning")
@pytest.mark.asyncmem_no_leaks
@pytest.mark.asyncio
async def test_of_pytest_asyncio():
    await leak()

@pytest.mark.filterwarnings("ignore::asyncmem.LeakWarning")
@pytest.mark.asyncmem_no_leaks
@pytest.mark.anyio
async def test_of_anyio():
    await leak()

@pytest.mark.asyncmem_no_leaks
@pytest.mark.asyncmem_limit("1 MiB")
@pytest.mark.anyio
async def test_without_any():
    async with AsyncMemoryPool("simulated", name="tidy") as pool:
        (await pool.allocate_async("1 MiB")).free()
""",
    )
    result.assert_outcomes(failed=3, passed=2)
    place = line_of(tests, "        HELD.append(await pool.allocate_async(1000))")
    result.stdout.fnmatch_lines([f"  1000 B in 1 buffer at {place} (leak)"] * 3)


def test_the_closest_mark_holds(tests: pytest.Pytester) -> None:
    """A module's or a class's is for all of its tests; a parameter may have its own."""
    result = run(
        tests,
        """
pytestmark = pytest.mark.asyncmem_limit(1000)

def test_of_module():
    POOL.allocate(2000)

class TestClass:
    pytestmark = pytest.mark.asyncmem_limit(3000)

    @pytest.mark.parametrize("nbytes", [2000, pytest.param(4000, marks=pytest.mark.asyncmem_limit("4000 B")), 4000])
    def test_of_class(self, nbytes):
        POOL.allocate(nbytes)
""",
    )
    result.assert_outcomes(passed=2, failed=2)


def test_a_test_that_fails_or_skips_by_itself_is_not_judged(tests: pytest.Pytester) -> None:
    """Its own failure is what is shown; an expected failure may be ours."""
    result = run(
        tests,
        """
@pytest.mark.asyncmem_limit(0)
@pytest.mark.asyncmem_no_leaks
def test_fails():
    HELD.append(POOL.allocate(4096))
    assert not HELD, "its own"

@pytest.mark.asyncmem_limit(0)
def test_skips():
    HELD.append(POOL.allocate(4096))
    pytest.skip("not now")

@pytest.mark.xfail(strict=True)
@pytest.mark.asyncmem_no_leaks
def test_expected():
    HELD.append(POOL.allocate(4096))
""",
    )
    result.assert_outcomes(failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*AssertionError: its own*"])
    result.stdout.no_fnmatch_line("asyncmem_*")


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ('asyncmem_limit("64 parrots")', "*asyncmem_limit*64 parrots*"),
        ("asyncmem_limit", "*asyncmem_limit takes one size*"),
        ("asyncmem_limit(size=3)", "*asyncmem_limit takes one size*"),
    ],
)
def test_a_wrong_limit_is_said(tests: pytest.Pytester, mark: str, says: str) -> None:
    """By the test that has it, in a sentence."""
    result = run(tests, f"@pytest.mark.{mark}\ndef test_wrong():\n    pass\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([says])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_peak_that_nobody_can_know_is_no_success(tests: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """More may have been live among records that were dropped."""
    monkeypatch.setattr(asyncmem.insight.trackers, "_KEEP", 100)
    result = run(
        tests,
        """
@pytest.mark.asyncmem_limit("1 GiB")
def test_long():
    for _ in range(1000):
        POOL.allocate(512).free()
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["asyncmem_limit: * records are not known*"])


def test_pytest_starts_without_asyncmem(tests: pytest.Pytester) -> None:
    """Only a marked test imports it; the marks are listed."""
    tests.makepyfile(
        """
        import sys

        import pytest

        def test_unmarked():
            assert not {one for one in sys.modules if one == "asyncmem" or one.startswith("asyncmem.")}

        @pytest.mark.asyncmem_no_leaks
        def test_marked():
            assert "asyncmem" in sys.modules
        """
    )
    result = tests.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(passed=2)
    listed = tests.runpytest_inprocess(*PLUGIN, "--markers")
    listed.stdout.fnmatch_lines(["@pytest.mark.asyncmem_limit(size): *", "@pytest.mark.asyncmem_no_leaks: *"])


def test_workers_of_xdist_are_watched(tests: pytest.Pytester) -> None:
    """Tests in a process of its own, as with `-n auto`."""
    tests.makepyfile(
        HEAD
        + """
@pytest.mark.asyncmem_no_leaks
@pytest.mark.parametrize("nbytes", [0, 512, 0, 4096])
def test_spread(nbytes):
    HELD.append(POOL.allocate(nbytes))
"""
    )
    result = tests.runpytest_subprocess(*PLUGIN, "-n", "1")
    result.assert_outcomes(passed=2, failed=2)
    place = line_of(tests, "    HELD.append(POOL.allocate(nbytes))")
    result.stdout.fnmatch_lines_random([f"  512 B in 1 buffer at {place} (*", f"  4 KiB in 1 buffer at {place} (*"])
