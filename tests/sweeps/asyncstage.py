"""The stage of a scenario on asyncio: a `StepLoop` whose hook strikes at the one step asked for."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import TypeVar

from asyncmem.testing import StepLoop, run_steps
from tests.sweeps.actors import ACTORS, Actor
from tests.sweeps.stage import Astray, Cancellable, Kind, Life, Scenario, Strike

C = TypeVar("C", bound=Cancellable)
_acting: contextvars.ContextVar[Actor] = contextvars.ContextVar("tests.sweeps.acting")


class AsyncioStage:
    """The asyncio half of `tests.sweeps.stage.Stage`, which says what each method promises."""

    def __init__(self, loop: StepLoop, kind: Kind, strike: Strike | None) -> None:
        self._loop = loop
        self._kind = kind
        self._strike = strike
        self._actors: dict[str, tuple[Actor, asyncio.Task[None]]] = {}
        self._births: dict[str, int] = {}
        self._checks: list[Callable[[], None]] = []
        self.last_checks: list[Callable[[], None]] = []
        self.lives: dict[str, Life] = {}

    def actor(self, name: str, play: Callable[[], Awaitable[object]]) -> None:
        """Start an actor in a task of its own."""
        actor = ACTORS[self._kind](play)
        context = contextvars.copy_context()
        context.run(_acting.set, actor)
        self._births[name] = self._loop.steps + 1
        task = self._loop.create_task(self._live(name, actor), name=name, context=context)
        self._actors[name] = (actor, task)

    async def _live(self, name: str, actor: Actor) -> None:
        try:
            await actor.run()
        finally:
            actor.request = None  # or the stage would keep a request alive that the actor has dropped
            self.lives[name] = Life(self._births[name], self._loop.steps)

    def watch(self, request: C) -> C:
        """Remember the request for strikes of kind REQUEST."""
        _acting.get().request = request
        return request

    def always(self, check: Callable[[], None]) -> None:
        """Check before every further step."""
        self._checks.append(check)

    def afterwards(self, check: Callable[[], None]) -> None:
        """Check once the loop is closed."""
        self.last_checks.append(check)

    async def finish(self) -> None:
        """Wait for all actors and judge them."""
        if self._actors:
            await asyncio.wait([task for _, task in self._actors.values()])
        # Results hold tracebacks, tracebacks hold frames, and frames would hold the buffers that have to be free now.
        actors, self._actors = self._actors, {}
        for actor, task in actors.values():
            actor.judge(task)

    def before_step(self, step: int) -> None:
        """Be the hook of the loop: check, then strike if this is the step."""
        for check in self._checks:
            check()
        if self._strike is not None and step == self._strike.step:
            for name in self._strike.victims:
                self._hit(name)

    def _hit(self, name: str) -> None:
        if name not in self._actors or self._actors[name][1].done():
            raise Astray(f"{name} does not live at this step as it did undisturbed: the scenario is not deterministic")
        self._actors[name][0].strike()


def play_on_asyncio(scenario: Scenario, kind: Kind, seed: int | None, strike: Strike | None, /) -> dict[str, Life]:
    """Play `scenario` once on a `StepLoop`; see `tests.sweeps.sweep.Player`."""
    loop = StepLoop(seed)
    stage = AsyncioStage(loop, kind, strike)
    loop.hook = stage.before_step
    run_steps(_play(scenario, stage), loop)
    for check in stage.last_checks:
        check()
    return stage.lives


async def _play(scenario: Scenario, stage: AsyncioStage) -> None:
    await scenario(stage)
