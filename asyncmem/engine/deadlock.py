"""Which waiters can never be served, whatever everybody else does.

The proof is a reduction. Suppose that every owner who is not waiting gives back all it holds. Serve any waiter that
then fits; its owner gives back what it holds, and so on. Whoever is left is stuck for certain: nothing that others may
still do can help, short of cancelling one of them. Waiters with a deadline help themselves, so they count as served.

What fits is a matter of place as well as of bytes: a range that is held in the middle of a segment keeps the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

Range = tuple[int, int]  # address and length in bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """A waiter as the detector sees it.

    Attributes:
        owner: Who waits; owners are compared by this key.
        nbytes: What it waits for, in bytes.
        largest: The largest piece of that, which needs to lie in one range.
        patient: Whether it would wait for ever; False for one with a deadline.
        barred: Whether it must not overtake those before it, because they have been overtaken enough.
    """

    owner: Hashable
    nbytes: int
    largest: int
    patient: bool = True
    barred: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """What there is to be had.

    Attributes:
        capacity: The most bytes if nothing were held.
        limit: The most bytes that may be reserved.
        segments: The ranges reserved now.
    """

    capacity: int
    limit: int
    segments: Sequence[Range]

    def room(self, held: Sequence[Range]) -> Range:
        """Answer the most bytes, and the longest range, that could be free with just these ranges held."""
        longest, kept = 0, 0
        for start, length in self.segments:
            inside = sorted(one for one in held if start <= one[0] < start + length)
            longest = max(longest, _longest_gap(start, length, inside))
            kept += length if inside else 0
        # A segment that nobody holds a part of can go back, and come again in any shape.
        return self.capacity - sum(length for _, length in held), max(longest, self.limit - kept)


def stuck(claims: Iterable[Claim], held: Mapping[Hashable, Sequence[Range]], space: Space) -> list[Claim]:
    """Answer the claims that cannot be met even if everybody else frees everything.

    Args:
        claims: Everyone who is suspended in a wait now, in the order of arrival.
        held: What each owner holds until its block ends; memory that nobody is bound to hold is left out, and so counts
            as free.
        space: What there is.

    Returns:
        The stuck claims in that order; empty when progress is possible.
    """
    waiting = list(claims)
    bound = {claim.owner for claim in waiting}
    while waiting:
        most, longest = space.room([one for owner in bound for one in held.get(owner, ())])
        served = [
            one
            for place, one in enumerate(waiting)
            if not one.patient or (one.nbytes <= most and one.largest <= longest and (place == 0 or not one.barred))
        ]
        if not served:
            break
        bound -= {claim.owner for claim in served}
        waiting = [one for one in waiting if one not in served]
    return waiting


def _longest_gap(start: int, length: int, inside: Sequence[Range]) -> int:
    longest, at = 0, start
    for begin, size in inside:
        longest, at = max(longest, begin - at), max(at, begin + size)
    return max(longest, start + length - at)
