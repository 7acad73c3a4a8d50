"""Draw docs/pictures/waiting.svg from two runs: `python docs/pictures/waiting.py > docs/pictures/waiting.svg`.

The same tasks come at the same times. Above, memory that is full is an error, and the program ends; below, an asyncmem
pool lets the tasks wait. Both runs are in virtual time, so the picture is the same each time. It has no text.
"""

import asyncio
import random
from collections.abc import Callable, Iterable

from asyncmem.testing import SteppedPool, run_steps

TASKS, LIMIT, BUFFER = 100, 64, 8  # MiB
WIDTH, HEIGHT, GAP, EDGE = 720, 150, 26, 8
SECONDS = 7.6

Steps = list[tuple[float, int]]
"""Moments, and the MiB that are live from then on."""


async def work(number: int, take: Callable[[], None], give: Callable[[], None]) -> None:
    """Hold a buffer for as long as the task's number says."""
    take()
    await asyncio.sleep(random.Random(number).uniform(0.2, 0.8))  # noqa: S311
    give()


def arrivals() -> Iterable[float]:
    """Yield when the tasks come: now and then, then faster."""
    chance, now = random.Random(7), 0.0  # noqa: S311
    for number in range(TASKS):
        now += chance.expovariate(5 if number < 14 else 30)
        yield now


def record(steps: Steps, nbytes: int) -> None:
    """Add or take away some MiB now."""
    steps.append((asyncio.get_running_loop().time(), steps[-1][1] + nbytes))


async def with_errors(steps: Steps) -> None:
    """Run the tasks over memory that raises when it is full."""

    def take() -> None:
        if steps[-1][1] + BUFFER > LIMIT:
            raise MemoryError
        record(steps, BUFFER)

    async def task(number: int, arrival: float) -> None:
        await asyncio.sleep(arrival)
        await work(number, take, lambda: record(steps, -BUFFER))

    try:
        async with asyncio.TaskGroup() as tasks:
            for number, arrival in enumerate(arrivals()):
                tasks.create_task(task(number, arrival))
    except* MemoryError:
        steps.append((asyncio.get_running_loop().time(), 0))


async def with_waiting(steps: Steps) -> None:
    """Run them over a pool."""
    async with SteppedPool("simulated", limit=f"{LIMIT} MiB") as pool, asyncio.TaskGroup() as tasks:

        async def task(number: int, arrival: float) -> None:
            await asyncio.sleep(arrival)
            async with pool.allocate_async(f"{BUFFER} MiB"):
                await work(number, lambda: record(steps, BUFFER), lambda: record(steps, -BUFFER))

        for number, arrival in enumerate(arrivals()):
            tasks.create_task(task(number, arrival))


def draw(steps: Steps, top: int, colour: str) -> Iterable[str]:
    """Draw what was live over time, below a dashed line at the limit."""

    def x(time: float) -> float:
        return round(EDGE + time / SECONDS * (WIDTH - 2 * EDGE), 1)

    def y(nbytes: float) -> float:
        return round(top + HEIGHT - nbytes / (1.15 * LIMIT) * HEIGHT, 1)

    path = f"M{x(0)} {y(0)}" + "".join(f"H{x(time)}V{y(nbytes)}" for time, nbytes in steps)
    yield f'<path d="{path}" fill="{colour}" fill-opacity=".35" stroke="{colour}" stroke-width="1.5"/>'
    yield f'<path d="M{EDGE} {y(0)}H{WIDTH - EDGE}" stroke="#888" stroke-width="1"/>'
    yield f'<path d="M{EDGE} {y(LIMIT)}H{WIDTH - EDGE}" stroke="#888" stroke-width="1.5" stroke-dasharray="6 5"/>'
    if len(steps) < 2 * TASKS:  # it ended early
        cross = f"M{x(steps[-1][0])} {y(LIMIT)}m-9 -9l18 18m0 -18l-18 18"
        yield f'<path d="{cross}" stroke="{colour}" stroke-width="4" stroke-linecap="round"/>'


def picture() -> str:
    """Run both programs, and return the picture."""
    errors: Steps = [(0.0, 0)]
    waiting: Steps = [(0.0, 0)]
    run_steps(with_errors(errors))
    run_steps(with_waiting(waiting))
    height = 2 * HEIGHT + GAP + EDGE
    lines = [*draw(errors, 0, "#d64545"), *draw(waiting, HEIGHT + GAP, "#2f86d6")]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" fill="none">'
    return "\n".join([head, *lines, "</svg>"])


if __name__ == "__main__":
    print(picture())
