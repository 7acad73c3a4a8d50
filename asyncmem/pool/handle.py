"""`Handle`: what users hold of memory; it cannot be copied or pickled."""

from __future__ import annotations

from typing import NoReturn


class Handle:
    """A handle that can be neither copied nor pickled, as its memory would be given back twice."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot copy or pickle {type(self).__name__!r} object")
