"""What does a step cost where more tasks want memory than there is, and do a hundred thousand requests stay cheap?

Every task takes memory, sleeps for half a millisecond or not at all, and gives it back. Beside it the same tasks share
an `asyncio.Semaphore` that lets sixteen of them through: what waiting in a queue costs at least, in the same process.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final

from asyncmem.cli.benchmarks.contention.programs import PROGRAMS, Program, measure_program
from asyncmem.cli.benchmarks.contention.queueing import measure_queue
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.result import Row, Timing, compare, worst_of
from asyncmem.cli.machine import installed_version

TASKS: Final = (20, 200, 1_000, 5_000, 20_000)
SHARE: Final = 0.6
"""The least share of a semaphore's steps a second, on asyncio."""
BOUND: Final = 1 / SHARE
GROWTH: Final = 1.5
"""How much a step may grow from the fewest tasks to the most."""
PROOFS: Final = 0.01
"""The most of the time that may be spent on looking for deadlocks."""
QUESTION: Final = "a step of tasks that want more memory than there is, against an asyncio.Semaphore(16)"


def measure(effort: Effort, tasks: Sequence[int] = TASKS) -> Row:
    """Time the queue first, in a process as small as it is, then every program with every number of tasks."""
    cases = measure_queue(effort)
    for program in PROGRAMS:
        if program.needs is not None and installed_version(program.needs) is None:
            continue
        counts = [program.threads] if program.threads else tasks
        parts = {f"{program.name}, {count:,}": _measure(program, count, effort) for count in counts}
        cases |= parts
        if program.bounded and len(parts) > 1:
            cases[f"{program.name}, growth"] = _growth(*list(parts.values())[:: len(parts) - 1])
    return worst_of(QUESTION, cases)


def _measure(program: Program, count: int, effort: Effort) -> Row:
    ours, floor, proofs = measure_program(program, count, effort)
    row = compare(QUESTION, BOUND if program.bounded else inf, ours, floor)
    figures: dict[str, float | int | str] = {
        "program": program.name,
        "tasks": count,
        "steps_per_second": round(1e9 / row.ns),
        "floor_steps_per_second": round(1e9 / row.floor_ns),
        "share": round(row.floor_ns / row.ns, 3),
        "least_share": SHARE if program.bounded else 0,
        "proofs_share": round(proofs, 5),
    }
    broken = f"{proofs:.1%} of the time went into looking for deadlocks" if proofs > PROOFS else ""
    return replace(row, figures=figures, broken=broken)


def _growth(few: Row, many: Row) -> Row:
    sides = [Timing(ns=one.ns, median_ns=one.ns_median) for one in (many, few)]
    return compare("a step with the most tasks, against one with the fewest", GROWTH, *sides)
