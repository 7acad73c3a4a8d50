"""Memory moves in the order of streams, without a wait on the host."""

from __future__ import annotations

import threading

import pytest

from asyncmem import InvalidRequest
from asyncmem.devices import Latencies, Simulated
from tests.conservation import whole

from .spilling import LIMIT, LONG, Marks, fill, holds, make_pool
from .support import MIB, quick_device


def test_moving_waits_for_nothing_but_orders_everything() -> None:
    """Work of an hour on two streams lies before the copy; the request has its memory at once, behind all of it.

    The checker of the simulated device raises where anything is out of order.
    """
    device = quick_device()
    home, other, taker = (device.create_stream() for _ in range(3))
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=home)
        with marked as buffer:
            home.launch(3600.0, writes=[buffer])
        with marked.use(other) as buffer:
            other.launch(3600.0, writes=[buffer])
        taken = pool.allocate(LIMIT, stream=taker)
        assert device.now == 0
        taker.launch(1.0, writes=[taken])
        taken.free()
        with marked as buffer:
            assert device.now == 0
            home.launch(1.0, writes=[buffer])
        again = pool.allocate(LIMIT, stream=other)
        other.launch(1.0, writes=[again])
        again.free()
        marked.free()
        device.run_until_idle()
        assert device.now > 7200
        whole(pool)
        whole(pool._host_pool("spilled"))


def test_memory_of_streams_that_nobody_named_moves_behind_all_of_them() -> None:
    """An export to an unknown consumer is ordered by a fence of the whole device."""
    device = quick_device()
    home, unknown = device.create_stream(), device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=home)
        with marked as buffer:
            buffer.use_on(None)
            unknown.wait(home.record())
            unknown.launch(3600.0, writes=[buffer])
        taken = pool.allocate(LIMIT, stream=home)
        home.launch(1.0, writes=[taken])
        taken.free()
        device.run_until_idle()


def test_free_names_the_last_stream() -> None:
    """As a buffer's free does; a wrong one changes nothing."""
    device = quick_device()
    home, other = device.create_stream(), device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=home)
        with pytest.raises(InvalidRequest):
            marked.free(quick_device().create_stream())
        with marked as buffer:
            other.wait(home.record())
            other.launch(3600.0, writes=[buffer])
        marked.free(other)
        taken = pool.allocate(LIMIT, stream=home)
        home.launch(1.0, writes=[taken])
        taken.free()
        device.run_until_idle()


def test_who_comes_during_the_copy_comes_after_the_request() -> None:
    """Where the host may touch memory, the copy is waited for; a use that comes meanwhile does not barge in."""
    device = Simulated(64 * MIB, backing=True, autojump=False, latencies=Latencies.zero())
    stream = device.create_stream()
    with make_pool(device) as pool, Marks(pool) as marks:
        marked = marks.now(LIMIT, stream=stream)
        with marked as buffer:
            fill(buffer, 7)
            stream.launch(1.0, writes=[buffer])
        order: list[str] = []

        def ask() -> None:
            with pool.allocate(LIMIT, timeout=LONG) as buffer:
                order.append("request")
                fill(buffer, 0)

        def use() -> None:
            with marked.use(timeout=LONG) as buffer:
                order.append("use" if holds(buffer, 7) else "other bytes")

        threads = [threading.Thread(target=ask), threading.Thread(target=use)]
        threads[0].start()
        while not device.calls_of("block"):
            threads[0].join(0.001)
        threads[1].start()
        while any(one.is_alive() for one in threads):
            device.advance(10)
            threads[1].join(0.001)
        assert order == ["request", "use"]
