"""Where memory goes: records of what pools do, what is live and since when, and what to make of it.

`recording` has pools noted down, into a ring or a file (`spool`, `amem`); `records` is what is read, `names` what its
numbers stand for. `profile`, `tracker` and `allocations` look at a block of a program, `analysis` at its habits, and
`debug` has all of it going in the background, and `live` shows other programs what goes on now. `lifetimes` knows when
buffers are in use, `sharing` which of them could be one, `packing` where each would lie, and `plan_files` keeps that.
`reserved` is what pools had from the device. `reports` has the figures that the commands print, `pictures` what
`asyncmem report` and notebooks draw.
"""

from asyncmem.core import Kind, Level
from asyncmem.insight.allocations import AllocationTracker, LiveBuffer
from asyncmem.insight.analysis import AllocationPatterns, SizePattern, analyze_allocation_patterns
from asyncmem.insight.debug import memory_debug, set_memory_debug
from asyncmem.insight.dump import dump_allocation_trace
from asyncmem.insight.groups import Group
from asyncmem.insight.lifetimes import LifetimeAnalyzer, TraceLike
from asyncmem.insight.live import LiveServer, serve_live
from asyncmem.insight.names import PoolName, Site
from asyncmem.insight.plan_files import read_plan, write_plan
from asyncmem.insight.profile import Profile, profile_memory
from asyncmem.insight.reading import read
from asyncmem.insight.recording import Recording
from asyncmem.insight.records import Peak, Record, Records
from asyncmem.insight.sharing import Lifetime, ReuseSuggestions, SharedBuffer
from asyncmem.insight.tracker import MemoryTracker
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
    "profile_memory",
    "read",
    "read_plan",
    "serve_live",
    "set_memory_debug",
    "tag",
    "write_plan",
]
