"""On the card no block is written by its next user before its last one is done, however the two came by it.

Kernels wait for a gate in the host's memory, so that work is pending for as long as a test needs it to be. In each test
the memory has room for one such block, and whoever is too early is seen by the values: a reader finds other words than
were written for it. The gate opens by itself after a while, for pools that rather wait than queue up behind it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.devices import Stream

from .card import Card, PoolMaker, call

SIZE = 32 << 20
OLD, NEW = 0x11111111, 0x22222222
WAIT = 5.0
SOON = 0.15
PER_THREAD = 2  # CU_STREAM_PER_THREAD


class Reader:
    """Work on a stream that waits for the gate and then counts words that are not what was written before."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.gate = card.gate()
        self.wrong = card.number()

    def read_late(self, stream: int, buffer: Buffer) -> None:
        """Submit: hold, then compare with OLD."""
        self.card.hold(stream, self.gate)
        self.card.compare(stream, buffer, OLD, self.wrong)

    def write_next(self, take: Callable[[], Buffer], stream: int, *, same: int) -> None:
        """Take memory, which must be what was at `same`, write NEW to it, and see that the late reader saw OLD."""
        with self.card.opening(self.gate, SOON):
            buffer = take()
            self.card.fill(stream, buffer, NEW)
        again = self.card.number()
        self.card.compare(stream, buffer, NEW, again)
        self.card.synchronize()
        assert buffer.address == same, "nothing was shown: this is other memory"
        assert self.wrong.value == 0
        assert again.value == 0
        buffer.free()


@pytest.fixture
def reader(card: Card) -> Reader:
    return Reader(card)


@pytest.fixture
def pool(make_pool: PoolMaker) -> AsyncMemoryPool:
    return make_pool(SIZE)


@pytest.fixture
def streams(card: Card) -> tuple[Stream, Stream, Stream]:
    return card.device.create_stream("a"), card.device.create_stream("b"), card.device.create_stream("c")


def written(card: Card, pool: AsyncMemoryPool, stream: Stream) -> Buffer:
    buffer = pool.allocate(SIZE, stream=stream, timeout=WAIT)
    card.fill(stream.handle, buffer, OLD)
    return buffer


def test_a_write_that_nothing_orders_is_seen(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream], driver: Any
) -> None:
    """The trap of these tests springs: without the pool's order between the two, the reader finds wrong words."""
    a, b, _ = streams
    buffer = written(card, pool, a)
    reader.read_late(a.handle, buffer)
    card.fill(b.handle, buffer, NEW)  # nothing has said that b may
    while not card.idle(b.handle):
        pass
    reader.gate.set(1)
    card.synchronize()
    assert reader.wrong.value == SIZE // 4
    buffer.free()
    if driver is not None:
        assert "that nothing orders" in driver.violations()[0]
        driver.forgive()


def test_memory_freed_under_a_running_kernel_goes_to_another_stream_behind_it(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """A block freed while its kernel runs is another stream's only behind that kernel."""
    a, b, _ = streams
    old = written(card, pool, a)
    reader.read_late(a.handle, old)
    address = old.address
    old.free()
    reader.write_next(lambda: pool.allocate(SIZE, stream=b, timeout=WAIT), b.handle, same=address)


def test_memory_comes_home_without_any_wait(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """On its home stream a block is there again at once, while its last kernel still runs: the stream orders them."""
    a, _, _ = streams
    old = written(card, pool, a)
    reader.read_late(a.handle, old)
    address = old.address
    old.free()
    new = pool.allocate(SIZE, stream=a)
    assert not card.idle(a.handle)
    assert new.address == address
    card.fill(a.handle, new, NEW)
    reader.gate.set(1)
    card.synchronize()
    assert reader.wrong.value == 0
    new.free()


def test_memory_handed_on_twice_is_behind_its_first_user(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """Three streams: what b took from a and freed unused is c's only behind a, whatever fence b had recorded before."""
    a, b, c = streams
    early = written(card, pool, b)  # so that b has recorded a fence, which is long reached
    early.free()
    old = written(card, pool, a)
    reader.read_late(a.handle, old)
    address = old.address
    old.free()
    middle = pool.try_allocate(SIZE, stream=b)
    if middle is not None:
        middle.free()
    reader.write_next(lambda: pool.allocate(SIZE, stream=c, timeout=WAIT), c.handle, same=address)


def test_a_request_that_cannot_be_met_hands_no_memory_to_a_third_stream(
    card: Card, reader: Reader, make_pool: PoolMaker, streams: tuple[Stream, Stream, Stream]
) -> None:
    """Three streams: b asks in vain, for which free memory is merged; a's is c's only behind a all the same."""
    a, b, c = streams
    pool = make_pool(2 * SIZE)
    keep = pool.allocate(SIZE, stream=b, timeout=WAIT)
    old = written(card, pool, a)
    reader.read_late(a.handle, old)
    address = old.address
    old.free()
    assert pool.try_allocate(2 * SIZE, stream=b) is None
    reader.write_next(lambda: pool.allocate(SIZE, stream=c, timeout=WAIT), c.handle, same=address)
    keep.free()


def test_pieces_of_freed_memory_are_behind_its_user(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """A block that is split keeps its past in every piece, and pieces that are joined keep the past of each."""
    a, b, c = streams
    halves = [pool.allocate(SIZE // 2, stream=one, timeout=WAIT) for one in (a, b)]
    for half, one in zip(halves, (a, b), strict=True):
        card.fill(one.handle, half, OLD)
        reader.read_late(one.handle, half)
    low = min(half.address for half in halves)
    for half in halves:
        half.free()
    reader.write_next(lambda: pool.allocate(SIZE, stream=c, timeout=WAIT), c.handle, same=low)


@pytest.mark.parametrize("how", ["use_on", "free", "hand_over"])
def test_a_second_user_is_waited_for(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream], how: str
) -> None:
    """A stream named by `use_on`, `free(stream=)` or `hand_over` is done with a block before its home writes again."""
    a, b, _ = streams
    old = written(card, pool, a)
    if how == "use_on":
        old.use_on(b)
    elif how == "hand_over":
        old.hand_over(b)
    else:
        b.wait(a.record())  # free(stream=) orders nothing by itself: the user has
    reader.read_late(b.handle, old)
    address = old.address
    old.free(**({"stream": b} if how == "free" else {}))
    reader.write_next(lambda: pool.allocate(SIZE, stream=a, timeout=WAIT), a.handle, same=address)


@pytest.mark.parametrize("how", ["use_on", "hand_over"])
def test_a_second_user_sees_what_home_wrote(
    card: Card, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream], how: str
) -> None:
    """`use_on` and `hand_over` make the other stream wait for what home has still to do."""
    a, b, _ = streams
    gate, wrong = card.gate(), card.number()
    buffer = pool.allocate(SIZE, stream=a, timeout=WAIT)
    card.fill(a.handle, buffer, NEW)
    card.hold(a.handle, gate)
    card.fill(a.handle, buffer, OLD)
    getattr(buffer, how)(b)
    card.compare(b.handle, buffer, OLD, wrong)
    with card.opening(gate, SOON):
        assert not card.idle(b.handle)
    card.synchronize()
    assert wrong.value == 0
    buffer.free()


def test_a_consumer_that_names_no_stream_is_waited_for(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """After a read of `__cuda_array_interface__` any stream may be using the block, so all are waited for."""
    a, b, c = streams
    old = written(card, pool, a)
    assert old.__cuda_array_interface__["data"] == (old.address, False)
    b.wait(a.record())  # the consumer's own care
    reader.read_late(b.handle, old)  # a stream that the pool has never heard of
    address = old.address
    old.free()
    del old  # which the consumer would keep for as long as it uses the memory
    reader.write_next(lambda: pool.allocate(SIZE, stream=c, timeout=WAIT), c.handle, same=address)


def test_the_default_stream_is_a_stream_like_others(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """Without a name the legacy default stream is meant, and non-blocking streams come behind its work."""
    _, b, _ = streams
    old = pool.allocate(SIZE, timeout=WAIT)
    legacy = 1  # CU_STREAM_LEGACY
    card.fill(legacy, old, OLD)
    reader.read_late(legacy, old)
    address = old.address
    old.free()
    reader.write_next(lambda: pool.allocate(SIZE, stream=b, timeout=WAIT), b.handle, same=address)


def test_the_default_stream_comes_behind_others(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """The legacy default stream waits for no non-blocking stream by itself, so the pool makes it."""
    a, _, _ = streams
    old = written(card, pool, a)
    reader.read_late(a.handle, old)
    address = old.address
    old.free()
    reader.write_next(lambda: pool.allocate(SIZE, timeout=WAIT), 1, same=address)


class ThreadWithWork:
    """A thread with late work on a block of its own default stream; it goes on, as its end would wait for that."""

    def __init__(self, card: Card, reader: Reader, pool: AsyncMemoryPool, *, frees: bool) -> None:
        self._over = threading.Event()
        made: list[Buffer] = []
        ready = threading.Event()

        def work() -> None:
            card.enter()
            buffer = pool.allocate(SIZE, stream=PER_THREAD, timeout=WAIT)
            card.fill(PER_THREAD, buffer, OLD)
            reader.read_late(PER_THREAD, buffer)
            self.address = buffer.address
            if frees:
                buffer.free()
            else:
                made.append(buffer)
            ready.set()
            self._over.wait(2 * WAIT)

        self._thread = threading.Thread(target=work)
        self._thread.start()
        assert ready.wait(WAIT)
        if not frees:
            made.pop().free()

    def end(self) -> None:
        """Let the thread go."""
        self._over.set()
        self._thread.join()


@pytest.fixture(params=["itself", "another"])
def thread(
    request: pytest.FixtureRequest, card: Card, reader: Reader, pool: AsyncMemoryPool
) -> Iterator[ThreadWithWork]:
    """A thread whose block has been freed, by itself or by this thread."""
    thread = ThreadWithWork(card, reader, pool, frees=request.param == "itself")
    yield thread
    reader.gate.set(1)
    thread.end()


def test_a_per_thread_stream_is_waited_for(
    reader: Reader, pool: AsyncMemoryPool, thread: ThreadWithWork, streams: tuple[Stream, Stream, Stream]
) -> None:
    """Memory of a thread's own default stream is another stream's only behind that thread's work, whoever freed it."""
    _, b, _ = streams
    reader.write_next(lambda: pool.allocate(SIZE, stream=b, timeout=WAIT), b.handle, same=thread.address)


def test_per_thread_streams_of_two_threads_are_two_streams(
    reader: Reader, pool: AsyncMemoryPool, thread: ThreadWithWork
) -> None:
    """The same number names another stream in each thread: one thread's memory is the other's only behind its work."""
    take = lambda: pool.allocate(SIZE, stream=PER_THREAD, timeout=WAIT)  # noqa: E731  # one line says it
    reader.write_next(take, PER_THREAD, same=thread.address)


class BareStreams:
    """Streams of the driver that nobody keeps alive."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._made: list[object] = []

    def make(self) -> int:
        """Make one and return its handle."""
        stream = call(self._driver.cuStreamCreate(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._made.append(stream)
        return int(stream)

    def destroy(self) -> None:
        """Destroy the one made last; what was submitted to it goes on."""
        call(self._driver.cuStreamDestroy(self._made.pop()))

    def close(self) -> None:
        """Destroy them all."""
        while self._made:
            self.destroy()


@pytest.fixture
def bare() -> Iterator[BareStreams]:
    streams = BareStreams()
    yield streams
    streams.close()


def test_a_bare_handle_is_waited_for(
    card: Card, reader: Reader, pool: AsyncMemoryPool, bare: BareStreams, streams: tuple[Stream, Stream, Stream]
) -> None:
    """A stream named by its number is waited for, also when it has been destroyed since."""
    _, b, _ = streams
    handle = bare.make()
    old = pool.allocate(SIZE, stream=handle, timeout=WAIT)
    card.fill(handle, old, OLD)
    reader.read_late(handle, old)
    address = old.address
    old.free()
    bare.destroy()
    reader.write_next(lambda: pool.allocate(SIZE, stream=b, timeout=WAIT), b.handle, same=address)


def test_a_handle_given_twice_names_two_streams(
    card: Card, reader: Reader, pool: AsyncMemoryPool, bare: BareStreams
) -> None:
    """A new stream with a destroyed one's number comes behind the work of the old one."""
    handle = bare.make()
    old = pool.allocate(SIZE, stream=handle, timeout=WAIT)
    card.fill(handle, old, OLD)
    reader.read_late(handle, old)
    address = old.address
    old.free()
    bare.destroy()
    if all(bare.make() != handle for _ in range(200)):
        pytest.skip("the driver gave out no handle twice")
    reader.write_next(lambda: pool.allocate(SIZE, stream=handle, timeout=WAIT), handle, same=address)


def test_without_late_fences_nobody_waits_for_later_work(
    card: Card, make_pool: PoolMaker, streams: tuple[Stream, Stream, Stream]
) -> None:
    """With `late_fences=False` memory freed before its stream was held up is taken without a wait for that, or not."""
    a, b, _ = streams
    pool = make_pool(SIZE, late_fences=False)
    gate = card.gate()
    old = written(card, pool, a)
    card.synchronize()
    old.free()
    card.hold(a.handle, gate)
    new = pool.try_allocate(SIZE, stream=b)
    if new is None:
        with card.opening(gate, SOON):
            new = pool.allocate(SIZE, stream=b, timeout=WAIT)
    card.fill(b.handle, new, NEW)
    end = time.monotonic() + WAIT
    while not card.idle(b.handle):
        assert time.monotonic() < end
    new.free()


def test_segments_that_go_back_are_done_with(
    card: Card, reader: Reader, pool: AsyncMemoryPool, streams: tuple[Stream, Stream, Stream]
) -> None:
    """Memory is given back to the driver only once the host has seen the last kernel on it done."""
    a, _, _ = streams
    old = written(card, pool, a)
    reader.read_late(a.handle, old)
    old.free()
    with card.opening(reader.gate, SOON):
        pool.empty_cache()
    card.synchronize()
    assert reader.wrong.value == 0
    assert pool.stats().trims
