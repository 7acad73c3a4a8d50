"""`python -m benchmarks --device`: every row measures, families are skipped by name, figures are held to bounds."""

import asyncio
import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from asyncmem.cli.bench.timing import Effort, Side, random_plan, time_sides
from asyncmem.devices import Simulated
from asyncmem.replay import Trace
from benchmarks import growth
from benchmarks.__main__ import main
from benchmarks.allocators import FLOOR, OURS, AsyncmemPool
from benchmarks.alone import DRIVER, POOL, SUITE
from benchmarks.growth import ticking
from benchmarks.report import show
from benchmarks.rows import circular, plainly, plan_of
from benchmarks.suite import Failed, Family, Measured, Run, Task, absent, collect, measure, run

RECORDED = Path(__file__).parents[1] / "traces" / "four_streams.npz"


def a_moment(*rows: str, device: str = "simulated") -> Task:
    """Ask for as little as can be measured."""
    traces = (str(RECORDED),)
    return Task(suite=SUITE.module, family=OURS, device=device, rows=rows, effort=Effort(2, 1000, 0.01), traces=traces)


def invoke(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(main, list(arguments))


def found(row: str, peer: str, ns: float, case: str = "", **figures: float) -> Measured:
    return Measured(row=row, case=case, peer=peer, min=ns, median=ns, figures=figures)


@pytest.mark.may_block  # what a synchronous call costs on a loop's thread is what some rows measure
@pytest.mark.parametrize("name", SUITE.rows)
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
        list(SUITE.rows[row].measure(AsyncmemPool(device), replace(a_moment(row), effort=Effort(2, 1000, 1.0))))
    assert device.memory().free == device.memory().total


@pytest.mark.may_block
def test_a_row_that_fails_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one row of one peer raises is noted by its name, and the next row is measured."""

    def fail(_: AsyncmemPool) -> None:
        raise RuntimeError("no streams today")

    monkeypatch.setattr(AsyncmemPool, "crossing", fail)
    failed, line = measure(a_moment("cross_stream", "await_hit"))
    assert failed == Failed(family=OURS, peer="asyncmem", row="cross_stream", error="RuntimeError: no streams today")
    assert isinstance(line, Measured)
    assert line.row == "await_hit"


def test_a_module_of_a_package_that_is_absent_is_absent() -> None:
    """Looking for `package.module` does not fail where there is no such package."""
    assert absent(Family(name="x", peers=(), module="nobody_has_this.core", install="pip install x"))


def test_a_run_measures_each_family_in_a_process_and_skips_absent_ones() -> None:
    """The child's figures come back; a family without its library is listed and not started."""
    gone = Family(name="gone", peers=(), module="nobody_has_this", install="pip install gone")
    started: list[str] = []
    result = run(a_moment("hit"), [POOL, gone], started.append)
    assert started == [OURS]
    assert [(line.row, line.peer) for line in result.measured] == [("hit", "asyncmem")]
    assert [one.family for one in result.absent] == ["gone"]
    assert not result.failed


def test_a_process_that_ends_early_is_a_failure_by_name() -> None:
    """A child that cannot open the device tells so, and the run goes on."""
    result = run(a_moment("hit", device="simulated:x"), [POOL], lambda _: None)
    (failed,) = result.failed
    assert failed.peer == OURS
    assert "simulated:x" in failed.error


def test_a_figure_survives_the_way_from_the_child() -> None:
    """What a child writes as a line is what the run reads."""
    line = found("hit", "torch raw", 500.0, live=3)
    result = Run()
    collect(json.dumps({"measured": asdict(line)}), result)
    assert result.measured == [line]


def test_a_recording_is_replayed_to_its_end() -> None:
    """Slots are filled and emptied in turn, nothing is asked for 0 bytes, and what the program kept is freed last."""
    op, number, nbytes = [0, 0, 0, 1, 1, 0], [0, 1, 2, 1, 0, 3], [512, 0, 700, 0, 512, 9]
    trace = Trace(*map(np.array, (op, [0] * 6, number, nbytes, range(6))))
    assert plan_of(trace) == [(0, 512, 0), (2, 700, 0), (0, 0, 512), (3, 9, 0), (2, 0, 700), (3, 0, 9)]


def test_programs_are_replayed_only_where_they_are_named() -> None:
    """Without a recording the row is a usage error; with one, it says what was reserved, over pages as well."""
    refused = invoke("replay", "--device", "simulated")
    assert refused.exit_code == 2
    assert "--trace" in refused.output
    result = invoke("replay", "--device", "simulated", "--trace", str(RECORDED), "--quick", "--json")
    assert result.exit_code == 0, result.output
    plain, paged = json.loads(result.stdout)["figures"]
    assert (plain["case"], paged["case"]) == ("four_streams", "four_streams, paged")
    for line in (plain, paged):
        assert line["figures"]["reserved_over_requested"] >= 1


@pytest.mark.may_block
def test_json_lists_objects() -> None:
    """`--json` prints a list of figures with their bounds, and nothing else on standard output."""
    result = invoke("hit", "batch", "--device", "simulated", "--quick", "--json")
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
def test_a_person_gets_a_table_with_the_versions() -> None:
    """Without `--json` there is a table, and below it the versions of what took part."""
    result = invoke("hit", "--device", "simulated", "--quick")
    assert result.exit_code == 0, result.output
    assert "to ours" in result.stdout
    assert "numpy" in result.stdout


def test_a_narrow_terminal_cuts_nothing() -> None:
    """At 80 columns names go on in the next line, figures stay whole, and what is asked stands below."""
    line = found("large", "torch.cuda.caching_allocator_alloc", 123_456.0, "random, 8 live")
    lines = [
        replace(line, unlike="it keeps no order", ratio=1234.56, held=1234.56, bound=6, sense="at least"),
        replace(line, peer="asyncmem", broken="3 requests had to wait", ratio=1.0),
    ]
    paper = StringIO()
    show(lines, Run(), ["large"], Console(width=80, file=paper, force_terminal=True, color_system=None))
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


def test_a_row_of_the_peers_is_a_usage_error_without_them() -> None:
    """It exits with 2 and lists the rows that there are."""
    result = invoke("streams", "--device", "simulated")
    assert result.exit_code == 2
    assert "there is no row 'streams' on simulated without --peers" in result.output
    assert "await_hit" in result.output


def test_a_device_that_is_not_there_says_what_is_missing() -> None:
    """A card with a number that no machine has cannot be measured, and the text says what to do."""
    result = invoke("hit", "--device", "cuda:99")
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


def test_sides_of_different_speed_make_different_turns() -> None:
    """Each side is repeated for as long as was asked, whatever the others need; a slow one less often."""
    made = {"fast": 0, "slow": 0}

    def side(name: str, nanoseconds: int) -> Side:
        async def go(turns: int) -> int:
            made[name] += 1
            return turns * nanoseconds

        return Side(go, 1)

    effort = Effort(repeats=9, repeat_ns=1000, share=1.0)
    fast, slow = plainly(time_sides([side("fast", 10), side("slow", 1_000_000_000)], effort))
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
    with AsyncmemPool(device).opened() as way:
        kept = way.take()(1 << 20)
        assert device.memory().free < device.memory().total
        del kept
    assert device.memory().free == device.memory().total


def test_the_floor_is_an_object() -> None:
    """The floor beside a statement is the same statement over `object()`."""
    assert FLOOR.once("4096") == "object()"
    assert FLOOR.drop("live[slot]", "old") == "live[slot] = None"


def test_a_broken_promise_is_not_met_without_a_bound() -> None:
    """A figure that says what did not hold is not met, asked for or not."""
    line = Measured(row="take_back", peer="asyncmem", min=1.0, median=1.0, broken="nothing was taken back")
    (one,) = SUITE.judge([line])
    assert one.ok is False
    assert one.as_json()["broken"] == "nothing was taken back"


def test_peers_without_a_card_are_a_usage_error() -> None:
    """`--peers` on the host exits with 2 and says which device they have."""
    result = invoke("--device", "host", "--peers")
    assert result.exit_code == 2
    assert "cuda:0" in result.output


def test_a_card_is_measured_beside_its_driver() -> None:
    """On CUDA the driver's own allocator does the same work; other devices have none."""
    assert SUITE.chosen("cuda:0", SUITE.rows) == [POOL, DRIVER]
    assert SUITE.chosen("cuda:0", ["await_hit"]) == [POOL]
    assert SUITE.chosen("simulated", SUITE.rows) == [POOL]
