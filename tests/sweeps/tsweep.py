"""The same sweeps on trio: an instrument strikes before a task's step, a seed orders each batch, time is virtual."""

import contextvars
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import trio
import trio.testing
from trio._core import _run as scheduler

from asyncmem.errors import RequestCancelled
from asyncmem.testing import Stuck
from tests.sweeps.stage import Astray, Cancellable, Kind, Life, Scenario, Strike
from tests.sweeps.sweep import SweepReport, sweep

C = TypeVar("C", bound=Cancellable)
_acting: contextvars.ContextVar["TrioActor"] = contextvars.ContextVar("tests.sweeps.acting_on_trio")

KINDS: Final = (Kind.SCOPE, Kind.TIMEOUT, Kind.REQUEST)
"""The ways to be cancelled that trio has; a nursery's failing sibling is a cancelled scope too."""

HORIZON: Final = 3_600.0
"""Seconds of virtual time after which a run without progress is stuck."""


def sweep_on_trio(
    scenario: Scenario,
    *,
    kinds: Sequence[Kind] = KINDS,
    seeds: Sequence[int] = (0,),
    together: int = 1,
    stride: int = 1,
) -> SweepReport:
    """Sweep `scenario` on trio; see `tests.sweeps.sweep.sweep` for the arguments and what is raised."""
    return sweep(scenario, kinds=kinds, seeds=seeds, together=together, stride=stride, player=play_on_trio)


class TrioActor:
    """A coroutine of a scenario in a cancel scope of its own, which is what a strike cancels or lets expire."""

    def __init__(self, play: Callable[[], Awaitable[object]], kind: Kind) -> None:
        self.play = play
        self.kind = kind
        self.scope = trio.CancelScope()
        self.request: Cancellable | None = None
        self.struck = False
        self.alive = True

    async def run(self) -> None:
        """Play inside the scope."""
        try:
            with self.scope:
                await self.play()
        except RequestCancelled:
            if not (self.struck and self.kind is Kind.REQUEST):
                raise

    def strike(self) -> None:
        """Cancel the scope, move its deadline to now, or cancel the request, after the kind."""
        self.struck = True
        if self.kind is Kind.TIMEOUT:
            self.scope.deadline = trio.current_time()
        elif self.kind is Kind.SCOPE:
            self.scope.cancel()
        else:
            self.struck = self.request is not None and self.request.cancel()


class TrioStage(trio.abc.Instrument):
    """The trio half of `tests.sweeps.stage.Stage`, and the instrument that counts steps and strikes."""

    def __init__(self, kind: Kind, strike: Strike | None) -> None:
        self.nursery: trio.Nursery | None = None
        self.problem: BaseException | None = None
        self.last_checks: list[Callable[[], None]] = []
        self.lives: dict[str, Life] = {}
        self._kind = kind
        self._strike = strike
        self._steps = 0
        self._actors: dict[str, TrioActor] = {}
        self._checks: list[Callable[[], None]] = []
        self._ended = trio.Event()

    def actor(self, name: str, play: Callable[[], Awaitable[object]]) -> None:
        """Start an actor in a scope and a task of its own."""
        assert self.nursery is not None, "the stage is not open"
        actor = self._actors[name] = TrioActor(play, self._kind)
        self.nursery.start_soon(self._live, name, actor, self._steps + 1, name=name)

    async def _live(self, name: str, actor: TrioActor, born: int) -> None:
        _acting.set(actor)
        try:
            await actor.run()
        finally:
            actor.alive = False
            actor.request = None  # or the stage would keep a request alive that the actor has dropped
            self.lives[name] = Life(born, self._steps)
            self._ended.set()

    def watch(self, request: C) -> C:
        """Remember the request for strikes of kind REQUEST."""
        _acting.get().request = request
        return request

    def always(self, check: Callable[[], None]) -> None:
        """Check before every further step."""
        self._checks.append(check)

    def afterwards(self, check: Callable[[], None]) -> None:
        """Check once trio has ended."""
        self.last_checks.append(check)

    async def finish(self) -> None:
        """Wait for all actors; what one raises ends the run by itself."""
        while any(actor.alive for actor in self._actors.values()):
            self._ended = trio.Event()
            await self._ended.wait()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002 - trio's signature
        """Check, then strike if this is the step; trio drops an instrument that raises, so what is raised is kept."""
        self._steps += 1
        try:
            for check in self._checks:
                check()
            if self._strike is not None and self._steps == self._strike.step:
                for name in self._strike.victims:
                    self._hit(name)
        except Exception as error:  # noqa: BLE001 - whatever a check raises is the verdict of this run
            self.problem = self.problem or error
            self._checks.clear()

    def _hit(self, name: str) -> None:
        if name not in self._actors or not self._actors[name].alive:
            raise Astray(f"{name} does not live at this step as it did undisturbed: the scenario is not deterministic")
        self._actors[name].strike()


def play_on_trio(scenario: Scenario, kind: Kind, seed: int | None, strike: Strike | None, /) -> dict[str, Life]:
    """Play `scenario` once on trio; see `tests.sweeps.sweep.Player`."""
    stage = TrioStage(kind, strike)
    clock = trio.testing.MockClock(autojump_threshold=0)
    with ordered_by(seed or 0), _bare_errors():
        trio.run(partial(_play, scenario, stage), clock=clock, instruments=[stage])
    if stage.problem is not None:
        raise stage.problem
    for check in stage.last_checks:
        check()
    return stage.lives


async def _play(scenario: Scenario, stage: TrioStage) -> None:
    with trio.move_on_after(HORIZON) as patience:
        async with trio.open_nursery() as nursery:
            stage.nursery = nursery
            await scenario(stage)
    if patience.cancelled_caught:
        raise Stuck(f"a task was still waiting after {HORIZON:g} s of virtual time")


@contextmanager
def _bare_errors() -> Iterator[None]:
    """Take a lone error out of the group that a nursery wraps it in, so that it reads as it does on asyncio."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


@contextmanager
def ordered_by(seed: int) -> Iterator[None]:
    """Let `seed` alone decide in which order trio runs the tasks of a batch.

    Trio keeps a switch for this, meant for test tools, that it documents nowhere; hence the private names.
    """
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING
    state = scheduler._r.getstate()
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r.seed(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        scheduler._r.setstate(state)
