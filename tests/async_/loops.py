"""Ways to run a coroutine function: under virtual time, and on each of the real loops."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol, TypeVar

import trio
import trio.testing
import uvloop

from asyncmem.testing import StepLoop, run_steps
from tests.sweeps.tsweep import ordered_by

T = TypeVar("T")
Main = Callable[[], Coroutine[object, object, T]]


class Run(Protocol):
    __name__: str

    def __call__(self, main: Callable[[], Coroutine[object, object, T]], /) -> T: ...


def steps(main: Main[T]) -> T:
    return run_steps(main(), StepLoop(max_steps=1_000_000))


def steps_debug(main: Main[T]) -> T:
    loop = StepLoop(max_steps=1_000_000)
    loop.set_debug(True)
    return run_steps(main(), loop)


def trio_virtual(main: Main[T]) -> T:
    async def limited() -> T:
        with trio.fail_after(1_000_000):
            return await main()

    with ordered_by(0):
        return trio.run(limited, clock=trio.testing.MockClock(autojump_threshold=0))


def plain(main: Main[T]) -> T:
    return asyncio.run(main())


def debug(main: Main[T]) -> T:
    return asyncio.run(main(), debug=True)


def eager(main: Main[T]) -> T:
    return _on(_eager_loop, main)


def uv(main: Main[T]) -> T:
    return _on(uvloop.new_event_loop, main)


def on_trio(main: Main[T]) -> T:
    return trio.run(main)


def _on(factory: Callable[[], asyncio.AbstractEventLoop], main: Main[T]) -> T:
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


def _eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]  # 3.12 and later
    return loop


VIRTUAL: list[Run] = [steps, steps_debug, trio_virtual]
LOOPS: list[Run] = [debug, uv, on_trio] + ([eager] if sys.version_info >= (3, 12) else [])

Starter = Callable[[Callable[[], Awaitable[object]]], object]
