"""Memory inside captured CUDA graphs: every replay finds its blocks its own, until the graph is released."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cuda.bindings import driver

from asyncmem import AsyncmemError
from asyncmem.devices import Stream

from .card import Card, PoolMaker, call

SIZE = 8 << 20
WAIT = 10.0
GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


class Capture:
    """What a stream was given between two moments, to be run again and again."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.program: Any = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture, in the mode that forbids most."""
        call(driver.cuStreamBeginCapture(self._stream, GLOBAL))
        try:
            yield
        finally:
            graph = call(driver.cuStreamEndCapture(self._stream))
        self.program = call(driver.cuGraphInstantiate(graph, 0))
        call(driver.cuGraphDestroy(graph))

    def replay(self) -> None:
        """Submit the captured work to its stream."""
        call(driver.cuGraphLaunch(self.program, self._stream))

    def close(self) -> None:
        """Be done with it."""
        if self.program is not None:
            call(driver.cuGraphExecDestroy(self.program))


@pytest.fixture
def stream(card: Card) -> Stream:
    return card.device.create_stream("captured")


def test_a_replayed_graph_keeps_its_memory(card: Card, make_pool: PoolMaker, stream: Stream) -> None:
    """What a captured program freed is nobody else's while it can be replayed, and anybody's once it is released."""
    pool = make_pool(4 * SIZE)
    other = card.device.create_stream("other")
    wrong = card.number()
    capture = Capture(stream.handle)
    pool.allocate(SIZE, stream=stream, timeout=WAIT).free()
    with pool.graph() as graph, capture.capturing():
        first = pool.allocate(SIZE, stream=stream)
        second = pool.allocate(SIZE, stream=stream)
        for value, buffer in enumerate((first, second), 1):
            card.fill(stream.handle, buffer, value)
        for value, buffer in enumerate((first, second), 1):
            card.compare(stream.handle, buffer, value, wrong)
        taken = {first.address, second.address}
        first.free()
        second.free()
    others = []
    while (buffer := pool.try_allocate(SIZE, stream=other)) is not None:
        others.append(buffer)
    assert not taken & {buffer.address for buffer in others}
    for round_ in range(20):
        for buffer in others:
            card.fill(other.handle, buffer, 100 + round_)
        capture.replay()
        for buffer in others:
            card.compare(other.handle, buffer, 100 + round_, wrong)
    card.synchronize()
    assert wrong.value == 0
    for buffer in others:
        buffer.free()
    capture.close()
    graph.release()
    everything = pool.allocate(4 * SIZE, stream=other, timeout=WAIT)
    everything.free()


def test_a_capturing_stream_gets_no_memory_outside_of_a_graph(card: Card, make_pool: PoolMaker, stream: Stream) -> None:
    """Whoever captures without `pool.graph()` hears of it at the allocation, and the capture goes on."""
    pool = make_pool(4 * SIZE)
    wrong = card.number()
    buffer = pool.allocate(SIZE, stream=stream, timeout=WAIT)
    card.fill(stream.handle, buffer, 7)
    capture = Capture(stream.handle)
    with capture.capturing():
        card.compare(stream.handle, buffer, 7, wrong)
        with pytest.raises(AsyncmemError):
            pool.allocate(SIZE, stream=stream)
    capture.replay()
    card.synchronize()
    assert wrong.value == 0
    capture.close()
    buffer.free()


def test_frees_while_others_capture_are_safe(card: Card, make_pool: PoolMaker, stream: Stream) -> None:
    """A block of a capturing stream, freed meanwhile, is not written by others before the stream's work is over."""
    pool = make_pool(SIZE)
    other = card.device.create_stream("other")
    wrong = card.number()
    buffer = pool.allocate(SIZE, stream=stream, timeout=WAIT)
    gate = card.gate()
    card.fill(stream.handle, buffer, 7)
    card.hold(stream.handle, gate)
    card.compare(stream.handle, buffer, 7, wrong)
    capture = Capture(stream.handle)
    with pool.graph() as graph, capture.capturing():
        buffer.free()
    capture.close()
    graph.release()
    with card.opening(gate, 0.15):
        taken = pool.allocate(SIZE, stream=other, timeout=WAIT)
        card.fill(other.handle, taken, 8)
    card.synchronize()
    assert wrong.value == 0
    taken.free()
