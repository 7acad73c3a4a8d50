"""How much memory somebody says they will need: bytes, or anything that knows its total, such as an estimate."""

from typing import Protocol, TypeAlias, runtime_checkable

from asyncmem.units import Size, parse_size


@runtime_checkable
class HasTotal(Protocol):
    """What knows how many bytes it comes to: an estimate of `asyncmem.planning`."""

    @property
    def total(self) -> int:
        """Bytes in all."""


Need: TypeAlias = Size | HasTotal
"""A size, or what has a total."""


def bytes_needed(need: Need, what: str = "need") -> int:
    """Answer the bytes.

    Raises:
        InvalidRequest: It is neither.
    """
    return parse_size(need.total if isinstance(need, HasTotal) else need, what=what)
