"""Helpers to test code that waits for memory: one step at a time, in every order, with a cancellation at any step.

`run_steps` and `StepLoop` drive asyncio code deterministically, `sweep` strikes a scenario at every step, and
`conservation` says what has to hold afterwards. The same scenarios play on trio by `asyncmem.testing.tsweep`, which
is imported only by those who have trio.
"""

from asyncmem.testing.stage import Astray, Failure, Kind, Scenario, Stage, Strike, Stuck, SweepFailed
from asyncmem.testing.steploop import StepLoop, run_steps
from asyncmem.testing.sweep import SweepReport, replay, sweep

__all__ = [
    "Astray",
    "Failure",
    "Kind",
    "Scenario",
    "Stage",
    "StepLoop",
    "Strike",
    "Stuck",
    "SweepFailed",
    "SweepReport",
    "replay",
    "run_steps",
    "sweep",
]
