"""Both ends of an edge over a real connection, with memory of a GPU."""

import asyncio
import os
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.distributed.edges import Incoming, Outgoing, Parcel, nothing
from asyncmem.distributed.link import Link, LinkLost, connect, listen
from asyncmem.distributed.plan import Edge
from asyncmem.distributed.runner import memory_for

MIB = 1 << 20


@pytest.mark.asyncio
@pytest.mark.usefixtures("driver")
async def test_arrays_of_a_gpu_go_over_tcp_and_give_their_credit_back() -> None:
    """By page-locked memory on both sides; three times as many as the window holds, each on the GPU again."""
    edge = Edge(0, 1, "tcp", 4 * MIB)
    async with AsyncExitStack() as resources:
        staging, window = [await memory_for(resources, "edge", "cuda:0", edge.window, "pinned") for _ in range(2)]
        onto = await memory_for(resources, "edge", "cuda:0", edge.window)
        pool = await resources.enter_async_context(AsyncMemoryPool("cuda:0", limit=64 * MIB, min_free=0))
        arrived = asyncio.Queue[Parcel]()
        accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        server, address = await listen("127.0.0.1", accepted.set_result, None)
        sending = await connect(address, None, silence=5.0)
        outgoing = Outgoing(edge, (), staging=staging)
        incoming = Incoming(edge, (), arrived.put_nowait, window, onto)
        tasks = [asyncio.create_task(outgoing.run(sending)), asyncio.create_task(incoming.run(await accepted))]

        async def send() -> None:
            for number in range(12):
                array = await pool.full((MIB // 4,), number, "float32")
                await outgoing.send(Parcel(number, number, {"x": array}, nothing))

        tasks.append(asyncio.create_task(send()))
        for number in range(12):
            parcel = await arrived.get()
            value: Any = parcel.value
            assert value["x"].buffer.device.kind == "cuda"
            back = np.empty(MIB // 4, "float32")
            await value["x"].copy_to(back)
            assert (back == number).all()
            parcel.value = None
            parcel.done()
            del value, parcel
        await tasks.pop()
        for task in tasks:
            task.cancel()
        sending.close()
        server.close()
        await asyncio.wait(tasks)
        await server.wait_closed()


@pytest.mark.asyncio
@pytest.mark.parametrize("copied", [False, True])
async def test_an_edge_that_is_closed_shares_nothing_more(*, copied: bool) -> None:
    """Its receiver may end before the sending stage does, and nobody would end what that exports then."""
    edge = Edge(0, 1, "share", 4 * MIB)
    async with AsyncExitStack() as resources, asyncio.timeout(5):
        keep = await memory_for(resources, "edge", "host", edge.window, "shared")
        outgoing = Outgoing(edge, (), memory=keep, keep=keep, pid=os.getpid())
        await outgoing.close()
        value = np.zeros(MIB, "uint8") if copied else await keep.empty((MIB,), "uint8")
        with pytest.raises(LinkLost):
            await outgoing.send(Parcel(0, 0, {"x": value}, nothing))
        del value
        assert (keep.stats().pinned_bytes, keep.stats().allocated_bytes) == (0, 0)


@pytest.mark.asyncio
async def test_a_link_that_has_ended_can_be_closed_and_says_why() -> None:
    """Also one whose last bytes had to wait; each call gets an error of its own, which keeps the frames of no other."""
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    server, address = await listen("127.0.0.1", accepted.set_result, None)
    reading = await connect(address, None, silence=5.0)
    writing = await accepted
    assert writing._transport is not None
    writing._transport.write(bytes(16 * MIB))
    writing.close(at_once=False)
    await reading.read(16 * MIB)
    await writing.ended.wait()
    writing.close()
    await reading.ended.wait()
    errors = []
    for _ in range(2):
        with pytest.raises(LinkLost, match="the other side") as caught:
            await reading.read(1)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    reading.close()
    server.close()
    await server.wait_closed()
