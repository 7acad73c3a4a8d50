"""`asyncmem demo`: memory runs out, and the pipeline waits and finishes."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from click.testing import Result

from asyncmem.cli.demo import as_table, shortcomings
from asyncmem.cli.demo_pipeline import OVERSUBSCRIPTION, Demonstration, Ticker
from asyncmem.devices import Simulated
from asyncmem.errors import InvalidRequest
from asyncmem.stats import PoolStats

Invoke = Callable[..., Result]


@pytest.mark.parametrize("device", ["host", "simulated"])
def test_the_report_shows_that_it_waited_within_its_limit(invoke: Invoke, device: str) -> None:
    """Under a demand of several limits, requests wait, the peak stays within the limit, and all results are right."""
    result = invoke("demo", "--device", device, "--seconds", "0.3", "--limit", "8 MiB", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["device"].startswith(device)
    assert report["demand"] > 4 * report["limit"]
    assert report["waits"] > 0
    assert 0 < report["peak"] <= report["limit"] == 8 << 20
    assert report["items"] > 0
    assert report["items_per_s"] > 0
    assert report["longest_stall_us"] > 0
    assert report["wrong"] == 0
    assert report["shortcomings"] == []


def test_without_a_terminal_it_prints_lines(invoke: Invoke) -> None:
    """Into a pipe goes a plain line about the start, one a second, and the report."""
    result = invoke("demo", "--seconds", "1.3", "--limit", "8 MiB")
    assert result.exit_code == 0, result.output
    assert "waits" in result.stdout
    assert "pressure" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--limit", "64M"], "--limit"),
        (["--limit", "-5"], "--limit"),
        (["--limit", "4 KiB"], "at least"),
        (["--seconds", "0"], "--seconds"),
        (["--device", "graphics"], "device"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_named(invoke: Invoke, arguments: list[str], word: str) -> None:
    """A value that cannot be right exits with 2 and names what was wrong."""
    result = invoke("demo", *arguments)
    assert result.exit_code == 2
    assert word in result.output


def test_a_device_that_is_not_here_says_what_to_use(invoke: Invoke) -> None:
    """Asking for a GPU that this version cannot use exits with 1 and names the devices that work."""
    result = invoke("demo", "--device", "cuda:0")
    assert result.exit_code == 1
    assert "'host'" in result.output


@pytest.mark.parametrize("mib", [2, 8, 32, 100, 1024, 4096])
def test_it_always_wants_several_times_its_limit(mib: int) -> None:
    """Whatever the limit, the items in flight want about five times of it, and each stage has room for some."""
    one = Demonstration(Simulated(), mib << 20, 1.0)
    assert one.demand / one.limit == pytest.approx(OVERSUBSCRIPTION, rel=0.1)
    assert one.limit * 7 // 16 >= 4 * one.item_bytes
    assert one.item_bytes % 4096 == 0


def test_a_limit_without_room_is_refused() -> None:
    """A limit below what a pipeline needs is refused by name."""
    with pytest.raises(InvalidRequest, match="limit"):
        Demonstration(Simulated(), 1 << 20, 1.0)


def ran(stats: PoolStats, *, items: int = 10, wrong: int = 0) -> Demonstration:
    """Make a run of one second that has these figures."""
    one = Demonstration(Simulated(), 8 << 20, 1.0)
    one.stats, one.elapsed, one.items, one.wrong = stats, 1.0, items, wrong
    return one


GOOD = PoolStats(waits=5, peak_reserved=8 << 20)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (ran(GOOD), []),
        (ran(replace(GOOD, waits=0)), ["no request ever waited"]),
        (ran(replace(GOOD, peak_reserved=9 << 20)), ["reserved 9 MiB under a limit of 8 MiB"]),
        (ran(GOOD, wrong=2), ["2 of 10 results differ"]),
        (ran(GOOD, items=0), ["no item was finished"]),
        (ran(replace(GOOD, allocated_bytes=512)), ["512 B were still held"]),
    ],
    ids=["all well", "no waits", "over the limit", "wrong results", "nothing done", "something kept"],
)
def test_what_a_run_failed_to_show_is_said_in_words(run: Demonstration, words: list[str]) -> None:
    """Each promise of the demonstration that did not hold is one sentence; a good run has none."""
    found = list(shortcomings(run))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
    assert as_table(run).row_count > 0


def spin(seconds: float) -> None:
    """Keep this thread busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def tick_through(work: Callable[[Ticker], None]) -> float:
    """Return the longest stall that a ticker saw while the loop was held by `work`."""
    async with Ticker() as ticker:
        work(ticker)
    return ticker.longest


def test_the_ticker_sees_a_loop_that_is_held() -> None:
    """A callback that keeps the loop for 200 ms shows as a stall of nearly that."""
    stalls = (asyncio.run(tick_through(lambda _: spin(0.2))) for _ in range(20))
    assert any(stall > 0.1 for stall in stalls)  # a busy machine holds up the ticker's thread in some of them


def test_what_the_ticker_excuses_is_left_out() -> None:
    """The demonstration's own drawing does not count as a stall."""

    def draw(ticker: Ticker) -> None:
        with ticker.excused():
            spin(0.3)

    stalls = (asyncio.run(tick_through(draw)) for _ in range(20))
    assert any(stall < 0.15 for stall in stalls)  # a busy machine stalls some of them
