"""The comparison with other allocators: who takes part, what is measured beside what, and which bounds hold."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncmem.cli.bench.timing import Effort, random_plan, unrolled
from benchmarks import alone
from benchmarks.allocators import OURS, AsyncmemPool, Calls
from benchmarks.comparison import SUITE, TOGETHER, TORCH
from benchmarks.rows import circular, empty, fill, plainly
from benchmarks.suite import Family, Measured, Task, absent, measure, run
from benchmarks.workloads import LIMIT, PRESSED, PROGRAMS, pressure

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "traces" / "four_streams.npz"
ON_ANY_DEVICE = [name for name in SUITE.rows if SUITE.takes_part(SUITE.family(OURS), name)]


def a_moment(*rows: str) -> Task:
    """Ask for as little as can be measured."""
    traces = (str(RECORDED),)
    return Task(
        suite=SUITE.module, family=OURS, device="simulated", rows=rows, effort=Effort(2, 1000, 0.01),
        traces=traces,
    )  # fmt: skip


def found(row: str, peer: str, ns: float, case: str = "", **figures: float) -> Measured:
    return Measured(row=row, case=case, peer=peer, min=ns, median=ns, figures=figures)


def entry(lines: list[Measured], row: str, peer: str, case: str = "") -> Measured:
    return next(one for one in lines if (one.row, one.peer, one.case) == (row, peer, case))


@pytest.mark.parametrize("name", [name for name in ON_ANY_DEVICE if name not in alone.SUITE.rows])
def test_every_row_measures_our_pool(name: str) -> None:
    """A row that needs no card has positive times for the pool on a device without one, and never fails."""
    (line,) = measure(a_moment(name))
    assert isinstance(line, Measured), line
    assert (line.row, line.peer) == (name, OURS)
    assert 0 < line.min <= line.median
    assert line.floor is not None
    assert line.floor > 0


def test_a_run_measures_in_a_process_that_finds_the_comparison() -> None:
    """The child imports what this process can import, from whichever folder it is started."""
    result = run(a_moment("same_size"), [SUITE.family(OURS)], lambda _: None)
    assert not result.failed
    assert [(line.row, line.peer) for line in result.measured] == [("same_size", OURS)]


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_has_a_command_of_its_own() -> None:
    """`python -m benchmarks` lists its rows, and refuses a device that is not there in a sentence."""
    shown = run_command("--help")
    assert all(word in shown.stdout for word in ("take_back", "--trace", "--json", "--quick", "--uvloop", "--check"))
    refused = run_command("--device", "cuda:99")
    assert refused.returncode == 1
    assert "cuda:99" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("one", [one for one in SUITE.families if one.module], ids=lambda one: one.name)
def test_an_absent_library_is_named_with_what_to_install(one: Family) -> None:
    """A family whose module is not there is skipped by name; one whose module is there is not."""
    missing = Family(name=one.name, peers=one.peers, module=f"{one.module}_that_nobody_has", install=one.install)
    gap = absent(missing)
    assert gap is not None
    assert gap.family == one.name
    assert missing.module in gap.reason
    assert gap.install.startswith("pip install ")
    assert absent(Family(name="json", peers=one.peers, module="json")) is None


def test_every_family_that_has_a_row_is_measured_in_it() -> None:
    """Rows may name their families; the others are for all that are not about one row."""
    assert [one.name for one in SUITE.chosen("cuda:0", ["same_size"])] == [OURS, TORCH]
    assert [one.name for one in SUITE.chosen("cuda:0", ["take_back"])] == [TOGETHER]
    assert TOGETHER not in {one.name for one in SUITE.chosen("cuda:0", ["hit"])}
    assert SUITE.chosen("cuda:0", SUITE.rows) == list(SUITE.families)


def test_other_devices_have_no_peers() -> None:
    """Nobody else allocates on the host or the simulated device."""
    assert [one.name for one in SUITE.chosen("simulated", SUITE.rows)] == [OURS]


def test_torch_is_configured_in_a_process_of_its_own() -> None:
    """Each configuration that torch reads once is a family, with the variable that it reads."""
    configured = {one.name: one.environment for one in SUITE.families if one.environment}
    assert [value["PYTORCH_ALLOC_CONF"] for value in configured.values()] == [
        "expandable_segments:True",
        "backend:cudaMallocAsync",
    ]
    assert not SUITE.family(TORCH).environment


def test_rows_of_a_card_are_left_to_families_that_have_one() -> None:
    """Where torch has to be in the same process, our family alone measures nothing."""
    assert list(measure(a_moment("streams", "take_back"))) == []
    assert {"streams", "take_back"} == set(SUITE.rows) - set(ON_ANY_DEVICE)


def test_every_bound_is_about_a_row_that_takes_part() -> None:
    """No bound names a row that does not exist, or a peer that is not measured in it."""
    for one in SUITE.bounds:
        assert one.row in SUITE.rows
        members = [each.name for each in SUITE.families if SUITE.takes_part(each, one.row)]
        assert one.peer == OURS or any(one.peer.startswith(name) for name in (*members, "cuMemAllocAsync"))


@pytest.mark.parametrize(
    "row", ["hit", "churn", "batch", "large", "cross_stream", "same_size", "variable_sizes", "pressure", "replay"]
)
@pytest.mark.may_block
def test_asyncmem_is_measured_beside_a_peer(row: str) -> None:
    """A peer's figure carries asyncmem's of the same process, but for the row whose limit is one on the process."""
    peer = AsyncmemPool("simulated")
    peer.beside = AsyncmemPool("simulated")
    for line in SUITE.rows[row].measure(peer, a_moment(row)):
        assert (line.beside is None) == (row == "pressure")


def test_bounds_hold_what_they_say() -> None:
    """Bounds at most are about our own figures: the ratio to a hit, what is reserved, how much longer a wait was."""
    entries = SUITE.judge(
        [
            found("hit", "asyncmem", 60.0),
            found("large", "asyncmem", 63.0, "1 GiB", to_other=1.05),
            found("large", "asyncmem", 130.0, "random, 1 live", to_other=1.08),
            found("large", "asyncmem", 180.0, "random, 8 live", to_other=1.5),
            found("streams", "asyncmem", 1.9, "reserved ÷ live"),
            found("streams", "asyncmem", 4e8, "time", to_torch=1.06),
            found("loop_stall", "asyncmem", 4e5, more_ns=149_000),
            found("take_back", "asyncmem", 3e6, "2 GiB a time", to_floor=1.03),
        ]
    )
    verdicts = {(one.row, one.case): one.ok for one in entries}
    assert verdicts == {
        ("hit", ""): None,
        ("large", "1 GiB"): True,
        ("large", "random, 1 live"): True,
        ("large", "random, 8 live"): False,
        ("streams", "reserved ÷ live"): True,
        ("streams", "time"): False,
        ("loop_stall", ""): True,
        ("take_back", "2 GiB a time"): False,
    }


def test_ratios_are_to_asyncmem_in_the_same_case() -> None:
    """A peer's minimum over ours of the same row and case; ours over itself is one; without ours there is none."""
    entries = SUITE.judge(
        [
            found("batch", "asyncmem", 50.0, "equal"),
            found("batch", "asyncmem", 100.0, "mixed"),
            found("batch", "torch.empty", 2000.0, "equal"),
            found("batch", "torch.empty", 1000.0, "mixed"),
            found("churn", "torch raw", 900.0),
        ]
    )
    assert entry(entries, "batch", "torch.empty", "equal").ratio == 40.0
    assert entry(entries, "batch", "torch.empty", "equal").ok is True
    assert entry(entries, "batch", "torch.empty", "mixed").ok is False
    assert entry(entries, "batch", "asyncmem", "equal").ratio == 1.0
    assert entry(entries, "churn", "torch raw").ratio is None
    assert entry(entries, "churn", "torch raw").ok is None


def test_a_ratio_is_to_asyncmem_in_the_same_process_where_it_was_measured_there() -> None:
    """Two processes may differ by more than two allocators, so a pair that took turns is what counts."""
    other = found("hit", "asyncmem", 50.0)
    pair = Measured(row="hit", peer="torch raw", min=700.0, median=700.0, beside=100.0)
    entries = SUITE.judge([other, pair])
    assert entry(entries, "hit", "torch raw").ratio == 7.0
    assert entry(entries, "hit", "torch raw").ok is True


def test_pressure_stays_below_its_share_of_the_limit() -> None:
    """The program under pressure never has more live than it says, and comes close to it."""
    live, most = 0, 0
    for _, size, old in pressure():
        live += size or -old
        most = max(most, live)
    assert 0.95 * PRESSED * LIMIT < most <= PRESSED * LIMIT
    assert live == 0


class Ledger:
    """An allocator that knows what it has handed out, and at which size it came back."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.numbers = iter(range(1, 1_000_000))

    def allocate(self, size: int) -> int:
        number = next(self.numbers)
        self.live[number] = size
        return number

    def release(self, number: int, size: int) -> None:
        assert self.live.pop(number) == size

    def way(self) -> Calls:
        names = {"allocate": self.allocate, "release": self.release}
        return Calls(names=names, allocate="allocate({size})", release="release({block}, {size})")


async def ran(statement: str, names: dict[str, object]) -> None:
    await unrolled(statement, names, times=3).run(2)


def ways(ledger: Ledger) -> Iterator[tuple[str, dict[str, object]]]:
    """Write every kind of statement."""
    way, names = ledger.way(), dict(ledger.way().names)
    yield way.once("4096"), names
    yield way.hundred(), {**names, "sizes": [1, 2, 3]}
    for make in (pressure, *(program for name, program in PROGRAMS.items() if name != "variable_sizes")):
        yield way.over_program(), {**names, "plan": make(), "live": [None] * 1000}


def test_statements_give_back_what_they_take_at_its_size() -> None:
    """Whatever a row runs through an allocator with explicit frees, each block comes back once, with its own size."""
    ledger = Ledger()
    for statement, names in ways(ledger):
        plainly(ran(statement, names))
        assert not ledger.live


def test_a_plan_that_replaces_keeps_its_sizes_over_many_turns() -> None:
    """Filled once, a circular plan runs any number of times, and everything is given back in the end."""
    ledger = Ledger()
    plan = circular(random_plan(50, 7, 512, 4096))
    held = fill(ledger.way(), plan)
    plainly(ran(ledger.way().over_plan(), {**ledger.way().names, "plan": plan, "live": held}))
    empty(ledger.way(), plan, held)
    assert not ledger.live
