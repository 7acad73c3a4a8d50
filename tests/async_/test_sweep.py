"""The step sweep passes code that is right and catches the bugs that public pools have had."""

import asyncio
import itertools
from collections.abc import Callable
from functools import partial

import anyio
import pytest

from asyncmem.testing import Stuck
from tests.sweeps import Astray, Kind, Scenario, Stage, Strike, SweepFailed, replay, sweep, sweep_on_trio
from tests.sweeps.tsweep import KINDS as TRIO_KINDS
from tests.sweeps.tsweep import play_on_trio

from .subjects import (
    AsyncioSlot,
    Fifo,
    LeakyGrant,
    Overgranting,
    SilentHead,
    Slot,
    Swallower,
    TrioSlot,
    WakeThenRecheck,
)

SEEDS = (None, 1, 2, 3)


def contended(kind: type[Fifo], slot: Callable[[int], Slot] = AsyncioSlot) -> Scenario:
    """Four actors of mixed sizes over a queue of that kind, which has to be whole afterwards."""

    async def use(fifo: Fifo, stage: Stage, nbytes: int) -> None:
        await stage.watch(fifo.ask(nbytes)).wait()
        try:
            await anyio.sleep(1)
        finally:
            fifo.release(nbytes)

    async def scenario(stage: Stage) -> None:
        fifo = kind(4, slot)
        for name, nbytes in {"holder": 3, "big": 4, "small": 1, "late": 2}.items():
            stage.actor(name, partial(use, fifo, stage, nbytes))
        await stage.finish()
        fifo.check()

    return scenario


def impatient_head(kind: type[Fifo], slot: Callable[[int], Slot] = AsyncioSlot) -> Scenario:
    """A head that gives up, while the holder goes on only once the small one behind that head has been served."""

    async def scenario(stage: Stage) -> None:
        fifo = kind(4, slot)
        served = anyio.Event()

        async def hold() -> None:
            fifo.take(3)
            try:
                await served.wait()
            finally:
                fifo.release(3)

        async def give_up() -> None:
            with anyio.move_on_after(5):
                await stage.watch(fifo.ask(4)).wait()
                fifo.release(4)

        async def follow() -> None:
            try:
                await stage.watch(fifo.ask(1)).wait()
                fifo.release(1)
            finally:
                served.set()

        stage.actor("holder", hold)
        await anyio.sleep(1)
        stage.actor("head", give_up)
        await anyio.sleep(1)
        stage.actor("follower", follow)
        await stage.finish()
        fifo.check()

    return scenario


def test_correct_queue_passes_every_strike() -> None:
    """Nothing is reported about a queue that books before it wakes and gives back what it cannot use."""
    report = sweep(contended(Fifo), seeds=SEEDS)
    assert report.strikes > 1000
    assert sweep(impatient_head(Fifo), seeds=SEEDS).strikes > 200


def test_correct_queue_passes_pairs_of_strikes() -> None:
    """Two actors may be struck at the same step."""
    assert sweep(contended(Fifo), kinds=[Kind.TASK], together=2).strikes > 50


@pytest.mark.parametrize("broken", [LeakyGrant, Swallower, WakeThenRecheck, Overgranting])
def test_broken_queue_is_caught(broken: type[Fifo]) -> None:
    """Each known bug of a public pool is found, and the strike that is reported shows it again."""
    with pytest.raises(SweepFailed) as caught:
        sweep(contended(broken), seeds=SEEDS)
    failure = caught.value.failures[0]
    assert failure.strike is not None
    with pytest.raises(type(failure.error)):
        replay(contended(broken), failure.strike)


@pytest.mark.parametrize("kind", [Kind.TASK, Kind.TIMEOUT, Kind.GROUP])
def test_native_cancellations_hit_between_grant_and_wake_up(kind: Kind) -> None:
    """Only asyncio's own ways of cancelling can fall after the grant; each of them finds the leak."""
    with pytest.raises(SweepFailed, match=r"are lost|Stuck"):
        sweep(contended(LeakyGrant), kinds=[kind], seeds=SEEDS)


@pytest.mark.parametrize("kind", [Kind.SCOPE, Kind.REQUEST])
def test_scope_and_request_cancellations_find_the_silent_head(kind: Kind) -> None:
    """A cancelled scope and a request's own cancel() leave the queue while waiting, which strands the followers."""
    with pytest.raises(SweepFailed, match="Stuck: nothing is ready"):
        sweep(impatient_head(SilentHead), kinds=[kind])


def test_swallowed_cancellation_is_named() -> None:
    """A task whose cancel() answered True and that ends otherwise is reported as having swallowed it."""
    with pytest.raises(SweepFailed, match="swallowed its cancellation"):
        sweep(contended(Swallower), kinds=[Kind.TASK])


@pytest.mark.parametrize("kind", TRIO_KINDS)
def test_correct_queue_passes_on_trio(kind: Kind) -> None:
    """The same scenario passes on trio, by scope, by deadline and by the request's own cancel()."""
    assert sweep_on_trio(contended(Fifo, TrioSlot), kinds=[kind], seeds=(0, 1, 2)).strikes > 50


@pytest.mark.parametrize("broken", [SilentHead, WakeThenRecheck, Overgranting])
def test_broken_queue_is_caught_on_trio(broken: type[Fifo]) -> None:
    """Each bug that trio's rules leave possible is found there."""
    make = impatient_head if broken is SilentHead else contended
    with pytest.raises(SweepFailed):
        sweep_on_trio(make(broken, TrioSlot), seeds=(0, 1, 2))


def test_trio_strike_replays() -> None:
    """The strike that a sweep on trio reports shows the failure again."""
    scenario = contended(WakeThenRecheck, TrioSlot)
    with pytest.raises(SweepFailed) as caught:
        sweep_on_trio(scenario, seeds=(0, 1, 2))
    strike, error = next((one.strike, one.error) for one in caught.value.failures if one.strike is not None)
    with pytest.raises(type(error)):
        replay(scenario, strike, player=play_on_trio)


def test_scenario_that_differs_between_runs_is_refused() -> None:
    """A strike that finds its victim gone says that the scenario is not deterministic."""
    runs = itertools.count()

    async def scenario(stage: Stage) -> None:
        shrinking = 10 - next(runs)
        stage.actor("only", partial(anyio.sleep, 1) if shrinking > 9 else nothing)
        await stage.finish()

    with pytest.raises(SweepFailed, match="not deterministic"):
        sweep(scenario, kinds=[Kind.TASK])


async def nothing() -> None:
    """Return at the first step."""


def test_checks_run_at_each_step_and_at_the_end() -> None:
    """`always` runs before each later step of the run, `afterwards` once the loop is closed; either can fail it."""
    calls: list[str] = []

    async def scenario(stage: Stage) -> None:
        stage.always(lambda: calls.append("step"))
        stage.afterwards(lambda: calls.append("end"))
        stage.actor("only", partial(anyio.sleep, 1))
        await stage.finish()

    replay(scenario, Strike((), 0, Kind.SCOPE, None))
    replay(scenario, Strike((), 0, Kind.SCOPE, 0), player=play_on_trio)
    assert calls.count("end") == 2
    assert calls.index("end") > 2


@pytest.mark.parametrize("player", ["asyncio", "trio"])
def test_failing_check_fails_the_run(player: str) -> None:
    """What a check raises is the error of the run."""

    def broken() -> None:
        raise AssertionError("over-granted")

    async def scenario(stage: Stage) -> None:
        stage.always(broken)
        stage.actor("only", partial(anyio.sleep, 1))
        await stage.finish()

    run = sweep_on_trio if player == "trio" else sweep
    with pytest.raises(SweepFailed, match="over-granted"):
        run(scenario, kinds=[Kind.SCOPE])


def test_error_of_an_actor_fails_the_run() -> None:
    """An actor that raises is reported with its own error."""

    async def scenario(stage: Stage) -> None:
        async def fails() -> None:
            raise LookupError("lost")

        stage.actor("fails", fails)
        await stage.finish()

    with pytest.raises(SweepFailed, match="LookupError: lost"):
        sweep(scenario, kinds=[Kind.TASK])
    with pytest.raises(SweepFailed, match="LookupError: lost"):
        sweep_on_trio(scenario, kinds=[Kind.SCOPE])


def test_stray_cancellation_fails_the_run() -> None:
    """An actor that ends cancelled though nobody struck it is reported."""

    async def scenario(stage: Stage) -> None:
        async def stray() -> None:
            raise asyncio.CancelledError

        stage.actor("stray", stray)
        await stage.finish()

    with pytest.raises(Astray, match="ended cancelled"):
        replay(scenario, Strike((), 0, Kind.TASK, None))


def test_lost_wake_up_on_trio_is_stuck() -> None:
    """On trio a wait that nobody ends runs into the horizon of virtual time."""
    with pytest.raises(Stuck, match="virtual time"):
        replay(lambda _: anyio.sleep_forever(), Strike((), 0, Kind.SCOPE, 0), player=play_on_trio)
