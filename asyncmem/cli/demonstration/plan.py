"""How much work the demonstration takes on, so that its demand is several times its limit whatever that is."""

from dataclasses import dataclass
from typing import Final, Self

from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_size

OVERSUBSCRIPTION: Final = 5
"""How many times the limit the items in flight would need if none of them waited."""

SMALLEST_LIMIT: Final = 2 << 20
LARGEST_ITEM: Final = 32 << 20
TOTAL_BYTES: Final = 16
"""What the last stage needs for one item: two numbers of 8 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes in bytes, times in seconds."""

    limit: int
    """The most the pool may reserve."""
    item_bytes: int
    """What each of the first two stages needs for one item."""
    in_flight: int
    """Items worked on at once."""
    seconds: float
    """How long new items are begun."""

    @property
    def demand(self) -> int:
        """What the items in flight would hold together if memory were no matter."""
        return self.in_flight * (2 * self.item_bytes + TOTAL_BYTES)

    @property
    def stage_limit(self) -> int:
        """The share of each of the first two stages; an eighth stays for the last, so the last can always finish."""
        return self.limit * 7 // 16

    @classmethod
    def for_limit(cls, limit: int, seconds: float) -> Self:
        """Choose items of a 32nd of the limit, and so many that together they need several times what there is.

        Raises:
            InvalidRequest: The limit leaves no room for a pipeline.
        """
        if limit < SMALLEST_LIMIT:
            raise InvalidRequest("limit", limit, f"at least {format_size(SMALLEST_LIMIT)} for the demonstration")
        item_bytes = min(limit // 32, LARGEST_ITEM) // 4096 * 4096
        in_flight = OVERSUBSCRIPTION * limit // (2 * item_bytes)
        return cls(limit=limit, item_bytes=item_bytes, in_flight=in_flight, seconds=seconds)
