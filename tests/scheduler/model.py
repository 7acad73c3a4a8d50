"""What a history of the bare scheduler is made of."""

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final, Self

KIB: Final = 1024
MIB: Final = 1 << 20
TICK: Final = 0.25
PLENTY: Final = 1e9  # as bypass: anybody may pass
MORE: Final = {
    "fallback": [True], "overlap": [64 * KIB, 0.1], "patience": [0.01], "ready": [256 * KIB], "max_waiting": [1, 3],
    "take_back": [False], "late_fences": [False], "shrink_after": [0.05], "adaptive": [False],
}  # fmt: skip
STILL: Final = 20
"""Ticks in a row at which nothing but the clock goes on: then nothing will ever happen again."""
NEVER: Final = float("inf")
ENDS: Final = {"expired", "cancelled", "closed", "deadlock", "no memory", "too many"}
Refused = str
"""Why there was no memory; one of `ENDS`, or "error"."""
Blocks = list[int]
Steps = Generator[Callable[[], None], "Blocks | Refused | None", None]
"""What an actor does: each step begins something, and goes on with what came of it."""


class BrokenPromise(AssertionError):
    """The scheduler has broken a promise; the text names the seed and the promise."""


@dataclass(eq=False)
class Share:
    """The pool, a budget, or the inside of a lease."""

    account: int
    up: Self | None = None
    part_of: Self | None = None
    arena: int = -1
    waits: bool = True
    limit: int = 0
    closed: bool = False

    def path(self) -> Iterator[Self]:
        """Go through this one and those around it, innermost first."""
        share: Self | None = self
        while share is not None:
            yield share
            share = share.up

    def within(self, other: Self) -> bool:
        return any(one is other for one in self.path())


@dataclass(eq=False)
class Actor:
    """A task, or a thread."""

    number: int
    program: Steps
    asked: "Asked | None" = None
    over: bool = False
    ends: list[str] = field(default_factory=list)

    @property
    def owner(self) -> int:
        return 2 * self.number + 2


@dataclass(eq=False)
class Asked:
    """A request that has not been answered yet."""

    number: int
    actor: Actor
    share: Share
    total: int
    place: tuple[int, int, int]
    batch: bool
    waits: bool
    deadline: float
    asleep: bool
    passed: int = 0
    ended: bool = False

    def __repr__(self) -> str:
        return f"actor {self.actor.number}, who asks for {self.total} in {self.share.account}"


@dataclass(eq=False)
class Held:
    """A live block."""

    block: int
    address: int
    nbytes: int
    share: Share
    hold: int = 0
    movable: bool = False
    leaving: bool = False


@dataclass
class Settings:
    """What kind of world a seed gives."""

    limit: int
    segment: int
    small: int
    bypass: float
    paged: bool
    direct: bool
    streams: int
    sizes: str
    trouble: float
    """How often the device fails."""
    capacity: int
    depth: int
    actors: int
    rounds: int
    meddling: float
    """How often somebody changes limits, cancels, closes or trims."""
    ending: str
    """What becomes of the pool itself in between."""
    slow_looks: bool
    """Whether looking at fences takes time, while others ask."""
    more: dict[str, object]
    """Policy beyond that."""

    @classmethod
    def draw(cls, draw: random.Random) -> Self:
        limit = draw.choice([1, 2, 4]) * MIB
        paged = draw.random() < 0.2
        return cls(
            limit=limit,
            segment=draw.choice([limit, limit // 4, 256 * KIB]),
            small=draw.choice([4 * KIB, 64 * KIB, MIB]),
            bypass=draw.choice([0.0, 0.5, 2.0, PLENTY]),
            paged=paged,
            direct=not paged and draw.random() < 0.1,
            streams=draw.choice([1, 1, 1, 2, 3]),
            sizes=draw.choice(["equal", "mixed", "mixed", "large"]),
            trouble=draw.choice([0.0, 0.0, 0.1]),
            capacity=draw.choice([2 * limit, 2 * limit, limit * 3 // 4]),
            depth=draw.randrange(5),
            actors=draw.randrange(2, 13),
            rounds=draw.randrange(1, 5),
            meddling=draw.choice([0.0, 0.0, 0.1, 0.5]),
            ending=draw.choice(["", "", "", "", "", "", "", "drain", "close"]),
            slow_looks=draw.random() < 0.2,
            more={name: draw.choice(values) for name, values in MORE.items() if draw.random() < 0.15},
        )

    @property
    def flat(self) -> bool:
        """Whether all stand in one queue, in the order of arrival."""
        return not self.depth and not self.meddling
