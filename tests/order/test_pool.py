"""The pool as a whole keeps stream order: the same programs through buffers, with the checker as judge."""

import gc
import random
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Simulated, SimulatedStream, StreamOrderError
from asyncmem.errors import PoolClosed

from .native import BROKEN_TABLES, DEVICES, PAGE, NativeSimulated

SIZES = (512, 1024, 4096, 4096, 12_288, 30_000)
MOST_LIVE = 14


@dataclass(eq=False)
class Held:
    """A buffer, the streams that may use it beside its home, and whether several read it at once."""

    buffer: Buffer
    users: list[SimulatedStream] = field(default_factory=list)


class User:
    """Somebody who keeps the rules: nobody writes while others may read, and other streams are named."""

    def __init__(self, seed: int, device: Simulated, fence_every: int = 1, segments: str = "auto") -> None:
        self.segments = segments
        self.fence_every = fence_every
        self.choice = random.Random(seed)
        self.device = device
        self.streams = [self.device.default_stream, self.device.create_stream("b"), self.device.create_stream("c")]
        self.held: list[Held] = []

    def run(self, steps: int) -> None:
        pool = self.pool = AsyncMemoryPool(self.device, limit="640 KiB", segment_size="128 KiB", segments=self.segments)
        pool._opened.retire.fence_every = self.fence_every
        for _ in range(steps):
            self.step(pool)
        while self.held:
            self.held.pop().buffer.free()
        pool.check()
        assert pool.stats().allocated_bytes == 0
        pool.close()
        assert self.device.reserved == 0

    def give_up(self) -> None:
        """End a run that has failed, on a device that may not know when its work is done."""
        self.device.timeline.checker.strict = False  # it has said what it had to say
        self.held.clear()
        with suppress(StreamOrderError):
            self.pool.close()

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
        one = Held(pool.allocate(self.choice.choice(SIZES), stream=stream, timeout=60))
        self.held.append(one)
        self.work(one, stream)

    def work(self, one: Held, _stream: SimulatedStream) -> None:
        home = self.device.stream_of(one.buffer.stream)
        self.launch(one, self.choice.choice([home, *one.users]))

    def use_on(self, one: Held, stream: SimulatedStream) -> None:
        one.buffer.use_on(stream)
        if stream is not one.buffer.stream:
            one.users.append(stream)
            self.launch(one, stream)

    def hand_over(self, one: Held, stream: SimulatedStream) -> None:
        one.buffer.hand_over(stream)
        self.launch(one, stream)

    def free(self, one: Held, _stream: SimulatedStream) -> None:
        self.held.remove(one)
        one.buffer.free()

    def drop(self, one: Held, _stream: SimulatedStream) -> None:
        self.held.remove(one)

    def free_on(self, one: Held, stream: SimulatedStream) -> None:
        if not one.users:
            stream.wait(one.buffer.stream.record())
            self.launch(one, stream)
            self.held.remove(one)
            one.buffer.free(stream=stream)

    @staticmethod
    def launch(one: Held, stream: SimulatedStream) -> None:
        stream.launch(1e-3, reads=[one.buffer] if one.users else [], writes=[] if one.users else [one.buffer])


ACTIONS: dict[str, tuple[int, Callable[[User, Held, SimulatedStream], None]]] = {
    "work": (8, User.work),
    "use_on": (4, User.use_on),
    "hand_over": (4, User.hand_over),
    "free": (14, User.free),
    "drop": (4, User.drop),
    "free_on": (5, User.free_on),
}


@pytest.mark.parametrize("fence_every", [1, 4])
@pytest.mark.parametrize("calls", DEVICES)
@pytest.mark.parametrize("segments", ["auto", "paged"])
@pytest.mark.parametrize("seed", range(8))
def test_random_programs_over_a_pool_touch_no_memory_out_of_order(
    seed: int, segments: str, calls: str, fence_every: int
) -> None:
    """Buffers that are shared, handed over, dropped and freed on any stream are never reused too early."""
    User(seed, DEVICES[calls](page=PAGE), fence_every, segments).run(300)


@pytest.mark.parametrize("rule", ["stream does not wait", "fence done without asking", "fence recorded once"])
def test_a_table_that_does_not_do_as_it_says_is_caught_through_the_doors(rule: str) -> None:
    """The compiled ways of buffers and allocations rest on the functions that they call, and on each of them."""

    def is_caught(seed: int) -> bool:
        user = User(seed, BROKEN_TABLES[rule]())
        try:
            user.run(300)
        except StreamOrderError:
            user.give_up()
            return True
        except (
            PoolClosed,
            AssertionError,
        ):  # it was the worker who found the first, and a pool that has lost it is left
            user.give_up()
            return any("StreamOrderError" in str(one.message) for one in seen)
        return False

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")  # the worker's errors, and what is left of such a run
        assert any(is_caught(seed) for seed in range(100))
        gc.collect()


@pytest.mark.parametrize("segments", ["auto", "paged"])
@pytest.mark.parametrize("calls", DEVICES)
def test_programs_on_many_threads_over_one_pool_touch_no_memory_out_of_order(calls: str, segments: str) -> None:
    """The doors let go of the interpreter's lock around the table's calls: others free, take and poll meanwhile."""
    device = DEVICES[calls](page=PAGE)
    users = [User(seed, device) for seed in range(4)]
    failures: list[BaseException] = []

    def run(user: User, pool: AsyncMemoryPool) -> None:
        try:
            for _ in range(400):
                user.step(pool)
        except BaseException as error:  # noqa: BLE001  # shown by the assertion below, whatever it is
            failures.append(error)
        while user.held:
            user.held.pop().buffer.free()

    with AsyncMemoryPool(device, limit="2 MiB", segment_size="128 KiB", segments=segments) as pool:
        threads = [threading.Thread(target=run, args=(user, pool)) for user in users]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert failures == []
        pool.check()
    assert device.reserved == 0
    if isinstance(device, NativeSimulated):
        assert device.problems == []
