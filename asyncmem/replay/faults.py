"""How a fault in a recording is found and told: which row of which file, and what it should have been."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import BadTrace


def refuse(
    wrong: NDArray[np.bool_], expected: str, got: Callable[[int], str], rows: NDArray[np.intp] | None = None
) -> None:
    """Raise for the first that is wrong.

    Args:
        wrong: Says of each row, or of each of `rows`, whether it is wrong.
        expected: What ought to be there.
        got: Tells what is there, by position in `wrong`.
        rows: The rows that `wrong` is about; None for all.

    Raises:
        BadTrace: One is wrong.
    """
    if wrong.any():
        at = int(wrong.argmax())
        raise BadTrace(got(at), expected, row=at if rows is None else int(rows[at]))


@contextmanager
def naming(file: str | PathLike[str]) -> Iterator[None]:
    """Say in which file the fault is that is found inside the block, and call what is too large for memory a fault."""
    try:
        yield
    except BadTrace as fault:
        raise BadTrace(fault.got, fault.expected, file=fspath(file), row=fault.row, hint=fault.hint) from None
    except MemoryError:
        raise BadTrace("more than memory holds", "what fits into memory", file=fspath(file)) from None
