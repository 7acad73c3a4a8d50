"""A fence that has told whoever asked is kept by nobody."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from asyncmem.devices import Cuda

from .fake import FakeDriver


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Leave it to reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.fake_only
def test_a_callback_that_knows_its_fence_keeps_it_only_until_it_has_run(fake: FakeDriver, cuda: Cuda) -> None:
    """Whoever notes by a callback what a fence is for, and never forgets it, leaves nothing for the collector."""
    stream = cuda.create_stream()
    fake.hold(stream.handle)
    fence = stream.record()
    told = threading.Event()
    fence.notify(lambda known=fence: told.set() if known else None)
    kept = weakref.ref(fence)
    fence = None
    fake.release(stream.handle)
    assert told.wait(60)
    for _ in range(1000):
        if kept() is None:
            break
        threading.Event().wait(0.005)  # the thread that told lets go of the callback when it pleases
    assert kept() is None
