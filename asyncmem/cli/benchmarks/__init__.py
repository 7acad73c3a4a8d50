"""The benchmarks of `asyncmem bench`, each against a floor measured in the same process.

A benchmark is a function that returns a `Row`; its docstring says what is compared with what.
"""

from collections.abc import Callable, Coroutine
from typing import Final, TypeAlias

from asyncmem.cli.benchmarks.allocations import await_hit, batch, buckets, churn, hit, large, scale
from asyncmem.cli.benchmarks.contention import contention
from asyncmem.cli.benchmarks.event_loop import handover, stall
from asyncmem.cli.benchmarks.pipeline import pipeline
from asyncmem.cli.benchmarks.timing import Effort, Row

Benchmark: TypeAlias = Callable[[Effort], Row]


def _on_loop(measure: Callable[[Effort], Coroutine[object, object, Row]]) -> Benchmark:
    return lambda effort: effort.run(measure(effort))


ROWS: Final[dict[str, Benchmark]] = {
    "hit": _on_loop(hit),
    "await_hit": _on_loop(await_hit),
    "churn": _on_loop(churn),
    "batch": _on_loop(batch),
    "large": _on_loop(large),
    "buckets": _on_loop(buckets),
    "handover": handover,
    "stall": stall,
    "pipeline": _on_loop(pipeline),
    "scale": _on_loop(scale),
    "contention": contention,
}
"""Each row's name and its benchmark. `scale` comes late because it leaves the process's own heap large."""

LONG: Final = "contention"
"""The row that is measured only if it is named, because it takes minutes."""
