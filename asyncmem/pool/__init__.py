"""The pool: what joins the core, a device and the engine's decisions into something to await.

`pool` is what users hold, with its `share`s (budgets and leases) and `request`s. `flow` knows the order in which a
request is served; `taker`, `ladder` and `supply` are its steps, from cheap to dear; `turn` is the lock, `worker` the
thread, `home` the event loop.
"""

from asyncmem.pool.lease import Lease
from asyncmem.pool.pool import AsyncMemoryPool
from asyncmem.pool.protocol import MemoryShare
from asyncmem.pool.request import Request
from asyncmem.pool.share import Budget

__all__ = ["AsyncMemoryPool", "Budget", "Lease", "MemoryShare", "Request"]
