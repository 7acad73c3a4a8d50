"""The benchmarks behind `asyncmem bench`, one file a question, each against a floor measured in the same process.

Every file has `QUESTION`, `BOUND` (the most its ratio may be) and `measure(effort)`, which answers a `Row`.
"""

from collections.abc import Callable, Sequence
from typing import Final

from asyncmem.cli.benchmarks import (
    await_hit,
    batch,
    buckets,
    churn,
    contention,
    handover,
    hit,
    large,
    pipeline,
    scale,
    stall,
)
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.result import Row

ROWS: Final[dict[str, Callable[[Effort], Row]]] = {
    "hit": hit.measure,
    "await_hit": await_hit.measure,
    "churn": churn.measure,
    "batch": batch.measure,
    "large": large.measure,
    "buckets": buckets.measure,
    "handover": handover.measure,
    "stall": stall.measure,
    "pipeline": pipeline.measure,
    "scale": scale.measure,
}
"""Each row's name and what measures it. `scale` comes last because it leaves the process's own heap large."""

LONG_ROWS: Final[dict[str, Callable[[Effort, Sequence[int]], Row]]] = {"contention": contention.measure}
"""Rows that are measured only where they are named, as they take minutes; with how many tasks, they are told."""
