"""The pool: what joins the core, a device and the engine's decisions into something to await.

`pool` is what users hold, with its `share`s (budgets and leases) and `request`s. `flow` knows the order in which a
request is served; `taker`, `ladder` and `supply` are its steps, from cheap to dear; `worker` is the thread, `home` the
event loop, and `blocking` serves callers that cannot await. The lock, and the plain way from a free to the waiter that
it wakes, are compiled: `Turn` and `Desk` in the core. `placement` is a plan of where buffers lie, and `planned` a range
that keeps to it. `buckets` stands apart: it keeps what others have made.
"""

from asyncmem.pool.arrays import ArrayBatch
from asyncmem.pool.buckets import BucketPool, BucketStats
from asyncmem.pool.copies import Copy
from asyncmem.pool.graph import GraphMemory
from asyncmem.pool.lease import Lease
from asyncmem.pool.pins import Pin
from asyncmem.pool.placement import PlannedPlace, ReusePlan
from asyncmem.pool.planned import PlannedMemory, PlanUse
from asyncmem.pool.pool import AsyncMemoryPool
from asyncmem.pool.protocol import MemoryShare
from asyncmem.pool.request import Request
from asyncmem.pool.share import Budget
from asyncmem.pool.spillable import Spillable

__all__ = [
    "ArrayBatch",
    "AsyncMemoryPool",
    "BucketPool",
    "BucketStats",
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
