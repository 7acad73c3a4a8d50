"""`asyncmem bench --device`: every row measures, peers are chosen and skipped by name, figures are held to bounds."""

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from rich.console import Console

from asyncmem.cli.benchmarks.churn import random_plan
from asyncmem.cli.benchmarks.device import DEVICE_ROWS, growth
from asyncmem.cli.benchmarks.device.asked import ASKED, Entry, judge
from asyncmem.cli.benchmarks.device.child import Failed, Task, measure
from asyncmem.cli.benchmarks.device.loop_stall import ticking
from asyncmem.cli.benchmarks.device.loops import circular, empty, fill
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.device.replay import plan_of
from asyncmem.cli.benchmarks.device.run import Run, chosen, collect, run
from asyncmem.cli.benchmarks.device.seeds import LIMIT, PRESSED, PROGRAMS, pressure
from asyncmem.cli.benchmarks.device.show import show
from asyncmem.cli.benchmarks.device.where import Where
from asyncmem.cli.benchmarks.measure import Effort, plainly, time_apart, unrolled
from asyncmem.cli.benchmarks.peers import FAMILIES, Family, absent, family
from asyncmem.cli.benchmarks.peers.family import OURS, TOGETHER, TORCH
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.cli.benchmarks.peers.way import FLOOR, Way
from asyncmem.devices import Simulated
from asyncmem.replay import Trace

Invoke = Callable[..., Result]

RECORDED = Path(__file__).parents[1] / "traces" / "four_streams.npz"
ON_ANY_DEVICE = [name for name, row in DEVICE_ROWS.items() if OURS in row.families]


def a_moment(*rows: str, device: str = "simulated") -> Task:
    """Ask for as little as can be measured."""
    return Task(family=OURS, device=device, rows=rows, repeats=2, repeat_ns=1000, share=0.01, traces=(str(RECORDED),))


def found(row: str, peer: str, ns: float, case: str = "", **figures: float) -> Measured:
    return Measured(row=row, case=case, peer=peer, min=ns, median=ns, figures=figures)


def entry(entries: list[Entry], row: str, peer: str, case: str = "") -> Entry:
    return next(one for one in entries if (one.measured.row, one.measured.peer, one.measured.case) == (row, peer, case))


@pytest.mark.may_block  # what a synchronous call costs on a loop's thread is what some rows measure
@pytest.mark.parametrize("name", ON_ANY_DEVICE)
def test_every_row_measures_our_pool(name: str) -> None:
    """A row that needs no card has positive times for the pool on a device without one, and never fails."""
    lines = list(measure(a_moment(name)))
    assert lines
    for line in lines:
        assert isinstance(line, Measured), line
        assert line.row == name
        assert line.peer.startswith("asyncmem")
        assert 0 < line.min <= line.median
        assert line.floor is None or line.floor > 0


@pytest.mark.may_block
@pytest.mark.parametrize("row", ["growth", "loop_stall"])
def test_a_device_that_is_too_small_ends_a_row(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    """Where the last of the blocks would wait for ever, the row ends with an error, and what it held is given back."""
    monkeypatch.setattr(growth, "PATIENCE_SECONDS", 0.05)
    device = Simulated(1 << 30)
    with pytest.raises(TimeoutError):
        list(DEVICE_ROWS[row].measure(Ours(device), Effort(2, 1000, share=1.0), Where(device="simulated")))
    assert device.memory().free == device.memory().total


def test_rows_of_a_card_are_left_to_families_that_have_one() -> None:
    """Where torch has to be in the same process, our family alone measures nothing."""
    assert list(measure(a_moment("streams", "take_back"))) == []
    assert {"streams", "take_back"} == set(DEVICE_ROWS) - set(ON_ANY_DEVICE)


@pytest.mark.may_block
def test_a_row_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one row of one peer raises is noted by its name, and the next row is measured."""

    def fail(_: Ours) -> None:
        raise RuntimeError("no streams today")

    monkeypatch.setattr(Ours, "crossing", fail)
    failed, line = measure(a_moment("cross_stream", "await_hit"))
    assert failed == Failed(family=OURS, peer="asyncmem", row="cross_stream", error="RuntimeError: no streams today")
    assert isinstance(line, Measured)
    assert line.row == "await_hit"


@pytest.mark.parametrize("one", [one for one in FAMILIES if one.module], ids=lambda one: one.name)
def test_an_absent_library_is_named_with_what_to_install(one: Family) -> None:
    """A family whose module is not there is skipped by name; one whose module is there is not."""
    missing = Family(name=one.name, make=one.make, module=f"{one.module}_that_nobody_has", install=one.install)
    gap = absent(missing)
    assert gap is not None
    assert gap.family == one.name
    assert missing.module in gap.reason
    assert gap.install.startswith("pip install ")
    assert absent(Family(name="json", make=one.make, module="json")) is None


def test_a_module_of_a_package_that_is_absent_is_absent() -> None:
    """Looking for `package.module` does not fail where there is no such package."""
    assert absent(Family(name="x", make=lambda _: (), module="nobody_has_this.core", install="pip install x"))


def test_peers_are_measured_only_when_asked_for() -> None:
    """Without `--peers` it is asyncmem, alone and with torch around its buffers; with it, everybody who has the row."""
    assert [one.name for one in chosen("cuda:0", ["hit", "streams"], peers=False)] == [OURS, TOGETHER]
    assert {one.name for one in chosen("cuda:0", ["same_size"], peers=True)} == {OURS, TORCH}
    everybody = {one.name for one in chosen("cuda:0", list(DEVICE_ROWS), peers=True)}
    assert everybody == {one.name for one in FAMILIES}


def test_other_devices_have_no_peers() -> None:
    """Nobody else allocates on the host or the simulated device."""
    assert [one.name for one in chosen("simulated", list(DEVICE_ROWS), peers=True)] == [OURS]


def test_torch_is_configured_in_a_process_of_its_own() -> None:
    """Each configuration that torch reads once is a family, with the variable that it reads."""
    configured = {one.name: one.environment for one in FAMILIES if one.environment}
    assert [value["PYTORCH_ALLOC_CONF"] for value in configured.values()] == [
        "expandable_segments:True",
        "backend:cudaMallocAsync",
    ]
    assert not family(TORCH).environment


def test_a_run_measures_each_family_in_a_process_and_skips_absent_ones() -> None:
    """The child's figures come back; a family without its library is listed and not started."""
    gone = Family(name="gone", make=lambda _: (), module="nobody_has_this", install="pip install gone")
    started: list[str] = []
    result = run(a_moment("hit"), [family(OURS), gone], started.append)
    assert started == [OURS]
    assert [(line.row, line.peer) for line in result.measured] == [("hit", "asyncmem")]
    assert [one.family for one in result.absent] == ["gone"]
    assert not result.failed


def test_a_process_that_ends_early_is_a_failure_by_name() -> None:
    """A child that cannot open the device tells so, and the run goes on."""
    result = run(a_moment("hit", device="simulated:x"), [family(OURS)], lambda _: None)
    (failed,) = result.failed
    assert failed.peer == OURS
    assert "simulated:x" in failed.error


def test_a_figure_survives_the_way_from_the_child() -> None:
    """What a child writes as a line is what the run reads."""
    line = found("hit", "torch raw", 500.0, live=3)
    result = Run()
    collect(json.dumps({"measured": asdict(line)}), result)
    assert result.measured == [line]


def test_ratios_are_to_asyncmem_in_the_same_case() -> None:
    """A peer's minimum over ours of the same row and case; ours over itself is one; without ours there is none."""
    entries = judge(
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
    entries = judge([other, pair])
    assert entry(entries, "hit", "torch raw").ratio == 7.0
    assert entry(entries, "hit", "torch raw").ok is True


@pytest.mark.parametrize(
    "row", ["hit", "churn", "batch", "large", "cross_stream", "same_size", "variable_sizes", "pressure", "replay"]
)
@pytest.mark.may_block
def test_asyncmem_is_measured_beside_a_peer(row: str) -> None:
    """A peer's figure carries asyncmem's of the same process, but for the row whose limit is one on the process."""
    peer = Ours("simulated")
    peer.beside = Ours("simulated")
    for line in DEVICE_ROWS[row].measure(peer, a_moment().effort(), Where(device="simulated", traces=(str(RECORDED),))):
        assert (line.beside is None) == (row == "pressure")


def test_bounds_hold_what_they_say() -> None:
    """Bounds at most are about our own figures: the ratio to a hit, what is reserved, how much longer a wait was."""
    entries = judge(
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
    verdicts = {(one.measured.row, one.measured.case): one.ok for one in entries}
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


def test_a_recording_is_replayed_to_its_end() -> None:
    """Slots are filled and emptied in turn, nothing is asked for 0 bytes, and what the program kept is freed last."""
    op, number, nbytes = [0, 0, 0, 1, 1, 0], [0, 1, 2, 1, 0, 3], [512, 0, 700, 0, 512, 9]
    trace = Trace(*map(np.array, (op, [0] * 6, number, nbytes, range(6))))
    assert plan_of(trace) == [(0, 512, 0), (2, 700, 0), (0, 0, 512), (3, 9, 0), (2, 0, 700), (3, 0, 9)]


def test_programs_are_replayed_only_where_they_are_named(invoke: Invoke) -> None:
    """Without a recording the row is a usage error; with one, it says what was reserved, over pages as well."""
    refused = invoke("bench", "replay", "--device", "simulated")
    assert refused.exit_code == 2
    assert "--trace" in refused.output
    result = invoke("bench", "replay", "--device", "simulated", "--trace", str(RECORDED), "--quick", "--json")
    assert result.exit_code == 0, result.output
    plain, paged = json.loads(result.stdout)["figures"]
    assert (plain["case"], paged["case"]) == ("four_streams", "four_streams, paged")
    for line in (plain, paged):
        assert line["figures"]["reserved_over_requested"] >= 1


def test_a_broken_promise_is_not_met_without_a_bound() -> None:
    """A figure that says what did not hold is not met, asked for or not."""
    line = Measured(row="take_back", peer="asyncmem", min=1.0, median=1.0, broken="nothing was taken back")
    (one,) = judge([line])
    assert one.ok is False
    assert one.as_json()["broken"] == "nothing was taken back"


def test_every_bound_is_about_a_row_that_takes_part() -> None:
    """No bound names a row that does not exist, or a peer that is not measured in it."""
    for one in ASKED:
        assert one.row in DEVICE_ROWS
        members = DEVICE_ROWS[one.row].families
        assert one.peer == "asyncmem" or any(one.peer.startswith(name) for name in (*members, "cuMemAllocAsync"))


@pytest.mark.may_block
def test_json_lists_objects(invoke: Invoke) -> None:
    """`--json` prints a list of figures with their bounds, and nothing else on standard output."""
    result = invoke("bench", "hit", "batch", "--device", "simulated", "--quick", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert [(line["row"], line["case"], line["peer"]) for line in printed["figures"]] == [
        ("hit", "", "asyncmem"),
        ("batch", "equal", "asyncmem"),
        ("batch", "mixed", "asyncmem"),
    ]
    for line in printed["figures"]:
        assert {"min", "median", "floor", "ratio", "unit", "unlike", "bound", "ok"} <= set(line)
        assert line["ratio"] == 1.0
        assert line["unlike"] is None
    assert printed["skipped"] == printed["failed"] == []
    assert printed["method"] == {"device": "simulated", "quick": True, "loop": "asyncio"}


@pytest.mark.may_block
def test_a_person_gets_a_table_with_the_versions(invoke: Invoke) -> None:
    """Without `--json` there is a table, and below it the versions of what took part."""
    result = invoke("bench", "hit", "--device", "simulated", "--quick")
    assert result.exit_code == 0, result.output
    assert "to ours" in result.stdout
    assert "numpy" in result.stdout


def test_a_narrow_terminal_cuts_nothing() -> None:
    """At 80 columns names go on in the next line, figures stay whole, and what is asked stands below."""
    line = found("large", "torch.cuda.caching_allocator_alloc", 123_456.0, "random, 8 live")
    entries = [
        Entry(
            measured=replace(line, unlike="it keeps no order"), ratio=1234.56, held=1234.56, bound=6, sense="at least"
        ),
        Entry(measured=replace(line, peer="asyncmem", broken="3 requests had to wait"), ratio=1.0),
    ]
    paper = StringIO()
    show(entries, Run(), ["large"], Console(width=80, file=paper))
    shown = paper.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    for part in (
        "123 µs",
        "1234.56",
        "1) it keeps no order",
        "met: large random, 8 live torch.cuda.caching_allocator_alloc: at least 6, is 1.23e+03",
        "not met: large random, 8 live asyncmem: 3 requests had to wait",
    ):
        assert part in words


def test_peers_without_a_card_are_a_usage_error(invoke: Invoke) -> None:
    """`--peers` on the host exits with 2 and says which device they have."""
    result = invoke("bench", "--device", "host", "--peers")
    assert result.exit_code == 2
    assert "cuda:0" in result.output


@pytest.mark.parametrize(("row", "options"), [("scale", ["--device", "simulated"]), ("streams", [])])
def test_a_row_of_the_other_kind_is_a_usage_error(invoke: Invoke, row: str, options: list[str]) -> None:
    """A row that is measured only with a device, or only without, exits with 2 and lists those that there are."""
    result = invoke("bench", row, *options)
    assert result.exit_code == 2
    assert "await_hit" in result.output


def test_a_device_that_is_not_there_says_what_is_missing(invoke: Invoke) -> None:
    """A card with a number that no machine has cannot be measured, and the text says what to do."""
    result = invoke("bench", "hit", "--device", "cuda:99")
    assert result.exit_code == 1
    assert "cuda:99" in result.output


def test_a_circular_plan_ends_with_what_it_begins_with() -> None:
    """Each step names the size that its slot has had, the first of a slot the size of its last."""
    plan = circular(iter(random_plan(200, 7, 512, 4096)))
    held: dict[int, int] = {slot: size for slot, size, _ in plan}
    start = dict(held)
    for slot, size, old in plan:
        assert held[slot] == old
        held[slot] = size
    assert held == start


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

    def way(self) -> Way:
        names = {"allocate": self.allocate, "release": self.release}
        return Way(names=names, allocate="allocate({size})", release="release({block}, {size})")


async def ran(statement: str, names: dict[str, object]) -> None:
    await unrolled(statement, names, times=3)(2)


def ways(ledger: Ledger) -> Iterator[tuple[str, dict[str, object]]]:
    """Write every kind of statement."""
    way, names = ledger.way(), dict(ledger.way().names)
    yield way.once("4096"), names
    yield way.hundred(), {**names, "sizes": [1, 2, 3]}
    for make in (pressure, *(program for name, program in PROGRAMS.items() if name != "variable_sizes")):
        yield way.obey(), {**names, "plan": make(), "live": [None] * 1000}


def test_statements_give_back_what_they_take_at_its_size() -> None:
    """Whatever a row runs through an allocator with explicit frees, each block comes back once, with its own size."""
    ledger = Ledger()
    for statement, names in ways(ledger):
        plainly(ran(statement, names))
        assert not ledger.live


def test_a_plan_that_replaces_keeps_its_sizes_over_many_turns() -> None:
    """Filled once, a circular plan runs any number of times, and everything is given back in the end."""
    ledger = Ledger()
    plan = circular(iter(random_plan(50, 7, 512, 4096)))
    held = fill(ledger.way(), plan)
    plainly(ran(ledger.way().follow(), {**ledger.way().names, "plan": plan, "live": held}))
    empty(ledger.way(), plan, held)
    assert not ledger.live


def test_pressure_stays_below_its_share_of_the_limit() -> None:
    """The program under pressure never has more live than it says, and comes close to it."""
    live, most = 0, 0
    for _, size, old in pressure():
        live += size or -old
        most = max(most, live)
    assert 0.95 * PRESSED * LIMIT < most <= PRESSED * LIMIT
    assert live == 0


def test_sides_of_different_speed_make_different_turns() -> None:
    """Each side is repeated for as long as was asked, whatever the others need; a slow one less often."""
    made = {"fast": 0, "slow": 0}

    def side(name: str, nanoseconds: int) -> Callable[[int], object]:
        async def go(turns: int) -> int:
            made[name] += 1
            return turns * nanoseconds

        return go

    effort = Effort(repeats=9, repeat_ns=1000, share=1.0)
    sides = [(side("fast", 10), 1), (side("slow", 1_000_000_000), 1)]
    fast, slow = plainly(time_apart(sides, effort))  # type: ignore[arg-type] # they answer what a loop does
    assert (fast.ns, slow.ns) == (10, 1_000_000_000)
    assert made["slow"] < made["fast"]


def test_a_measurement_outside_of_a_loop_may_not_wait() -> None:
    """What has to run without an event loop and waits all the same is an error, not a hang."""
    with pytest.raises(RuntimeError, match="has waited"):
        plainly(asyncio.sleep(0))


@pytest.mark.asyncio
async def test_a_ticker_sees_only_what_is_between() -> None:
    """Its gaps are those of the block; it ticks as often as it gets its turn, and ends with the block."""
    ticks: list[None] = []
    async with ticking(lambda: ticks.append(None)) as ticker:
        while ticker.ticks < 5:  # noqa: ASYNC110 - its turns are what is waited for
            await asyncio.sleep(0)
    seen = len(ticks)
    assert ticker.longest > 0
    await asyncio.sleep(0)
    assert len(ticks) == seen


def test_our_pools_start_from_nothing_and_leave_nothing() -> None:
    """Every row of ours opens a pool of its own, and the device has none of its memory afterwards."""
    device = Simulated()
    with Ours(device).opened() as way:
        kept = way.take()(1 << 20)
        assert device.memory().free < device.memory().total
        del kept
    assert device.memory().free == device.memory().total


def test_the_floor_is_an_object() -> None:
    """The floor beside a statement is the same statement over `object()`."""
    assert FLOOR.once("4096") == "object()"
    assert FLOOR.drop("live[slot]", "old") == "live[slot] = None"
