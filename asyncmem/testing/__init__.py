"""Helpers to test code that waits for memory: one step at a time, in any order, under virtual time.

`run_steps` and `StepLoop` drive asyncio code deterministically, and a `SteppedPool` works in steps of that loop.
`device_contract` tests devices; it needs pytest.
"""

import numpy  # noqa: F401, ICN001  # else the first pool is opened by a thread, which is no step of a loop

from asyncmem.testing.steploop import StepLoop, Stuck, run_steps
from asyncmem.testing.stepworker import SteppedPool

__all__ = ["StepLoop", "SteppedPool", "Stuck", "run_steps"]
