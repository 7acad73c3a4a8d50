"""Strike every actor of a scenario at every one of its steps, and see whether anything is lost."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Protocol

from tests.sweeps.asyncstage import play_on_asyncio
from tests.sweeps.stage import Failure, Kind, Life, Scenario, Strike, SweepFailed

ALL_KINDS: Final = tuple(Kind)


class Player(Protocol):
    """Runs a scenario once on some loop; raises what went wrong."""

    def __call__(self, scenario: Scenario, kind: Kind, seed: int | None, strike: Strike | None, /) -> dict[str, Life]:
        """Play, with `strike` if there is one, and return when each actor lived."""
        ...


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What a clean sweep did."""

    runs: int
    strikes: int


def sweep(
    scenario: Scenario,
    *,
    kinds: Sequence[Kind] = ALL_KINDS,
    seeds: Sequence[int | None] = (None,),
    together: int = 1,
    stride: int = 1,
    player: Player = play_on_asyncio,
) -> SweepReport:
    """Play `scenario` undisturbed, then once for every way to cancel one of its actors.

    Args:
        scenario: Played afresh each time. It must be deterministic: no threads, no wall clock.
        kinds: The ways to cancel.
        seeds: The orders of ready handles to try; None is the order of arrival.
        together: How many actors are struck at the same step.
        stride: Strike before every `stride`-th step only, beginning at a different one for each seed.
        player: Runs the scenario; `tests.sweeps.tsweep.play_on_trio` does it on trio.

    Raises:
        SweepFailed: Some run broke a promise of the scenario, of the stage or of a check the scenario registered.
    """
    campaign = _Campaign(scenario, player)
    strikes = 0
    with _repeatable_collection() as tidy:
        for number, (kind, seed) in enumerate((kind, seed) for seed in seeds for kind in kinds):
            lives = campaign.attempt(kind, seed, None)
            for strike in _Strikes(kind, seed, together).over(lives, stride, number):
                campaign.attempt(kind, seed, strike)
                strikes += 1
                tidy(strikes)
    if campaign.failures:
        raise SweepFailed(campaign.failures, campaign.runs)
    return SweepReport(campaign.runs, strikes)


def replay(scenario: Scenario, strike: Strike, *, player: Player = play_on_asyncio) -> None:
    """Play `scenario` once more with the one `strike` that a sweep reported, and raise what goes wrong."""
    with _repeatable_collection():
        player(scenario, strike.kind, strike.seed, strike)


class _Campaign:
    """Runs of one scenario, and those that failed."""

    def __init__(self, scenario: Scenario, player: Player) -> None:
        self.failures: list[Failure] = []
        self.runs = 0
        self._scenario = scenario
        self._player = player

    def attempt(self, kind: Kind, seed: int | None, strike: Strike | None) -> dict[str, Life]:
        self.runs += 1
        try:
            return self._player(self._scenario, kind, seed, strike)
        except Exception as error:  # noqa: BLE001 - whatever ends a run is its verdict, and the next run has to follow
            self.failures.append(Failure(strike, seed, kind, error.with_traceback(None)))
            return {}


@dataclass(frozen=True, slots=True)
class _Strikes:
    """The strikes of one kind in one order of handles."""

    kind: Kind
    seed: int | None
    together: int

    def over(self, lives: dict[str, Life], stride: int, offset: int) -> Iterator[Strike]:
        for victims in combinations(sorted(lives), self.together):
            first = max(lives[name].born for name in victims)
            last = min(lives[name].died for name in victims)
            for step in range(first + offset % stride, last + 1, stride):
                yield Strike(victims, step, self.kind, self.seed)


@contextmanager
def _repeatable_collection() -> Iterator[Callable[[int], None]]:
    """Keep the garbage collector from running at a step that no seed names; return a function to call between runs."""

    def tidy(runs: int, every: int = 200) -> None:
        if runs % every == 0:
            gc.collect()

    enabled = gc.isenabled()
    gc.disable()
    try:
        yield tidy
    finally:
        if enabled:
            gc.enable()
