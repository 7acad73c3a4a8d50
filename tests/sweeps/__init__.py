"""Sweeps: a scenario is run one step at a time, and again for every actor, every step and every way to cancel."""

from tests.sweeps.stage import Astray, Failure, Kind, Scenario, Stage, Strike, SweepFailed
from tests.sweeps.sweep import SweepReport, replay, sweep
from tests.sweeps.tsweep import sweep_on_trio

__all__ = [
    "Astray",
    "Failure",
    "Kind",
    "Scenario",
    "Stage",
    "Strike",
    "SweepFailed",
    "SweepReport",
    "replay",
    "sweep",
    "sweep_on_trio",
]
