"""A channel holds its producers to its bytes, keeps stream order, ends as anyio's streams do, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import pytest
from anyio import BrokenResourceError, ClosedResourceError, EndOfStream, WouldBlock

from asyncmem import Array, AsyncMemoryPool, Buffer, InvalidRequest
from asyncmem.devices import Simulated
from asyncmem.devices.simulated.order import StreamOrderError
from asyncmem.devices.simulated.stream import SimulatedStream
from asyncmem.pipeline import Channel, ChannelStats
from asyncmem.testing import run_steps
from tests.sweeps import Scenario, Stage, sweep, sweep_on_trio

from .loops import Run
from .support import MIB, make_pool, staged, stepped_pool, turns

Numbered = tuple[int, Buffer]


async def produce(channel: Channel[Numbered], numbers: range) -> None:
    """Send one buffer of a MiB a number, and close this producer's end."""
    with channel.sender() as sender:
        for number in numbers:
            await sender.send((number, await channel.allocate(MIB)))


def test_items_come_in_order_and_their_memory_bounds_the_producer(everywhere: Run) -> None:
    """Twenty items of a MiB pass through two: the producer waits for memory, and nobody else is held up."""

    async def main() -> None:
        async with make_pool() as pool, Channel[Numbered](pool, "2 MiB") as channel:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(produce, channel, range(20))
                numbers = []
                async for number, buffer in channel:
                    numbers.append(number)
                    await turns(3)
                    buffer.free()
            assert numbers == list(range(20))
            assert channel.stats().peak_bytes == 2 * MIB
            assert channel.quota.stats().waits > 0
            assert pool.stats().allocated_bytes == 0

    everywhere(main)


def test_several_producers_and_consumers_share_a_channel(everywhere: Run) -> None:
    """It ends when the last producer has closed its end, and every item arrives once."""

    async def main() -> None:
        seen: list[int] = []

        async def consume(channel: Channel[Numbered]) -> None:
            async with channel.receiver() as receiver:
                async for number, buffer in receiver:
                    seen.append(number)
                    buffer.free()
                    await turns()

        async with make_pool() as pool, Channel[Numbered](pool, "4 MiB") as channel:
            async with anyio.create_task_group() as tasks:
                with channel.sender():  # until all are there
                    for first in (0, 10, 20):
                        tasks.start_soon(produce, channel, range(first, first + 10))
                    for _ in range(2):
                        tasks.start_soon(consume, channel)
                    await turns(5)
            assert sorted(seen) == list(range(30))
            assert pool.stats().allocated_bytes == 0

    everywhere(main)


def test_closing_lets_what_was_sent_arrive(virtually: Run) -> None:
    """After `close` nothing more is sent; what is in the channel is received, and then comes the end."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB) as channel:
            await channel.send(1)
            channel.close()
            channel.close()
            with pytest.raises(ClosedResourceError):
                await channel.send(2)
            with pytest.raises(ClosedResourceError):
                channel.sender()
            assert await channel.receive() == 1
            for _ in range(2):
                with pytest.raises(EndOfStream):
                    await channel.receive()

    virtually(main)


def test_closing_wakes_who_waits_to_receive(virtually: Run) -> None:
    """A consumer that waits for an item hears of the end."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB) as channel, anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(EndOfStream):
                    await channel.receive()

            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            channel.close()

    virtually(main)


def test_failing_drops_what_is_in_it_and_tells_both_sides(virtually: Run) -> None:
    """Both sides get `BrokenResourceError` because of the error, and the memory of the items is free at once."""

    async def main() -> None:
        wrong = ValueError("wrong")
        async with stepped_pool() as pool, Channel[Buffer](pool, MIB) as channel:
            await channel.send(await channel.allocate(MIB))
            channel.fail(wrong)
            assert pool.stats().allocated_bytes == 0
            with pytest.raises(BrokenResourceError) as broken:
                await channel.receive()
            assert broken.value.__cause__ is wrong
            with pytest.raises(BrokenResourceError) as broken, await channel.allocate(MIB) as late:
                await channel.send(late)
            assert broken.value.__cause__ is wrong

    virtually(main)


def test_without_consumers_nothing_can_be_sent(virtually: Run) -> None:
    """When the last receiver has closed its end, the channel is broken for those who send."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB) as channel:
            first, last = channel.receiver(), channel.receiver()
            first.close()
            first.close()
            await channel.send(1)
            with pytest.raises(ClosedResourceError):
                await first.receive()
            last.close()
            with pytest.raises(BrokenResourceError):
                await channel.send(2)

    virtually(main)


def test_leaving_the_channel_gives_its_memory_and_its_quota_back(virtually: Run) -> None:
    """Items that nobody received are dropped; what was received stays valid; the pool knows the quota no more."""

    async def main() -> None:
        async with stepped_pool() as pool:
            async with Channel[Buffer](pool, "2 MiB") as channel:
                for _ in range(2):
                    await channel.send(await channel.allocate(MIB))
                kept = await channel.receive()
            assert pool.stats().allocated_bytes == MIB
            assert kept.alive
            assert not pool._opened.budgets
            kept.free()
            pool.check()

    virtually(main)


def test_max_items_holds_back_items_without_memory(virtually: Run) -> None:
    """With `max_items` a sender waits for a place, and one that is cancelled there has sent nothing."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB, max_items=2) as channel:
            await channel.send(1)
            await channel.send(2)
            with anyio.move_on_after(1) as patience:
                await channel.send(3)
            assert patience.cancelled_caught
            assert [await channel.receive() for _ in range(2)] == [1, 2]
            await channel.send(4)
            assert await channel.receive() == 4
            assert len(channel) == 0

    virtually(main)


def test_calls_that_do_not_wait_say_that_they_would(virtually: Run) -> None:
    """They keep the order of those that do, and end as those do."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB, max_items=2) as channel:
            sender, receiver = channel.sender(), channel.receiver()
            with pytest.raises(WouldBlock):
                receiver.receive_nowait()
            sender.send_nowait(1)
            await sender.send(2)
            with pytest.raises(WouldBlock):
                channel.send_nowait(3)
            assert receiver.receive_nowait() == 1
            channel.send_nowait(3)
            sender.close()
            with pytest.raises(ClosedResourceError):
                channel.send_nowait(4)
            assert [channel.receive_nowait(), channel.receive_nowait()] == [2, 3]
            with pytest.raises(EndOfStream):
                receiver.receive_nowait()
            receiver.close()
            for end in (sender, receiver):
                with pytest.raises(ClosedResourceError):
                    end.clone()
            with pytest.raises(BrokenResourceError):
                channel.send_nowait(4)

    virtually(main)


def test_statistics_say_who_waits_for_what(virtually: Run) -> None:
    """Each number of a channel at work."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[object](pool, MIB, max_items=1) as channel:
            assert channel  # though it is empty
            async with channel.sender() as sender, channel.receiver() as receiver, anyio.create_task_group() as tasks:
                tasks.start_soon(receiver.receive)
                await anyio.wait_all_tasks_blocked()
                assert channel.stats().waiting_to_receive == 1
                await sender.send(await channel.allocate(MIB))  # goes to who waits
                await sender.send(1)
                tasks.start_soon(sender.send, 2)
                buffer = await channel.allocate(MIB)
                tasks.start_soon(partial(channel.empty, MIB, "uint8"))
                await anyio.wait_all_tasks_blocked()
                assert channel.stats() == ChannelStats(
                    items=1, max_items=1, senders=1, receivers=1, waiting_to_send=1, waiting_to_receive=0,
                    waiting_for_memory=1, held_bytes=MIB, peak_bytes=MIB, limit_bytes=MIB,
                )  # fmt: skip
                with sender.clone() as other, receiver.clone():
                    assert (channel.stats().senders, channel.stats().receivers) == (2, 2)
                    assert repr(other).startswith("<asyncmem.Sender of <asyncmem.Channel")
                    assert "open, 1 items" in repr(other)
                assert [await receiver.receive(), await receiver.receive()] == [1, 2]
                buffer.free()
            assert channel.closed
            assert (channel.stats().senders, channel.stats().receivers) == (0, 0)

    virtually(main)


def test_a_stream_that_cannot_be_costs_no_place_and_no_item(virtually: Run) -> None:
    """What is wrong is said before anything is taken."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB, max_items=1) as channel:
            for _ in range(3):
                with pytest.raises(InvalidRequest):
                    await channel.send(1, stream="none of ours")
            await channel.send(1)
            with pytest.raises(InvalidRequest):
                await channel.receive(stream="none of ours")
            assert await channel.receive() == 1

    virtually(main)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_an_end_that_is_dropped_says_so(side: str) -> None:
    """The other side would wait for ever."""

    async def main() -> None:
        async with stepped_pool() as pool:
            async with Channel[int](pool, MIB) as channel:
                with pytest.warns(ResourceWarning, match="was dropped"):
                    getattr(channel, side)()
                end = getattr(channel, side)()
                end.close()
                del end
                left = getattr(channel, side)()
            del left  # the channel has ended before it

    run_steps(main())


def test_an_item_cancelled_in_delivery_keeps_its_place() -> None:
    """A consumer that is cancelled in the step in which its item came leaves it in front of those sent after it."""

    async def main() -> None:
        async with stepped_pool() as pool, Channel[int](pool, MIB) as channel:
            task = asyncio.create_task(channel.receive())
            await anyio.wait_all_tasks_blocked()
            await channel.send(1)
            await channel.send(2)
            assert task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [await channel.receive() for _ in range(2)] == [1, 2]

    run_steps(main())


@dataclass
class Batch:
    """An item as programs have them."""

    images: Array | None
    labels: dict[str, Buffer]
    number: int


def packings() -> dict[str, Callable[[Buffer], object]]:
    return {
        "buffer": lambda buffer: buffer,
        "array": lambda buffer: buffer.view("float32"),
        "nest": lambda buffer: (1, ["text", {"deep": buffer.view("uint8")}]),
        "dataclass": lambda buffer: Batch(None, {"label": buffer}, 1),
    }


def may_touch(stream: SimulatedStream, touched: tuple[int, int]) -> bool:
    """Let a stream read memory, and say whether the order checker found that in order."""
    try:
        stream.launch(1.0, reads=[touched])
    except StreamOrderError:
        return False
    return True


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("packing", packings())
def test_the_consumers_stream_waits_for_the_producers(packing: str, named: bool) -> None:
    """Work on the stream that a consumer names is in order behind the producer's, however an item is packed.

    So is the next producer's work on the block that the consumer freed, which is the same.
    """

    async def main() -> None:
        device = Simulated("2 MiB")
        async with AsyncMemoryPool(device, limit="2 MiB", segment_size="2 MiB") as pool:
            producing, consuming = device.create_stream("producing"), device.create_stream("consuming")
            async with Channel[object](pool, "2 MiB") as channel:
                for _ in range(3 if named else 1):
                    buffer = await channel.allocate(2 * MIB, stream=producing)
                    producing.launch(1.0, writes=[buffer])
                    await channel.send((packings()[packing](buffer), (buffer.address, buffer.nbytes)))
                    del buffer
                    item = await channel.receive(stream=consuming if named else None)
                    assert isinstance(item, tuple)
                    assert may_touch(consuming, item[1]) is named
                    del item

    anyio.run(main)


@pytest.mark.parametrize("named", [True, False])
def test_work_beside_home_is_waited_for_when_the_producer_names_its_stream(named: bool) -> None:
    """An item that was last worked on beside its home is in order behind that stream, if the producer names it."""

    async def main() -> None:
        device = Simulated("2 MiB")
        async with AsyncMemoryPool(device, limit="2 MiB", segment_size="2 MiB") as pool:
            other, consuming = device.create_stream("other"), device.create_stream("consuming")
            async with Channel[Buffer](pool, "2 MiB") as channel:
                buffer = await channel.allocate(2 * MIB)
                buffer.use_on(other)
                other.launch(1.0, writes=[buffer])
                await channel.send(buffer, stream=other if named else None)
                received = await channel.receive(stream=consuming)
                assert may_touch(consuming, (received.address, received.nbytes)) is named
                received.free()

    anyio.run(main)


@pytest.mark.parametrize("wrong", [{"nbytes": 0}, {"nbytes": "9 MiB"}, {"nbytes": 1, "max_items": 0}])
def test_a_quota_that_cannot_be_is_refused(virtually: Run, wrong: dict[str, object]) -> None:
    """No bytes, more than the pool has, and room for no item are refused at the call, and leave nothing behind."""

    async def main() -> None:
        async with stepped_pool() as pool:
            with pytest.raises(InvalidRequest, match=next(reversed(wrong))):
                Channel(pool, **wrong)  # type: ignore[arg-type]  # what this is about
            with pytest.raises(InvalidRequest, match="a pool or a budget"):
                Channel("host", MIB)  # type: ignore[arg-type]  # likewise
            assert not pool._opened.budgets

    virtually(main)


def test_a_full_channel_lets_others_run(virtually: Run) -> None:
    """A task that sends and receives without ever having to wait lets the loop turn now and then."""

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await turns()

        async with stepped_pool() as pool, Channel[int](pool, MIB) as channel, anyio.create_task_group() as tasks:
            tasks.start_soon(tick)
            for number in range(500):
                await channel.send(number)
            seen = ticks
            for _ in range(500):
                await channel.receive()
            tasks.cancel_scope.cancel()
        assert seen >= 3
        assert ticks - seen >= 3

    virtually(main)


async def items_pass_through(stage: Stage) -> None:
    """Two producers and two consumers: whoever is cancelled when, each item that was sent arrives once."""
    async with staged(stage) as pool:
        channel = Channel[Buffer](pool, "2 MiB")
        sent: list[int] = []
        received: list[int] = []

        async def send(first: int) -> None:
            for number in (first, first + 1):
                buffer = await stage.watch(channel.quota.allocate_async(MIB + 512 * number))
                sent.append(buffer.nbytes)
                await channel.send(buffer)
                del buffer
                await turns()

        async def receive() -> None:
            async for buffer in channel:
                received.append(buffer.nbytes)
                buffer.free()

        for name, first in {"ann": 0, "ben": 2}.items():
            stage.actor(name, lambda first=first: send(first))
        for name in ("eve", "joe"):
            stage.actor(name, receive)
        await anyio.sleep(5)
        with anyio.move_on_after(5):  # whom a struck consumer has left waiting for memory, this one serves
            await receive()
        channel.close()
        await stage.finish()
        assert sorted(received) == sorted(sent)
        assert len(channel) == 0
        channel.quota.close()


async def senders_wait_for_places(stage: Stage) -> None:
    """A sender that is cancelled while it waits for a place has sent nothing, and its place goes to the next."""
    async with staged(stage) as pool, Channel[str](pool, MIB, max_items=1) as channel:
        sent: list[str] = []

        async def send(name: str) -> None:
            await channel.send(name)
            sent.append(name)

        for name in ("ann", "ben", "joe"):
            stage.actor(name, lambda name=name: send(name))
        received = []
        with anyio.move_on_after(5):
            while True:
                received.append(await channel.receive())
        assert received == sent


SCENARIOS: dict[str, Scenario] = {one.__name__: one for one in (items_pass_through, senders_wait_for_places)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelling_anybody_at_any_step_loses_nothing(name: str) -> None:
    """Each kind of cancellation strikes each actor at each of its steps, in order of arrival and in another."""
    assert sweep(SCENARIOS[name], seeds=(None, 1), stride=2).strikes > 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_trio_loses_nothing(name: str) -> None:
    """The same, on trio."""
    assert sweep_on_trio(SCENARIOS[name], seeds=(0, 1), stride=2).strikes > 10
