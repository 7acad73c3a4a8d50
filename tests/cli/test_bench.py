"""`asyncmem bench`: every row measures, and the method is what it says."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from asyncmem.cli.bench import LONG, ROWS
from asyncmem.cli.bench.allocations import nodes_touched
from asyncmem.cli.bench.timing import (
    Effort,
    Row,
    Side,
    Timing,
    compare,
    percentile,
    random_plan,
    time_sides,
    unrolled,
    worst_of,
)

Invoke = Callable[..., Result]

A_MOMENT = Effort(repeats=2, repeat_ns=1000, share=0.01)


@pytest.mark.may_block  # what a synchronous call costs on a loop's thread is what some rows measure
@pytest.mark.parametrize("name", [name for name in ROWS if name != LONG])
def test_every_row_measures_both_sides(name: str) -> None:
    """A row has positive times for itself and its floor, in minimum and median, and a bound."""
    row = ROWS[name](A_MOMENT)
    for side in (row.ours, row.floor):
        assert 0 < side.ns <= side.median_ns
    assert row.ratio > 0
    assert row.bound > 0
    assert not row.broken


@pytest.mark.may_block
def test_json_has_a_schema(invoke: Invoke) -> None:
    """`--json` prints the rows that were named and the machine, and nothing else."""
    result = invoke("bench", "hit", "await_hit", "--quick", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["rows"]) == ["hit", "await_hit"]
    for row in found["rows"].values():
        assert {"ns", "floor_ns", "ratio", "ns_median", "floor_median_ns", "bound", "met"} <= set(row)
        assert row["ratio"] == pytest.approx(row["ns"] / row["floor_ns"], rel=0.01)
    assert found["machine"]["python"]
    assert found["method"] == {"quick": True, "loop": "asyncio"}


@pytest.mark.may_block
def test_a_person_gets_a_table(invoke: Invoke) -> None:
    """Without `--json` there is a table with the bound and whether it is met."""
    result = invoke("bench", "hit", "--quick")
    assert result.exit_code == 0, result.output
    assert "hit" in result.stdout
    assert "met" in result.stdout


def test_a_narrow_terminal_cuts_nothing(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """At 80 columns the longest label goes on in the next line, and figures stay whole."""
    long = Timing(ns=123_456.0, median_ns=123_456.0)
    slow = replace(row(1.0, 2.0), ours=long, floor=long)
    label = "10,000 that wait in a queue"
    monkeypatch.setitem(ROWS, "handover", lambda _: replace(slow, cases={label: replace(slow, bound=0.5)}))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal,
    monkeypatch.setenv("TERM", "dumb")  # of one colour
    shown = invoke("bench", "handover", "--quick").stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("123 µs") == 4
    assert "not met" in shown


def test_an_unknown_row_is_a_usage_error(invoke: Invoke) -> None:
    """A row that does not exist exits with 2 and lists those that do."""
    result = invoke("bench", "hitt")
    assert result.exit_code == 2
    assert "there is no row 'hitt' without --device; there are: hit, await_hit" in result.output


@pytest.mark.parametrize(("row", "options"), [("scale", ["--device", "simulated"]), ("streams", [])])
def test_a_row_of_the_other_kind_is_a_usage_error(invoke: Invoke, row: str, options: list[str]) -> None:
    """A row that is measured only with a device, or only without, exits with 2 and lists those that there are."""
    result = invoke("bench", row, *options)
    assert result.exit_code == 2
    assert "await_hit" in result.output


@pytest.mark.may_block
def test_a_device_is_handed_over_to_the_comparison(invoke: Invoke) -> None:
    """In a checkout; it has the options and the exit codes of `python -m benchmarks`."""
    result = invoke("bench", "hit", "--device", "simulated", "--quick", "--json")
    assert result.exit_code == 0, result.output
    assert [line["peer"] for line in json.loads(result.stdout)["figures"]] == ["asyncmem"]
    assert invoke("bench", "--device", "host", "--peers").exit_code == 2
    missing = invoke("bench", "hit", "--device", "cuda:99")
    assert missing.exit_code == 1
    assert "cuda:99" in missing.output


@pytest.mark.parametrize("options", [["--device", "cuda:0"], ["--peers"]])
def test_outside_of_a_checkout_it_says_where_the_comparison_is(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    """In one line, with 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not Path(path, "benchmarks").is_dir() and path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    result = invoke("bench", *options)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert "benchmarks/" in result.output


def row(ratio: float, bound: float, broken: str = "") -> Row:
    """Make a row with this ratio."""
    made = compare(bound, Timing(ns=ratio, median_ns=ratio), Timing(ns=1.0, median_ns=1.0))
    return replace(made, broken=broken)


def test_check_turns_a_missed_bound_into_an_exit_code(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--check` a row above its bound exits with 1; without, the table says so and that is all."""
    monkeypatch.setitem(ROWS, "hit", lambda _: row(2.0, 1.6))
    assert invoke("bench", "hit").exit_code == 0
    missed = invoke("bench", "hit", "--check")
    assert missed.exit_code == 1
    assert "not met" in missed.stdout


def test_a_broken_promise_is_not_met_whatever_the_ratio() -> None:
    """A row can promise more than its ratio, and says in words what did not hold."""
    assert row(1.0, 2.0).met
    assert not row(1.0, 2.0, broken="3 driver calls on the loop's thread").met


def test_a_row_of_parts_is_as_good_as_its_worst() -> None:
    """The part nearest to its bound, or furthest above, speaks for all."""
    whole = worst_of({"few": row(1.0, 1.3), "many": row(1.4, 1.3)})
    assert whole.ratio == 1.4
    assert not whole.met
    assert set(whole.cases) == {"few", "many"}


def test_the_ratio_is_between_the_fastest() -> None:
    """Medians are shown and not compared."""
    made = compare(2.0, Timing(ns=30, median_ns=90), Timing(ns=20, median_ns=25))
    assert made.ratio == 1.5


def test_statements_are_unrolled_and_counted() -> None:
    """A turn of the loop runs the statement as often as it is unrolled, and the time is per statement."""
    ran: list[int] = []
    side = unrolled("ran.append(1)", {"ran": ran}, times=7)

    async def main() -> int:
        return await side.run(3)

    assert side.operations == 7
    assert asyncio.run(main()) > 0
    assert len(ran) == 21


def test_sides_take_turns() -> None:
    """Repeats of the sides alternate, forwards and backwards, after a calibration of all of them."""
    order: list[str] = []

    def side(name: str, nanoseconds: int) -> Side:
        async def run(turns: int) -> int:
            order.append(name)
            return turns * nanoseconds

        return Side(run, 10)

    effort = Effort(repeats=2, repeat_ns=1, share=1.0)
    ours, floor = asyncio.run(time_sides([side("ours", 100), side("floor", 50)], effort))
    assert (ours.ns, floor.ns) == (10.0, 5.0)
    assert order == ["ours", "floor", "floor", "ours", "ours", "floor"]


def test_a_plan_is_the_same_in_every_run() -> None:
    """Random sizes come from a fixed seed and stay within their bounds."""
    plan = random_plan(1000, 10, 512, 4096)
    assert plan == random_plan(1000, 10, 512, 4096)
    assert all(0 <= slot < 10 and 512 <= size <= 4096 for slot, size in plan)


def test_placement_looks_at_a_bounded_number_of_nodes() -> None:
    """With fifty times as many live blocks, no placement looks at more nodes than the bound."""
    assert nodes_touched(20_000) <= 64


def test_a_percentile_is_a_sample() -> None:
    """The 99th percentile of a hundred is the second largest."""
    assert percentile(list(range(100)), 0.99) == 98
    assert percentile([5], 0.99) == 5
