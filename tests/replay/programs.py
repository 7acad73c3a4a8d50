"""Programs to replay, written as they would be told."""

import random
from collections.abc import Iterable

from asyncmem.replay import Op, Trace

from .support import Row, trace_of

MIB = 1 << 20
MS = 1000


class Program:
    """Writes down allocations and frees by name: `take("a", 4 * MIB)`, then `free("a")`; time passes by `at`."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._live: dict[str, tuple[int, int]] = {}
        self._taken = 0
        self._now = 0

    def at(self, time_us: int) -> "Program":
        """Go on at this time."""
        self._now = time_us
        return self

    def take(self, name: str, nbytes: int, stream: int = 0) -> "Program":
        """Allocate."""
        self._live[name] = self._taken, nbytes
        self._rows.append((Op.ALLOCATE, stream, self._taken, nbytes, self._now))
        self._taken += 1
        return self

    def free(self, *names: str, stream: int = 0) -> "Program":
        """Free what was allocated under these names."""
        for name in names:
            number, nbytes = self._live.pop(name)
            self._rows.append((Op.FREE, stream, number, nbytes, self._now))
        return self

    def trace(self) -> Trace:
        """Return the whole."""
        return trace_of(self._rows, name="program")


def random_program(seed: int, sizes: Iterable[int], *, steps: int = 3000, streams: int = 1) -> Trace:
    """Make a program of random lives: now and then a phase ends, and most of what is live goes."""
    draw = random.Random(seed)
    choices = list(sizes)
    program = Program()
    live: list[tuple[str, int]] = []
    now = 0
    for step in range(steps):
        now += draw.randrange(400)
        program.at(now)
        if step % 500 == 499:
            choices = [max(1, int(one * draw.uniform(0.7, 1.4))) for one in choices]
        wanted = 20 if step % 500 < 400 else 4
        while len(live) > draw.randrange(wanted, 2 * wanted):
            name, stream = live.pop(draw.randrange(len(live)))
            program.free(name, stream=stream)
        stream = draw.randrange(streams)
        live.append((f"{step}", stream))
        program.take(f"{step}", draw.choice(choices) + draw.randrange(4096), stream)
    return program.trace()
