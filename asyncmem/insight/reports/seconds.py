"""How long records took together, by what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncmem.insight.groups import naming

if TYPE_CHECKING:
    from asyncmem.insight.records import Records


def seconds_by(records: Records, column: str) -> dict[str, float]:
    """Add up the spans of records by what they have in a column; "?" where that is not known."""
    numbers, places = np.unique(records.rows[column], return_inverse=True)
    spans = np.bincount(places, records.rows["span_ns"], len(numbers)) / 1e9
    spell = naming(records.names, column)
    found: dict[str, float] = {}
    for number, seconds in zip(numbers.tolist(), spans.tolist(), strict=True):
        name = spell(number) or "?"
        found[name] = found.get(name, 0.0) + seconds
    return found
