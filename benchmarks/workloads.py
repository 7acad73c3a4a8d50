"""The rows by which an earlier allocator of this family was compared with PyTorch: asyncmem and torch at the same work.

Five rows, each named for what it does. Steps and sizes are drawn from a fixed seed, so each allocator does the same.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from asyncmem.cli.bench.timing import random_plan
from benchmarks.allocators import Allocator, AsyncmemPool, Plan
from benchmarks.rows import circular, time_plan, time_program
from benchmarks.suite import Measured, Task

MIB: Final = 1 << 20
LIMIT: Final = 4 << 30
"""The most that `pressure` lets an allocator take from the device."""
PRESSED: Final = 0.75
"""How much of that is live."""


def same_size() -> Plan:
    """Allocate two hundred blocks of 256 KiB and give them back in the order in which they came."""
    return _filled_and_emptied([256 << 10] * 200)


def large_tensors() -> Plan:
    """Allocate thirty-two blocks of 1 to 256 MiB and give them back in the order in which they came."""
    return _filled_and_emptied([size for _, size in random_plan(32, 1, MIB, 256 * MIB)])


def variable_sizes() -> Plan:
    """Keep a hundred blocks of 1 KiB to 4 MiB and replace a random one each time."""
    return circular(random_plan(2000, 100, 1 << 10, 4 * MIB))


def transformer_step() -> Plan:
    """Allocate and give back what one training step of a transformer does.

    Twelve layers, 8 by 512 tokens, 1024 wide, 16 heads, two bytes a number: activations forwards, kept for the way
    back, where each gradient replaces them; weight gradients live until the step ends.
    """
    unit = 8 * MIB  # tokens by width by two bytes
    kept = [unit, 3 * unit, 8 * unit, unit, unit, unit, 4 * unit, 4 * unit, unit]
    weights = [6 * MIB, 2 * MIB, 8 * MIB, 8 * MIB]
    steps = _Steps()
    layers = []
    for _ in range(12):
        scores = steps.allocate(8 * unit)
        layers.append([steps.allocate(size) for size in kept])
        steps.give_back(scores)
    gradients: list[int] = []
    above = steps.allocate(unit)
    for layer in reversed(layers):
        gradients.extend(steps.allocate(size) for size in weights)
        for slot in reversed(layer):
            below = steps.allocate(steps.size[slot])
            steps.give_back(slot)
            steps.give_back(above)
            above = below
    steps.give_back(above)
    for slot in gradients:
        steps.give_back(slot)
    return steps.plan


def pressure() -> Plan:
    """Keep three quarters of the limit live in blocks of 1 to 64 MiB, and replace random ones by others that fit."""
    draw = random.Random(0)  # noqa: S311 - the same numbers every time are what is wanted
    steps, live = _Steps(), 0
    low, high = math.log(MIB), math.log(64 * MIB)
    for _ in range(1000):
        size = int(math.exp(draw.uniform(low, high)))
        while live + size > PRESSED * LIMIT:
            victim = draw.choice(list(steps.size))
            live -= steps.size[victim]
            steps.give_back(victim)
        live += size
        steps.allocate(size)
    for slot in list(steps.size):
        steps.give_back(slot)
    return steps.plan


class _Steps:
    """Writes a plan of which each step either allocates into an empty slot or empties one."""

    def __init__(self) -> None:
        self.plan: Plan = []
        self.size: dict[int, int] = {}
        self._free: list[int] = []
        self._slots = 0

    def allocate(self, size: int) -> int:
        if not self._free:
            self._free.append(self._slots)
            self._slots += 1
        slot = self._free.pop()
        self.size[slot] = size
        self.plan.append((slot, size, 0))
        return slot

    def give_back(self, slot: int) -> None:
        self.plan.append((slot, 0, self.size.pop(slot)))
        self._free.append(slot)


def _filled_and_emptied(sizes: list[int]) -> Plan:
    steps = _Steps()
    for slot in [steps.allocate(size) for size in sizes]:
        steps.give_back(slot)
    return steps.plan


PROGRAMS: Final[Mapping[str, Callable[[], Plan]]] = {
    "same_size": same_size,
    "large_tensors": large_tensors,
    "transformer_step": transformer_step,
    "variable_sizes": variable_sizes,
}


def workload(row: str) -> Callable[[Allocator, Task], Iterator[Measured]]:
    """Return the benchmark of one of the rows, per allocation."""
    if row == "pressure":
        return _pressure

    def measure(peer: Allocator, task: Task) -> Iterator[Measured]:
        over = time_plan if row == "variable_sizes" else time_program
        yield over(row, peer, task.effort, PROGRAMS[row]())

    return measure


def _pressure(peer: Allocator, task: Task) -> Iterator[Measured]:
    """Time the program under its limit; where our defaults do not come through, with one segment for all of it."""
    plan = pressure()
    try:
        yield time_program("pressure", peer, task.effort, plan, limit=LIMIT)
    except peer.out_of_memory:
        if not isinstance(peer, AsyncmemPool):
            raise
        with peer.tuned(segment_size=LIMIT):
            found = time_program("pressure", peer, task.effort, plan, limit=LIMIT)
        yield replace(found, unlike="with segment_size=4 GiB: out of memory with the default")
