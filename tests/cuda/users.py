"""Random programs over a pool, whose reads are checked by value on any driver, and by order on the fake."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Cuda, GpuStream

KIB = 1 << 10
SIZES = (512, 4 * KIB, 4 * KIB, 40 * KIB, 300 * KIB, 1500 * KIB, 3000 * KIB)
MOST_LIVE = 14
SAMPLE = 16
MOST_READS = 4096


@dataclass(eq=False)
class Held:
    """A buffer, the value in all of its bytes, and the streams that may read it beside its home."""

    buffer: Buffer
    value: int = 0
    users: list[GpuStream] = field(default_factory=list)


class User:
    """Somebody who keeps the rules: nobody writes while others may read, and other streams are named."""

    def __init__(self, device: Cuda, seed: int) -> None:
        self.choice = random.Random(seed)
        self.device = device
        self.streams = [device.default_stream, device.create_stream("b"), device.create_stream("c")]
        self.held: list[Held] = []
        self.log = device.allocate_segment(SAMPLE * MOST_READS, "direct")
        self.expected: list[int] = []

    def run(self, pool: AsyncMemoryPool, steps: int) -> None:
        """Play, then free everything."""
        for _ in range(steps):
            self.step(pool)
        while self.held:
            self.held.pop().buffer.free()

    def check(self) -> None:
        """See that every read found what had been written before it."""
        found = bytearray(SAMPLE * max(1, len(self.expected)))
        self.device.record_all().block()
        self.device.copy_out(memoryview(found), self.log.address, self.device.default_stream)
        self.device.default_stream.synchronize_blocking()
        assert found[: SAMPLE * len(self.expected)] == b"".join(bytes([value]) * SAMPLE for value in self.expected)
        self.device.free_segment(self.log)

    def step(self, pool: AsyncMemoryPool) -> None:
        weights = [30, 1, *(weight for weight, _ in ACTIONS.values())]
        (kind,) = self.choice.choices(["allocate", "trim", *ACTIONS], weights)
        if kind == "trim":
            pool.empty_cache()
        elif kind == "allocate":
            self.allocate(pool)
        elif self.held:
            ACTIONS[kind][1](self, self.choice.choice(self.held), self.choice.choice(self.streams))

    def allocate(self, pool: AsyncMemoryPool) -> None:
        if len(self.held) == MOST_LIVE:
            self.held.pop(0).buffer.free()
        stream = self.choice.choice(self.streams)
        one = Held(pool.allocate(self.choice.choice(SIZES), stream=stream, timeout=20))
        self.held.append(one)
        self.write(one, stream)

    def work(self, one: Held, _stream: GpuStream) -> None:
        home = self.device.stream_of(one.buffer.stream)
        if one.users:
            self.read(one, self.choice.choice([home, *one.users]))
        else:
            self.choice.choice([self.read, self.write])(one, home)

    def use_on(self, one: Held, stream: GpuStream) -> None:
        one.buffer.use_on(stream)
        if stream is not one.buffer.stream:
            one.users.append(stream)
            self.read(one, stream)

    def hand_over(self, one: Held, stream: GpuStream) -> None:
        one.buffer.hand_over(stream)
        self.read(one, stream)

    def free(self, one: Held, _stream: GpuStream) -> None:
        self.held.remove(one)
        one.buffer.free()

    def drop(self, one: Held, _stream: GpuStream) -> None:
        self.held.remove(one)

    def free_on(self, one: Held, stream: GpuStream) -> None:
        if not one.users:
            stream.wait(one.buffer.stream.record())
            self.read(one, stream)
            self.held.remove(one)
            one.buffer.free(stream=stream)

    def write(self, one: Held, stream: GpuStream) -> None:
        one.value = self.choice.randrange(256)
        self.device.fill(one.buffer.address, one.buffer.nbytes, one.value, stream)

    def read(self, one: Held, stream: GpuStream) -> None:
        if len(self.expected) < MOST_READS:
            offset = SAMPLE * self.choice.randrange(one.buffer.nbytes // SAMPLE)
            place = self.log.address + SAMPLE * len(self.expected)
            self.device.copy(place, one.buffer.address + offset, SAMPLE, stream)
            self.expected.append(one.value)


ACTIONS: dict[str, tuple[int, Callable[[User, Held, GpuStream], None]]] = {
    "work": (8, User.work),
    "use_on": (4, User.use_on),
    "hand_over": (4, User.hand_over),
    "free": (14, User.free),
    "drop": (4, User.drop),
    "free_on": (5, User.free_on),
}
