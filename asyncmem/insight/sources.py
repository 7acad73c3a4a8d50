"""Where a look at records gets them from: whatever has some."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from asyncmem.errors import InvalidRequest
from asyncmem.insight.debug import memory_debug
from asyncmem.insight.records import Records

if TYPE_CHECKING:
    from asyncmem.insight.profile import Profile
    from asyncmem.insight.recording import Recording
    from asyncmem.insight.tracker import MemoryTracker

Source: TypeAlias = "Records | Recording | Profile | MemoryTracker"


def records_of(source: Source | None) -> Records:
    """Answer the records of a recording, profile or tracker, or those of the background.

    Raises:
        InvalidRequest: There is no source, and nothing records in the background.
    """
    if isinstance(source, Records):
        return source
    found = memory_debug() if source is None else source
    if found is None:
        hint = "call set_memory_debug(True) before, or give a recording, a profile or a tracker"
        raise InvalidRequest("source", None, "something that has records", hint=hint)
    return found.records()
