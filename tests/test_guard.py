"""The guard over every test: it sees a blocked loop, and nothing where blocking is right."""

import asyncio
import threading

import pytest
import uvloop
from blockbuster import BlockingError

from asyncmem.devices import Host


@pytest.mark.asyncio
async def test_a_blocked_loop_is_seen(request: pytest.FixtureRequest) -> None:
    """What the device contract says blocks fails a test on the loop's thread, on each kind of loop."""
    loop = asyncio.get_running_loop()
    kind = "uvloop" if isinstance(loop, uvloop.Loop) else "debug" if loop.get_debug() else "eager"
    assert kind in request.node.name
    device = Host()
    with pytest.raises(BlockingError, match="block"):
        device.create_stream().synchronize_blocking()
    await asyncio.to_thread(device.close)


@pytest.mark.asyncio
@pytest.mark.may_block
async def test_blocking_on_purpose_is_let_be() -> None:
    """A test that is about blocking says so by its mark."""
    device = Host()
    device.create_stream().synchronize_blocking()
    device.close()


def test_other_threads_may_block() -> None:
    """The guard looks at threads with a running loop only."""
    device = Host()
    worker = threading.Thread(target=device.create_stream().synchronize_blocking)
    worker.start()
    worker.join()
    device.close()
