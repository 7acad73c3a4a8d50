"""Where memory goes: records of what pools do, what is live and since when, and reports on it.

`recording` records pools, into a ring or a file (`spool`, `amem`, `reading`), and in the background. `rows` takes the
rows from the pools' logs and puts them in order, `records` has what comes of it, `names` what its numbers stand for,
`groups` adds it up, `merging` puts several processes together. `trackers` answer questions about a block of a program
or a test, `live` shows a process to other programs, `prometheus` to a metrics server. `lifetimes` finds out when
buffers are in use and which could share memory, `plans` where each would lie. `reports` has the figures that the
commands print, `pictures` the page of `asyncmem report` and of notebooks, `exports` the formats of others.
"""

from asyncmem.core import Kind, Level
from asyncmem.insight.groups import Group
from asyncmem.insight.lifetimes import Lifetime, LifetimeAnalyzer, ReuseSuggestions, SharedBuffer, TraceLike
from asyncmem.insight.live import LiveServer, serve_live
from asyncmem.insight.merging import merge
from asyncmem.insight.names import Origin, PoolName, Site
from asyncmem.insight.plans import read_plan, write_plan
from asyncmem.insight.recording import Recording, memory_debug, read, set_memory_debug
from asyncmem.insight.records import Peak, Record, Records
from asyncmem.insight.reports.summary import AllocationPatterns, SizePattern, analyze_allocation_patterns
from asyncmem.insight.trackers import (
    AllocationTracker,
    LiveBuffer,
    MemoryTracker,
    Profile,
    dump_allocation_trace,
    profile_memory,
)
from asyncmem.pool.owners import tag
from asyncmem.pool.placement import PlannedPlace, ReusePlan
from asyncmem.pool.planned import PlanUse

__all__ = [
    "AllocationPatterns",
    "AllocationTracker",
    "Group",
    "Kind",
    "Level",
    "Lifetime",
    "LifetimeAnalyzer",
    "LiveBuffer",
    "LiveServer",
    "MemoryTracker",
    "Origin",
    "Peak",
    "PlanUse",
    "PlannedPlace",
    "PoolName",
    "Profile",
    "Record",
    "Recording",
    "Records",
    "ReusePlan",
    "ReuseSuggestions",
    "SharedBuffer",
    "Site",
    "SizePattern",
    "TraceLike",
    "analyze_allocation_patterns",
    "dump_allocation_trace",
    "memory_debug",
    "merge",
    "profile_memory",
    "read",
    "read_plan",
    "serve_live",
    "set_memory_debug",
    "tag",
    "write_plan",
]
