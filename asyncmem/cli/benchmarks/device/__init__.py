"""The rows of `asyncmem bench --device`: asyncmem's pool on a device, and with `--peers` others at the same work.

Every row is a file (the last five share one) with its `QUESTION` and `measure`, which answers one `Measured` a peer and
case. `FAMILIES` names who takes part, where that is not everybody.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from asyncmem.cli.benchmarks.device import (
    await_hit,
    batch,
    churn,
    cross_stream,
    growth,
    hit,
    large,
    loop_stall,
    replay,
    seeds,
    streams,
    take_back,
)
from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.device.where import Where
from asyncmem.cli.benchmarks.measure import Effort
from asyncmem.cli.benchmarks.peers.family import FAMILIES, TOGETHER
from asyncmem.cli.benchmarks.peers.peer import Peer

Measure: TypeAlias = Callable[[Peer, Effort, Where], Iterator[Measured]]

EVERYBODY: Final = tuple(one.name for one in FAMILIES if one.name != TOGETHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One question that is asked of several allocators."""

    question: str
    measure: Measure
    """Takes the peer, how long to measure, and where."""
    families: tuple[str, ...] = EVERYBODY
    """Who takes part."""
    early: bool = False
    """Whether it comes first in its process, before anything has been reserved there."""
    recorded: bool = False
    """Whether it replays recordings, and is measured only where some are named."""


def _plain(measure: Callable[[Peer, Effort], Iterator[Measured]]) -> Measure:
    def anywhere(peer: Peer, effort: Effort, where: Where) -> Iterator[Measured]:
        _ = where
        return measure(peer, effort)

    return anywhere


DEVICE_ROWS: Final[dict[str, DeviceRow]] = {
    "hit": DeviceRow(question=hit.QUESTION, measure=_plain(hit.measure)),
    "await_hit": DeviceRow(question=await_hit.QUESTION, measure=_plain(await_hit.measure), families=await_hit.FAMILIES),
    "churn": DeviceRow(question=churn.QUESTION, measure=_plain(churn.measure)),
    "batch": DeviceRow(question=batch.QUESTION, measure=_plain(batch.measure)),
    "large": DeviceRow(question=large.QUESTION, measure=_plain(large.measure)),
    "cross_stream": DeviceRow(question=cross_stream.QUESTION, measure=_plain(cross_stream.measure)),
    "streams": DeviceRow(question=streams.QUESTION, measure=_plain(streams.measure), families=streams.FAMILIES),
    "growth": DeviceRow(question=growth.QUESTION, measure=_plain(growth.measure), early=True),
    "loop_stall": DeviceRow(question=loop_stall.QUESTION, measure=loop_stall.measure, early=True),
    "take_back": DeviceRow(question=take_back.QUESTION, measure=_plain(take_back.measure), families=take_back.FAMILIES),
    "replay": DeviceRow(question=replay.QUESTION, measure=replay.measure, recorded=True),
    **{
        name: DeviceRow(question=question, measure=_plain(seeds.measurer(name)), families=seeds.FAMILIES)
        for name, question in seeds.QUESTIONS.items()
    },
}
"""Each row's name and how it is measured, in the order in which they are shown."""
