"""The pool: what users hold, and what carries out the scheduler's effects.

`pool` is what users hold, with its budgets (`share`) and leases. What is decided is decided in the core; `open_pool`
puts a core, a device, a worker and an event loop together and serves the core's calls, and `executor` makes the calls
of the device. `placement` is a plan of where buffers lie, and `planned` a range that keeps to it.
"""

from asyncmem.core import Request
from asyncmem.pool.copies import Copy
from asyncmem.pool.graph import GraphMemory
from asyncmem.pool.handles import Pin
from asyncmem.pool.placement import PlannedPlace, ReusePlan
from asyncmem.pool.planned import PlannedMemory, PlanUse
from asyncmem.pool.pool import AsyncMemoryPool
from asyncmem.pool.share import Budget, Lease
from asyncmem.pool.share import Share as MemoryShare
from asyncmem.pool.spillable import Spillable

__all__ = [
    "AsyncMemoryPool",
    "Budget",
    "Copy",
    "GraphMemory",
    "Lease",
    "MemoryShare",
    "Pin",
    "PlanUse",
    "PlannedMemory",
    "PlannedPlace",
    "Request",
    "ReusePlan",
    "Spillable",
]
