"""Which waiters can never be served, whatever everybody else does.

The proof is a reduction. Suppose that every owner who is not waiting gives back all it holds. Serve any waiter that
then fits; its owner gives back what it holds, and so on. Whoever is left is stuck for certain: nothing that others may
still do can help, short of cancelling one of them. Waiters with a deadline help themselves, so they count as served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Claim:
    """A waiter as the detector sees it.

    Attributes:
        owner: Who waits; owners are compared by this key.
        nbytes: What it waits for, in bytes.
        patient: Whether it would wait for ever; False for one with a deadline.
    """

    owner: Hashable
    nbytes: int
    patient: bool = True


def stuck(claims: Iterable[Claim], held: Mapping[Hashable, int], capacity: int) -> list[Claim]:
    """Answer the claims that cannot be met even if everybody else frees everything.

    Args:
        claims: Everyone who is suspended in a wait now.
        held: Bytes that each owner holds until its block ends; memory that nobody is bound to hold is left out, and so
            counts as free.
        capacity: The most bytes that could be had if nothing were held.

    Returns:
        The stuck claims in the order given; empty when progress is possible.
    """
    waiting = sorted(claims, key=lambda claim: claim.nbytes)
    bound = {claim.owner for claim in waiting}
    work = capacity - sum(held.get(owner, 0) for owner in bound)
    served = True
    while served:
        served = False
        left: list[Claim] = []
        for claim in waiting:
            if claim.patient and claim.nbytes > work:
                left.append(claim)
                continue
            served = True
            if claim.owner in bound:
                bound.discard(claim.owner)
                work += held.get(claim.owner, 0)
        waiting = left
    return waiting
