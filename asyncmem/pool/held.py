"""Who holds most of a pool that is recorded, by tag and by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from asyncmem.core import LOG_ROW

if TYPE_CHECKING:
    from asyncmem.core import Core


def held_by_tag(core: Core, most: int) -> list[tuple[str, int]]:
    """Answer the tags that hold most and their bytes, as far as that is recorded."""
    witness = core.witness
    if witness is None:
        return []
    return [(witness.tags[number], nbytes) for number, nbytes in _largest(core, "tag", most)]


def held_by_site(core: Core, most: int) -> list[tuple[str, int]]:
    """Answer the lines that hold most ("file:line") and their bytes, as far as that is recorded."""
    witness = core.witness
    if witness is None:
        return []
    lines: dict[str, int] = {}
    for site, nbytes in _largest(core, "site", None):
        file, line, _ = witness.places[witness.sites[site][0]]
        lines[f"{file}:{line}"] = lines.get(f"{file}:{line}", 0) + nbytes
    return sorted(lines.items(), key=lambda one: -one[1])[:most]


def _largest(core: Core, column: str, most: int | None) -> list[tuple[int, int]]:
    rows = np.frombuffer(core.held(), LOG_ROW)
    numbers, places = np.unique(rows[column], return_inverse=True)
    sums = np.bincount(places, rows["nbytes"], len(numbers))
    known = [(int(number), int(nbytes)) for number, nbytes in zip(numbers, sums, strict=True) if number]
    return sorted(known, key=lambda one: -one[1])[:most]
