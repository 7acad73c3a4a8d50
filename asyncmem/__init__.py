"""Await GPU memory the way you await a socket.

The layers, lowest first; a file imports only from those before its own:

    units figures errors facts needs options environment readers stats   words: sizes, errors, options, figures
    core/       compiled: the heap, the scheduler that decides, and the objects that users hold
    devices/    what owns memory and streams: the host, the simulated device, CUDA, ROCm, Metal, OpenCL
    buckets/    BucketPool: buffers of any kind, kept by their size; it stands apart
    arrays/     typed views over buffers, and DLPack
    pool/       AsyncMemoryPool: carries out what the scheduler decides; budgets and leases, the worker
    runtime     one pool a device for the whole process
    exchange    memory of other libraries as arrays
    pipeline/   channels and stages that share memory, what feeds a device, models trained in stages
    testing/    what tests of asynchronous memory need; public
    replay/     recordings of what programs allocate, and what a pool would reserve for them
    planning/   what a model will need, from its figures, before it runs
    insight/    where memory goes: records, profiles, trackers
    cli/        the command

This file only re-exports; what is of `insight`, once it is asked for.
"""

import importlib as _importlib
import typing as _typing

from asyncmem.arrays import Array, ArrayBatch
from asyncmem.buckets import BucketPool, BucketStats
from asyncmem.core import Batch, Buffer
from asyncmem.devices import Device, Fence, Host, Simulated, Stream
from asyncmem.errors import (
    AsyncmemError,
    AsyncmemWarning,
    BackendUnavailable,
    BadTrace,
    BufferReleased,
    DeadlockError,
    DeviceError,
    InvalidRequest,
    LeakWarning,
    NoDeviceHasRoom,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    RequestCancelled,
    StageError,
    StallWarning,
    StepError,
    TooManyRequests,
)
from asyncmem.exchange import asarray
from asyncmem.facts import OutOfMemoryFacts, OwnerInfo, Shortfall
from asyncmem.options import PoolOptions
from asyncmem.pool import (
    AsyncMemoryPool,
    Budget,
    Copy,
    GraphMemory,
    Lease,
    MemoryShare,
    Pin,
    PlannedMemory,
    Request,
    ReusePlan,
    Spillable,
)
from asyncmem.pool.owners import tag
from asyncmem.runtime import RuntimeDevice, device, run
from asyncmem.stats import PoolStats, Pressure, SegmentInfo, WaiterInfo

if _typing.TYPE_CHECKING:
    from asyncmem.insight import (
        AllocationTracker,
        LifetimeAnalyzer,
        MemoryTracker,
        profile_memory,
        set_memory_debug,
    )

__version__ = "0.1.0"

__all__ = [
    "AllocationTracker",
    "Array",
    "ArrayBatch",
    "AsyncMemoryPool",
    "AsyncmemError",
    "AsyncmemWarning",
    "BackendUnavailable",
    "BadTrace",
    "Batch",
    "BucketPool",
    "BucketStats",
    "Budget",
    "Buffer",
    "BufferReleased",
    "Copy",
    "DeadlockError",
    "Device",
    "DeviceError",
    "Fence",
    "GraphMemory",
    "Host",
    "InvalidRequest",
    "LeakWarning",
    "Lease",
    "LifetimeAnalyzer",
    "MemoryShare",
    "MemoryTracker",
    "NoDeviceHasRoom",
    "OutOfMemoryError",
    "OutOfMemoryFacts",
    "OwnerInfo",
    "Pin",
    "PlannedMemory",
    "PoolClosed",
    "PoolOptions",
    "PoolStats",
    "PoolTimeout",
    "Pressure",
    "Request",
    "RequestCancelled",
    "ReusePlan",
    "RuntimeDevice",
    "SegmentInfo",
    "Shortfall",
    "Simulated",
    "Spillable",
    "StageError",
    "StallWarning",
    "StepError",
    "Stream",
    "TooManyRequests",
    "WaiterInfo",
    "asarray",
    "device",
    "profile_memory",
    "run",
    "set_memory_debug",
    "tag",
]

if not _typing.TYPE_CHECKING:  # which would take any name for one that is here
    _OF_INSIGHT = ("AllocationTracker", "LifetimeAnalyzer", "MemoryTracker", "profile_memory", "set_memory_debug")

    def __getattr__(name: str) -> object:
        if name == "insight":
            return _importlib.import_module("asyncmem.insight")
        if name not in _OF_INSIGHT:
            raise AttributeError(f"module 'asyncmem' has no attribute {name!r}")
        found = globals()[name] = getattr(_importlib.import_module("asyncmem.insight"), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
