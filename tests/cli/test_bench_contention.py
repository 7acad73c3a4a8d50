"""`asyncmem bench contention`: every program runs beside its semaphore, and the queue is held against its bounds."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import pytest
from click.testing import Result

from asyncmem import AsyncMemoryPool, DeadlockError
from asyncmem.cli.bench import ROWS
from asyncmem.cli.bench.contention import PROGRAMS, contention, proof_seconds, used_memory
from asyncmem.cli.bench.timing import TASKS, Effort, Row, Timing, compare, worst_of

Invoke = Callable[..., Result]

A_MOMENT = Effort(repeats=2, repeat_ns=1000, share=0.01)
BOTH = (3, 40)


@pytest.mark.may_block  # threads are among the programs
def test_every_program_runs_beside_a_semaphore() -> None:
    """Each program has a part for each number of tasks, with steps a second of both sides; and the queue has three."""
    row = contention(replace(A_MOMENT, tasks=BOTH))
    for program in PROGRAMS:
        for count in [program.threads] if program.threads else BOTH:
            part = row.cases[f"{program.name}, {count}"]
            assert part.figures["tasks"] == count
            assert part.figures["steps_per_second"] == pytest.approx(1e9 / part.ours.ns, rel=0.01)
            assert part.figures["share"] == pytest.approx(part.floor.ns / part.ours.ns, rel=0.01)
            assert part.bound == (pytest.approx(1 / 0.6) if program.bounded else inf)
        assert (f"{program.name}, growth" in row.cases) == program.bounded
    queue, cancel, expire = list(row.cases)[:3]
    assert queue.startswith("queue 1,000")
    assert cancel.startswith("cancel 1,000")
    assert expire.startswith("expire 1,000")
    assert row.cases[queue].figures["bytes_by"]


def part(share: float, bound: float, /, **figures: float | str) -> Row:
    """Make one part of a row."""
    return compare(bound, Timing(ns=1e6 / share, median_ns=1e6), Timing(ns=1e6, median_ns=1e6), **figures)


def a_row(share: float = 0.8) -> Row:
    """Make a row of a program, one that has no bound, and one of the queue."""
    program = {"steps_per_second": 800, "floor_steps_per_second": 1000, "share": share, "proofs_share": 0.001}
    return worst_of({
        "queue 9 requests": part(2, 1, bytes_each=900, bytes_allowed=1024, bytes_by="resident set"),
        "leases, 20": part(share, 1 / 0.6, program="leases", tasks=20, least_share=0.6, **program),
        "trio, 20": part(0.1, inf, program="trio", tasks=20, least_share=0, **program),
    })  # fmt: skip


def test_it_is_measured_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """Without rows all others are measured; with its name it is, with the tasks that were asked for."""
    told: list[Sequence[int]] = []

    def measure(effort: Effort) -> Row:
        told.append(effort.tasks)
        return a_row()

    for name in ROWS:
        monkeypatch.setitem(ROWS, name, lambda _: part(1, 2))
    monkeypatch.setitem(ROWS, "contention", measure)
    assert "contention" not in json.loads(invoke("bench", "--json").stdout)["rows"]
    assert told == []
    assert invoke("bench", "contention", "--tasks", "20,200").exit_code == 0
    assert invoke("bench", "hit", "contention").exit_code == 0
    assert told == [(20, 200), TASKS]
    assert invoke("bench", "contention", "--tasks", "many").exit_code == 2
    assert invoke("bench", "contention", "--tasks", "0").exit_code == 2


def test_a_person_sees_steps_and_bounds(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """The tables have steps a second of both sides, the share and its bound, and the bytes of a request."""
    monkeypatch.setitem(ROWS, "contention", lambda _: a_row())
    shown = invoke("bench", "contention").stdout
    for word in ("leases", "800", "1,000", "0.80", "0.6", "0.10%", "900 of 1024", "resident set"):
        assert word in shown
    assert "not met" not in shown


def test_what_has_no_bound_is_only_told(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    """JSON has null for it, and `--check` looks at the others."""
    monkeypatch.setitem(ROWS, "contention", lambda _: a_row())
    shown = invoke("bench", "contention", "--json", "--check")
    assert shown.exit_code == 0
    cases = json.loads(shown.stdout)["rows"]["contention"]["cases"]
    assert cases["trio, 20"]["bound"] is None
    assert cases["leases, 20"]["bound"] == pytest.approx(1 / 0.6)
    monkeypatch.setitem(ROWS, "contention", lambda _: a_row(0.5))
    missed = invoke("bench", "contention", "--check")
    assert missed.exit_code == 1
    assert "not met" in missed.stdout
    monkeypatch.setitem(ROWS, "contention", lambda _: replace(a_row(), broken="too long"))
    assert invoke("bench", "contention", "--check").exit_code == 1


def test_looks_for_deadlocks_are_timed() -> None:
    """Each look that the loop makes is noted, also the one that finds something."""
    before = time.perf_counter()

    async def main() -> None:
        async with AsyncMemoryPool("host", limit="1 MiB") as pool:

            async def nest() -> None:
                async with pool.allocate_async("512 KiB"):
                    await asyncio.sleep(0)
                    async with pool.allocate_async("512 KiB"):
                        pass

            found = await asyncio.gather(nest(), nest(), return_exceptions=True)
            assert [type(one) for one in found if one is not None] == [DeadlockError]

    with proof_seconds() as spent:
        asyncio.run(main())
    assert spent
    assert all(seconds > 0 for seconds in spent)
    assert sum(spent) < time.perf_counter() - before


def test_the_memory_of_the_process_is_read() -> None:
    """What has been written to counts."""
    before = used_memory()
    block = bytearray(b"x" * (64 << 20))
    assert used_memory() - before > 32 << 20
    del block
