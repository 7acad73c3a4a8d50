"""Rows in parts that have something in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


def parts(rows: NDArray[np.void], column: str) -> Iterator[tuple[int, NDArray[np.void]]]:
    """Answer each value of a column, smallest first, and the rows that have it, in their order."""
    rows = rows[np.argsort(rows[column], kind="stable")]
    values, starts = np.unique(rows[column], return_index=True)
    yield from zip(values.tolist(), np.split(rows, starts[1:]), strict=False)  # no values: one part, of no rows
