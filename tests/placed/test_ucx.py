"""Bytes that go by UCX between workers, where it is installed; without it, what a plan says."""

import asyncio
import signal
import socket
from typing import Any

import numpy as np
import psutil
import pytest

from asyncmem.pipeline import Pipeline

from .machines import Machine, Machines
from .stages import Sample, expected, three
from .test_faults import run
from .test_placed import looks, passes_on, runners

pytest.importorskip("ucxx")


@pytest.mark.asyncio
async def test_results_come_as_in_one_process(scheduler: Machine) -> None:
    """Between workers alone; no worker keeps anything."""
    async with three().place(scheduler.address, share=False, ucx=True, window="256 KiB") as pipe:
        plan = pipe.plan()
        kinds = {edge.kind for edge in plan.edges if all(plan.ends_of(edge))}
        assert kinds == {"ucx"}
        assert {edge.kind for edge in plan.edges if not all(plan.ends_of(edge))} == {"tcp"}
        assert [y async for y in pipe.map(range(60))] == expected(60)
        ends = {
            end.laddr.ip
            for node in plan.nodes[1:]
            for end in psutil.Process(node.pid).net_connections("inet")
            if end.status == psutil.CONN_LISTEN
        }
        assert ends == {"127.0.0.1"}, "UCX listens there, too"
    assert await runners(scheduler.address) == 0


@pytest.mark.asyncio
async def test_items_may_be_anything_that_needs_no_pickle(scheduler: Machine) -> None:
    """Plain values by the link, arrays by UCX, none of no bytes."""
    large, none = np.arange(100_000, dtype="i4").reshape(100, 1000), np.empty((0, 3), "f4")
    item = {"a": [large, None, 1.5], "r": Sample(3, large[::2]), "b": (b"abc", bytearray(b"d"), none, np.float32(0.5))}
    async with Pipeline(passes_on, looks).place(scheduler.address, share=False, ucx=True, types=[Sample]) as pipe:
        ((same, pixels, half, data),) = [y async for y in pipe.map([item])]
    got: Any = same
    np.testing.assert_array_equal(got["a"][0], large)
    np.testing.assert_array_equal(got["r"].pixels, large[::2])
    assert got["b"][2].shape == (0, 3)
    assert (got["a"][1:], got["b"][:2], got["b"][3]) == ([None, 1.5], (b"abc", bytearray(b"d")), np.float32(0.5))
    assert (half, data) == (np.float32(0.5), b"x" * 5000)
    assert pixels.numpy().tobytes() == bytes(range(250)) * 4


@pytest.mark.asyncio
async def test_strangers_at_its_port_get_nothing(scheduler: Machine) -> None:
    """The pipeline goes on."""
    async with three().place(scheduler.address, share=False, ucx=True) as pipe:
        assert [y async for y in pipe.map(range(5))] == expected(5)
        for node in pipe.plan().nodes[1:]:
            for end in psutil.Process(node.pid).net_connections("inet"):
                if end.status == psutil.CONN_LISTEN:
                    for junk in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(10_000), b"\xff" * 10_000):
                        with socket.create_connection((end.laddr.ip, end.laddr.port), timeout=5) as stranger:
                            stranger.send(junk)
        assert [y async for y in pipe.map(range(5, 20))] == [(number, 2.0 * number) for number in range(5, 20)]


@pytest.mark.parametrize(
    ("number", "victims"), [(signal.SIGKILL, [0, 1, 2]), (signal.SIGSTOP, [1])], ids=["killed", "still"]
)
def test_a_worker_may_be_lost(machines: Machines, number: signal.Signals, victims: list[int]) -> None:
    """Its peers let go of the memory that was on its way, and the results come exactly once."""

    async def main() -> None:
        scheduler = machines.scheduler()
        for _ in range(3):
            machines.worker(scheduler)
        for at in victims:
            options: Any = {"share": False, "ucx": True, "window": "512 KiB", "timeout": 5.0}
            async with three().place(scheduler.address, **options) as pipe:
                used = sorted({part.node for part in pipe.plan().parts if part.workers})
                await run(pipe, pipe.plan().nodes[used[at]].pid, 20, number)
                assert {edge.kind for edge in pipe.plan().edges if all(pipe.plan().ends_of(edge))} <= {"ucx", "process"}
            machines.worker(scheduler)

    asyncio.run(main())
