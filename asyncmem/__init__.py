"""Await GPU memory the way you await a socket.

The layers, lowest first; a file imports only from those before its own::

    text units figures errors facts options environment readers stats   words: sizes, errors, options, figures
    files       opening files that may come from anywhere
    lazy        numpy, imported when it is used
    core/       compiled: the heap, the scheduler, and the objects that users hold
    devices/    memory and streams: the host, the simulated device, CUDA, ROCm, Metal, OpenCL
    buckets/    BucketPool: buffers of any kind, kept by size
    arrays/     typed views over buffers, and DLPack
    pool/       AsyncMemoryPool, which carries out what the scheduler decides; budgets, leases, the worker
    runtime     one pool per device for the whole process
    exchange    memory of other libraries as arrays
    pipeline/   channels and stages in bounded memory, feeding a device, models trained in stages
    interop/    other libraries on a pool; a module for each, imported by its users
    share/      memory of one process in another of the same host
    testing/    for tests of programs that use asyncmem
    replay/     recordings of allocations, and what a pool would reserve for them
    planning/   what a model needs, before it runs
    insight/    where memory goes: records, profiles, trackers
    ranks/      models trained in stages over several processes
    distributed/ pools and pipelines on the workers of a Dask cluster
    cli/        the command

`__all__` has what a program that allocates calls, annotates with or catches, and `profile_memory`. All else is in the
submodules, `asyncmem.devices`, `.errors`, `.facts`, `.stats`, `.pool`, `.insight` and so on, after `import asyncmem`.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

if "t" in getattr(_sys, "abiflags", ""):
    raise ImportError(
        "asyncmem does not run on free-threaded Python: its core asks reference counts whether a buffer is still held, "
        "which only the interpreter's lock makes true. Use the regular build of the same version."
    )

from asyncmem.arrays import Array, ArrayBatch
from asyncmem.buckets import BucketPool
from asyncmem.core import Batch, Buffer, Request
from asyncmem.devices import Host, Simulated, Stream
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
    StallWarning,
    TooManyRequests,
)
from asyncmem.exchange import asarray
from asyncmem.options import PoolOptions
from asyncmem.pool import AsyncMemoryPool, Budget, Lease, MemoryShare, Spillable
from asyncmem.pool.owners import tag
from asyncmem.runtime import device, run
from asyncmem.stats import PoolStats, Pressure

if _typing.TYPE_CHECKING:
    # A type checker takes "as" for an export.
    from asyncmem import arrays as arrays
    from asyncmem import buckets as buckets
    from asyncmem import devices as devices
    from asyncmem import errors as errors
    from asyncmem import facts as facts
    from asyncmem import insight as insight
    from asyncmem import options as options
    from asyncmem import pipeline as pipeline
    from asyncmem import planning as planning
    from asyncmem import pool as pool
    from asyncmem import replay as replay
    from asyncmem import runtime as runtime
    from asyncmem import share as share
    from asyncmem import stats as stats
    from asyncmem import testing as testing
    from asyncmem.insight import profile_memory

__version__ = "0.1.0"

__all__ = [
    "Array",
    "ArrayBatch",
    "AsyncMemoryPool",
    "AsyncmemError",
    "AsyncmemWarning",
    "BackendUnavailable",
    "BadTrace",
    "Batch",
    "BucketPool",
    "Budget",
    "Buffer",
    "BufferReleased",
    "DeadlockError",
    "DeviceError",
    "Host",
    "InvalidRequest",
    "LeakWarning",
    "Lease",
    "MemoryShare",
    "NoDeviceHasRoom",
    "OutOfMemoryError",
    "PoolClosed",
    "PoolOptions",
    "PoolStats",
    "PoolTimeout",
    "Pressure",
    "Request",
    "RequestCancelled",
    "Simulated",
    "Spillable",
    "StallWarning",
    "Stream",
    "TooManyRequests",
    "asarray",
    "device",
    "profile_memory",
    "run",
    "tag",
]

if not _typing.TYPE_CHECKING:  # a type checker would take any name for one that is here
    _SUBMODULES = ("insight", "pipeline", "planning", "replay", "share", "testing")
    """Imported at their first use, because most programs use none of them."""
    _FUNCTIONS = {"profile_memory": "asyncmem.insight", "load_ipython_extension": "asyncmem.insight.notebook"}

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return _importlib.import_module(f"asyncmem.{name}")
        if name in _FUNCTIONS:
            found = globals()[name] = getattr(_importlib.import_module(_FUNCTIONS[name]), name)
            return found
        raise AttributeError(f"module 'asyncmem' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_SUBMODULES})
