"""The terms of a step sweep: the actors, the one that is struck, when, how, and the outcome."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Kind(enum.Enum):
    """How an actor is cancelled."""

    TASK = "task.cancel()"
    SCOPE = "a cancelled scope"
    TIMEOUT = "an expired timeout"
    GROUP = "a failing sibling in its TaskGroup"
    REQUEST = "request.cancel()"


@dataclass(frozen=True, slots=True)
class Strike:
    """A cancellation of every actor in `victims` just before step `step` of the run that `seed` orders."""

    victims: tuple[str, ...]
    step: int
    kind: Kind
    seed: int | None

    def __str__(self) -> str:
        order = "in arrival order" if self.seed is None else f"with seed {self.seed}"
        return f"{' and '.join(self.victims)} by {self.kind.value} before step {self.step} {order}"


class Cancellable(Protocol):
    """What `Stage.watch` takes: a request that can be cancelled by its own method."""

    def cancel(self) -> bool:
        """Cancel it; False when it is too late."""
        ...


C = TypeVar("C", bound=Cancellable)


class Stage(Protocol):
    """What a scenario plays on. A scenario is one coroutine function of a stage, run afresh for every strike."""

    def actor(self, name: str, play: Callable[[], Awaitable[object]]) -> None:
        """Start `play()` in a task of its own; it may be cancelled at any of its steps, in any of the kinds."""
        ...

    def watch(self, request: C) -> C:
        """Let strikes of kind REQUEST hit this request while the calling actor has no later one; return it."""
        ...

    def always(self, check: Callable[[], None]) -> None:
        """Call `check` before every further step of the run; what it raises fails the run."""
        ...

    def afterwards(self, check: Callable[[], None]) -> None:
        """Call `check` once the run is over and its loop is closed; what it raises fails the run."""
        ...

    async def finish(self) -> None:
        """Wait for all actors and raise `Astray` unless each ended as it should.

        A struck actor ends cancelled in the way of its kind, or returns when it needed no further step. Everybody
        else returns: an error, or a cancellation that was meant for another, fails the run.
        """
        ...


Scenario = Callable[[Stage], Awaitable[None]]


class Astray(AssertionError):
    """An actor did not end as it should."""


@dataclass(frozen=True, slots=True)
class Life:
    """The steps between which an actor could be struck: `born` before its first, `died` with its last."""

    born: int
    died: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A strike (None: the undisturbed run) and the error that the run ended with."""

    strike: Strike | None
    seed: int | None
    kind: Kind
    error: BaseException

    def __str__(self) -> str:
        what = str(self.strike) if self.strike else f"undisturbed run for {self.kind.value}, seed {self.seed}"
        return f"{what}: {type(self.error).__name__}: {self.error}"


class SweepFailed(AssertionError):
    """Some runs of a sweep broke a promise; `failures` has each with the strike that repeats it by `replay`."""

    def __init__(self, failures: list[Failure], runs: int) -> None:
        shown = "\n  ".join(str(failure) for failure in failures[:5])
        super().__init__(f"{len(failures)} of {runs} runs failed; replay with the strike:\n  {shown}")
        self.failures = failures
        self.runs = runs
