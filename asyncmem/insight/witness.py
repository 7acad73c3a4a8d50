"""The one witness of a process: it is there while anybody records, and knows which frames nobody asks about."""

from __future__ import annotations

import os
import threading
import weakref
from importlib.util import find_spec
from pathlib import Path

from asyncmem.core import Witness
from asyncmem.pool.owners import current_tag

_PACKAGE = Path(__file__).parents[1]
# Programs of ours are programs like any other.
_HEARD = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("cli", "testing"))

_changing = threading.Lock()
_known: weakref.ref[Witness] | None = None
_depths: list[int] = []


def join(frames: int) -> Witness:
    """Answer the witness, who keeps at least so many frames of each call until as many are left by `leave`."""
    global _known  # noqa: PLW0603 -- one a process
    with _changing:
        witness = _known() if _known is not None else None
        if witness is None:
            witness = Witness(current_tag, _quiet(), _HEARD)
            _known = weakref.ref(witness)
        _depths.append(frames)
        witness.frames = max(_depths)
        return witness


def leave(witness: Witness, frames: int) -> None:
    """Undo one `join`."""
    with _changing:
        _depths.remove(frames)
        witness.frames = max(_depths, default=1)


def _quiet() -> tuple[str, ...]:
    # Tasks are run by loops, which ask for nothing by themselves.
    loops = [spec.origin for spec in map(find_spec, ("asyncio", "trio", "anyio")) if spec is not None and spec.origin]
    return tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, *(Path(origin).parent for origin in loops)))
