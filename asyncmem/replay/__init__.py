"""Recordings of what programs allocate: read from files of several kinds, checked, and replayed."""

from asyncmem.replay.columns import Op
from asyncmem.replay.costs import Costs, read_costs
from asyncmem.replay.fit import fit
from asyncmem.replay.model import Model
from asyncmem.replay.policy import Patience, Policy
from asyncmem.replay.reading import read
from asyncmem.replay.result import Replay
from asyncmem.replay.run import replay
from asyncmem.replay.snapshot import from_snapshot
from asyncmem.replay.trace import Steps, Trace

__all__ = [
    "Costs",
    "Model",
    "Op",
    "Patience",
    "Policy",
    "Replay",
    "Steps",
    "Trace",
    "fit",
    "from_snapshot",
    "read",
    "read_costs",
    "replay",
]
