"""Rows of a file point to names that there are, and say things that there are words for.

Whoever reads records relies on it, so a file in which it does not hold is refused as a whole, by what is wrong with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncmem.core import Kind, Level
from asyncmem.errors import BadTrace
from asyncmem.stats import Pressure

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from asyncmem.insight.names import Names

WAIT_ENDS: Final = ("granted", "cancelled", "timed out", "failed")
"""How a wait may end, by the level of its record."""

_LEVELS: Final = {Kind.ALLOCATED: len(Level), Kind.WAITED: len(WAIT_ENDS), Kind.PRESSURE: len(Pressure)}


def need_sound(rows: NDArray[np.void], names: Names, file: str) -> None:
    """Make sure that rows can be spelled out.

    Raises:
        BadTrace: One of them cannot.
    """
    for number, (place, caller) in enumerate(names.sites):
        if not 0 <= place < len(names.places) or not 0 <= caller < max(number, 1):
            raise BadTrace(f"call {number} of line {place} from call {caller}", "those before it", file=file)
    ends = {"pool": len(names.pools), "site": len(names.sites), "task": len(names.tasks), "tag": len(names.tags)}
    for column, end in {**ends, "kind": len(Kind)}.items():
        _need_below(end, rows[column], column, file)
    for kind, end in _LEVELS.items():
        _need_below(end, rows["level"][rows["kind"] == kind], "level", file)


def _need_below(end: int, numbers: NDArray[Any], what: str, file: str) -> None:
    if len(numbers) and (most := int(numbers.max())) >= end:
        raise BadTrace(f"{what} {most}", f"one of {end}", file=file)
