"""Recordings of what programs allocate: read from files of several kinds, checked, and replayed."""

from asyncmem.readers import Patience
from asyncmem.replay.advise import Advice, Suggestion, advise
from asyncmem.replay.columns import Op
from asyncmem.replay.journal import Difference, Journal
from asyncmem.replay.live import LiveReplay, replay_on
from asyncmem.replay.model import Costs, Model, Policy, measure_costs, pool_options, read_costs
from asyncmem.replay.reading import from_snapshot, read
from asyncmem.replay.run import Replay, fit, replay
from asyncmem.replay.trace import Recorder, Steps, Trace, record

__all__ = [
    "Advice",
    "Costs",
    "Difference",
    "Journal",
    "LiveReplay",
    "Model",
    "Op",
    "Patience",
    "Policy",
    "Recorder",
    "Replay",
    "Steps",
    "Suggestion",
    "Trace",
    "advise",
    "fit",
    "from_snapshot",
    "measure_costs",
    "pool_options",
    "read",
    "read_costs",
    "record",
    "replay",
    "replay_on",
]
