"""The rows without other libraries: asyncmem's pool beside the driver's own stream-ordered allocator.

A row is a function that yields one `Measured` for each case of an allocator; its docstring says what is measured.
"""

from typing import Final

from benchmarks.allocators import OURS, AsyncmemPool
from benchmarks.driver import MemAllocAsync
from benchmarks.growth import growth, loop_stall
from benchmarks.rows import await_hit, batch, churn, cross_stream, hit, large, replay
from benchmarks.suite import MOST, Bound, DeviceRow, Family, Suite

POOL: Final = Family(name=OURS, peers=(AsyncmemPool,), beside=False)
DRIVER: Final = Family(name="driver", peers=(MemAllocAsync,), module="cuda.bindings", install="pip install cuda-python")

SUITE: Final = Suite(
    module=__name__,
    rows={
        "hit": DeviceRow(measure=hit),
        "await_hit": DeviceRow(measure=await_hit, families=(OURS,)),
        "churn": DeviceRow(measure=churn),
        "batch": DeviceRow(measure=batch),
        "large": DeviceRow(measure=large),
        "cross_stream": DeviceRow(measure=cross_stream),
        "growth": DeviceRow(measure=growth, early=True),
        "loop_stall": DeviceRow(measure=loop_stall, early=True),
        "replay": DeviceRow(measure=replay, recorded=True),
    },
    families=(POOL, DRIVER),
    bounds=(
        # A large block may cost as much as a small one; what is above one is for the noise.
        Bound(row="large", peer=OURS, bound=1.1, sense=MOST, held="to_other"),
        Bound(row="cross_stream", peer="cuMemAllocAsync", bound=3),
        Bound(row="loop_stall", peer=OURS, bound=150_000, sense=MOST, held="more_ns"),
    ),
)
"""Measured without `--peers`; the comparison with other libraries has this in it."""
