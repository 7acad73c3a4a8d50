"""Pools on pages need what a replay of the same program says, and not much more for having taken pages back."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Latencies, Simulated, SimulatedStream
from asyncmem.devices.simulated.timeline import VirtualClock
from asyncmem.replay import Model, Op, Policy, Trace, replay
from asyncmem.testing import SteppedPool

from .programs import random_program

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGE = 2 * MIB


class VirtualLoop:
    """A loop that nothing runs on: it has the device's clock, and no call of it ever comes."""

    loop = future_type = None

    def __init__(self, device: Simulated) -> None:
        self.now = lambda: device.now

    def call_at(self, when: float, callback: object) -> Any:
        assert callback
        return SimpleNamespace(cancel=lambda: None, when=when)


class Player:
    """Plays a program to a pool on virtual time, with a device that is done with all it was given a fixed time later.

    The beat is the replay's, unless another is asked for. `before` is the part of its life before virtual time began.
    """

    def __init__(self, lag: float, *, beat: float = 0.004, takes_back: bool = True, **options: object) -> None:
        self.device = Simulated(80 * GIB, latencies=Latencies.zero())
        self.lag, self.beat = lag, beat
        self.options = options
        self.takes_back = takes_back
        self.busy: dict[SimulatedStream, float] = {}

    @contextmanager
    def opened(self) -> Iterator[AsyncMemoryPool]:
        began = time.monotonic()
        with SteppedPool(self.device, segments="paged", min_free=0, stall_after=None, **self.options) as pool:  # type: ignore[arg-type]
            opened = pool._opened
            opened.core.set_loop(VirtualLoop(self.device))
            self.before = time.monotonic() - began
            opened.executor.clock = lambda: self.device.now
            settings = opened._settings() | {"take_back": self.takes_back}
            opened.core.scheduler.configure(opened.core.time, **settings)
            yield pool

    def play(self, trace: Trace) -> int:
        """Return the most that was reserved."""
        clock = self.device.clock
        assert isinstance(clock, VirtualClock)
        streams = [self.device.default_stream, *(self.device.create_stream() for _ in range(trace.streams - 1))]
        touched: set[int] = set()
        live: dict[int, Buffer] = {}
        due = 0.0
        with self.opened() as pool:
            for op, number, key, nbytes, time_us in zip(*trace.columns, strict=True):
                while due <= time_us / 1e6:
                    clock.jump(due)
                    for stream in touched:
                        self.occupy(streams[stream])
                    touched.clear()
                    pool._opened.beat()
                    due += self.beat
                clock.jump(time_us / 1e6)
                if op == Op.ALLOCATE:
                    live[key] = pool.allocate(int(nbytes), stream=streams[number])
                else:
                    buffer = live.pop(key)
                    self.occupy(streams[number], buffer)
                    buffer.free()
                    touched.add(number)
            self.stats = pool.stats()
            self.waited = pool._opened.core.scheduler.gauges()["waited"]
            pool.check()
            for buffer in live.values():
                buffer.free()
        assert self.device.reserved == 0
        return self.stats.peak_reserved

    def occupy(self, stream: SimulatedStream, *buffers: Buffer) -> None:
        """Have a stream busy until the lag has passed, with these buffers."""
        now, until = self.device.now, self.device.now + self.lag
        stream.launch(until - max(now, self.busy.get(stream, 0.0)), writes=buffers)
        self.busy[stream] = until


def program(seed: int, steps: int, streams: int) -> Trace:
    sizes = [[2 * MIB, 30 * MIB, 100_000], [MIB, 64 * MIB], [5 * MIB], [7000, 300_000, 12 * MIB]][seed % 4]
    return random_program(seed, sizes, steps=steps, streams=streams)


@pytest.mark.parametrize("lag", [0.002, 0.02])
@pytest.mark.parametrize("streams", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_taking_back_needs_no_more(seed: int, streams: int, lag: float) -> None:
    """But for two pages: blocks go where memory is, which is as close together as if all of it stayed."""
    trace = program(seed, 500, streams)
    lean, kept = (Player(lag, beat=0.009, takes_back=takes_back).play(trace) for takes_back in (True, False))
    assert lean <= 1.005 * kept + 2 * PAGE


@pytest.mark.parametrize("lag", [0.0, 0.02])
def test_taking_back_saves_memory(lag: float) -> None:
    """However late the device is, it needs less: 5 % over eight programs of one stream, and for none more by 1 %."""
    ratios = []
    for seed in range(8):
        trace = program(seed, 600, 1)
        ratios.append(Player(lag).play(trace) / Player(lag, takes_back=False).play(trace))
    assert max(ratios) <= 1.01
    assert statistics.geometric_mean(ratios) <= 0.95


@pytest.mark.parametrize("lag", [0.0, 0.004, 0.02])
@pytest.mark.parametrize("seed", range(8))
def test_a_pool_needs_what_the_replay_says(seed: int, lag: float) -> None:
    """One stream's program reserves within two pages, or a hundredth, what its replay reserves. Calls cost no time."""
    trace = program(seed, 600, 1)
    said = replay(trace, Policy(), Model(lag=lag, costs={})).peak_reserved
    assert abs(Player(lag).play(trace) - said) <= max(2 * PAGE, 0.01 * said)


@pytest.mark.parametrize("seed", range(4))
def test_streams_that_share_need_about_what_the_replay_says(seed: int) -> None:
    """A pool really has streams wait for each other, which a replay only counts: so they differ, but by little."""
    trace = program(seed, 600, 2)
    said = replay(trace, Policy(), Model(lag=0.02)).peak_reserved
    assert abs(Player(0.02, overlap=0.0).play(trace) - said) <= 0.08 * said


@pytest.mark.parametrize("seed", range(4))
def test_patience_keeps_to_its_share(seed: int) -> None:
    """All waits together take at most that share of the pool's life, whatever they gain."""
    player = Player(0.004, patience="10%")
    player.play(program(seed, 600, 2))
    assert 0 < player.waited <= 0.1 * (player.device.now + player.before)
    assert player.stats.remedies["wait"] > 0


@pytest.mark.parametrize("seed", range(4))
def test_patience_saves_memory(seed: int) -> None:
    """Who waits for what another stream is about to be done with need not ask for more; alone it waits for nothing."""
    trace = program(seed, 1000, 2)
    patient, hasty = Player(0.004, patience="20 s"), Player(0.004)
    assert patient.play(trace) < hasty.play(trace)
    assert (hasty.waited, hasty.stats.remedies.get("wait", 0)) == (0, 0)


@pytest.mark.parametrize(("seed", "streams"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_a_limit_is_kept_by_moving_pages_once_their_work_is_done(seed: int, streams: int) -> None:
    """The device raises where memory is taken away under unfinished work: so the pool waits for it, and for no more."""
    trace = program(seed, 1000, streams)
    limit = int(1.04 * trace.peak_requested) // PAGE * PAGE
    player = Player(0.02, limit=limit)
    assert player.play(trace) <= limit
    assert player.stats.remedies["wait"] > 0
