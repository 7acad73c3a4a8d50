"""Memory goes to other libraries on a GPU and comes back: in order, over the same addresses, for as long as needed.

The fake driver follows the order of all work, and fails a test whose work used memory without one. What needs no
work to be held up is the same on a real card.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncmem
from asyncmem import Array, AsyncMemoryPool, Buffer, InvalidRequest, exchange
from asyncmem.arrays._dlpack import receive
from asyncmem.devices import Cuda, GpuStream

from .fake import FakeDriver

NBYTES = 1 << 20
LIMIT = 2 << 20
LEGACY, PER_THREAD = 1, 2


@pytest.fixture
def pool(request: pytest.FixtureRequest, cuda: Cuda) -> Iterator[AsyncMemoryPool]:
    """A pool of one segment; what the process opened for borrowed memory is closed with it."""
    with AsyncMemoryPool(cuda, limit=LIMIT, segment_size=LIMIT, min_free=0) as pool:
        yield pool
        pool.check()
    # What a test was given would be kept until the last look at what is left.
    request.node.funcargs.clear()
    close_shared()


def close_shared() -> None:
    exchange._cores.clear()
    while exchange._devices:
        exchange._devices.popitem()[1].close()


class Library(Cuda):
    """Another library: it makes streams in the same context, of which the pool's device hears numbers alone."""

    def create_stream(self, name: str | None = None) -> GpuStream:
        stream = super().create_stream(name)
        self.context.remove_stream(stream.handle)  # devices of one card share what they know of its streams
        return stream


@pytest.fixture
def theirs() -> Iterator[Library]:
    with contextlib.closing(Library(0)) as device:
        yield device


def spot(buffer: Buffer) -> list[tuple[int, int]]:
    return [(buffer.address, buffer.nbytes)]


@contextlib.contextmanager
def let_go_soon(fake: FakeDriver) -> Iterator[None]:
    """Let held streams go on while somebody waits for them, and never later: no timer goes off in another test."""
    timer = threading.Timer(0.05, fake.release)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


class Consumer:
    """An array of another library over exported memory."""

    def __init__(self, array: Array | Buffer, stream: int | None, *, versioned: bool = True) -> None:
        self.loan = receive(array.__dlpack__(stream=stream, max_version=(1, 0) if versioned else None))

    @property
    def spot(self) -> list[tuple[int, int]]:
        return [(self.loan.address, NBYTES)]


class Producer:
    """A tensor of another library: DLPack with the stream that its work is on."""

    def __init__(self, device: Cuda, place: tuple[int, int] = (2, 0)) -> None:
        self.place = place
        self.stream = device.create_stream("producer")
        self.pool = AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT)
        self.array = self.pool.allocate(NBYTES, stream=self.stream).view("int32", (512, -1))
        self.asked: list[dict[str, Any]] = []

    def __dlpack__(self, **asked: Any) -> object:
        self.asked.append(asked)
        return self.array.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def close(self) -> None:
        self.array.buffer.free()
        self.pool.close()


class OnlyInterface:
    """What numba's arrays offer."""

    def __init__(self, producer: Producer, **changes: object) -> None:
        self.interface = {**producer.array.__cuda_array_interface__, **changes}

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return self.interface


@pytest.fixture
def producer(theirs: Cuda) -> Iterator[Producer]:
    with contextlib.closing(Producer(theirs)) as producer:
        yield producer


# -- out ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("number", [None, LEGACY, PER_THREAD, "handle"])
def test_a_consumer_works_behind_the_home_stream(
    pool: AsyncMemoryPool, theirs: Cuda, fake: FakeDriver, number: Any, versioned: bool
) -> None:
    """The stream that the consumer names waits for what the home stream had to do; None is the legacy default."""
    home, foreign = pool.device.create_stream(), theirs.create_stream()
    buffer = pool.allocate(NBYTES, stream=home)
    fake.hold(home.handle)
    fake.launch(home.handle, writes=spot(buffer))
    handle = foreign.handle if number == "handle" else number
    consumer = Consumer(buffer, handle, versioned=versioned)
    assert consumer.loan.device == (2, 0)
    assert consumer.loan.address == buffer.address
    fake.launch(handle or LEGACY, reads=consumer.spot, writes=consumer.spot)
    fake.release()
    del consumer
    buffer.free()
    assert fake.violations() == []


def test_a_consumer_that_asks_for_no_order_gets_none(pool: AsyncMemoryPool, fake: FakeDriver) -> None:
    """-1 leaves the order to the consumer: here it has none, and the fake sees it."""
    home, other = pool.device.create_stream(), pool.device.create_stream()
    with pool.allocate(NBYTES, stream=home) as buffer:
        fake.hold(home.handle)
        fake.launch(home.handle, writes=spot(buffer))
        consumer = Consumer(buffer, -1)
        fake.launch(other.handle, reads=consumer.spot)
        del consumer
        fake.release()
    assert len(fake.violations()) == 1
    fake.forgive()


@pytest.mark.parametrize("end", ["free, let go", "let go, free", "drop, let go"])
@pytest.mark.parametrize("number", ["known", "bare", "ended", "default", "none", "interface"])
def test_memory_is_used_again_behind_its_consumer(
    pool: AsyncMemoryPool, theirs: Cuda, fake: FakeDriver, number: str, end: str
) -> None:
    """Whatever the consumer said of its stream, and whoever lets go last, the memory's next user comes behind it."""
    home, third = pool.device.create_stream(), pool.device.create_stream()
    foreign = theirs.create_stream()
    if number == "known":
        pool.device.stream_of(foreign)
    buffer = pool.allocate(LIMIT, stream=home)
    place = spot(buffer)
    array = buffer.view("float32")
    consumer: object
    if number == "interface":
        consumer = array.__cuda_array_interface__ and array
    else:
        stream = {"default": None, "none": -1}.get(number, foreign.handle)
        consumer = Consumer(array, stream)
    handle = LEGACY if number == "default" else foreign.handle
    fake.hold(handle)
    fake.launch(handle, reads=place, writes=place)
    if number == "ended":
        del foreign
        gc.collect()
    for step in end.split(", "):
        if step == "let go":
            del consumer, array
            gc.collect()
        elif step == "free":
            buffer.free()
        else:
            del buffer
    assert pool.stats().exported_bytes == 0
    with let_go_soon(fake):
        after = pool.allocate(LIMIT, stream=third, timeout=10)
    assert spot(after) == place
    fake.launch(third.handle, writes=place)
    after.free()
    fake.release()
    assert fake.violations() == []


def test_memory_stays_while_a_consumer_has_it(pool: AsyncMemoryPool) -> None:
    """A freed buffer's block is nobody's until the last export is gone, also by another thread's doing."""
    buffer = pool.allocate(LIMIT)
    consumers = [Consumer(buffer, LEGACY), Consumer(buffer.view("int8"), -1)]
    buffer.free()
    while consumers:
        assert pool.stats().exported_bytes == LIMIT
        assert pool.try_allocate(LIMIT) is None
        thread = threading.Thread(target=consumers.pop)
        thread.start()
        thread.join()
    assert pool.stats().exported_bytes == 0
    pool.allocate(LIMIT, timeout=10).free()


@pytest.mark.parametrize("view", [True, False])
def test_the_array_interface_is_version_3(pool: AsyncMemoryPool, view: bool) -> None:
    """It says where, what, and which stream: 1 for the legacy default, 2 for the thread's own, else the handle."""
    own = pool.device.create_stream()
    for stream, number in ((None, LEGACY), (PER_THREAD, PER_THREAD), (own, own.handle)):
        buffer = pool.allocate(4096, stream=stream)
        interface = (buffer.view("complex64", (2, -1)) if view else buffer).__cuda_array_interface__
        assert interface == {
            "version": 3,
            "shape": (2, 256) if view else (4096,),
            "typestr": "<c8" if view else "|u1",
            "data": (buffer.address, False),
            "strides": None,
            "stream": number,
        }
        assert not hasattr(buffer, "__array_interface__")
        buffer.free()


@pytest.mark.parametrize("stream", [0, -2, 3, 1 << 70])
def test_numbers_that_are_no_stream_are_refused(pool: AsyncMemoryPool, stream: int) -> None:
    """Nothing is exported then, and the buffer stays as it was."""
    with pool.allocate(4096) as buffer, pytest.raises(InvalidRequest, match="stream"):
        buffer.__dlpack__(stream=stream)
    assert pool.stats().exported_bytes == 0


def test_the_host_gets_no_gpu_memory(pool: AsyncMemoryPool) -> None:
    """numpy, and whoever asks for a copy or for host memory, hears that it must be copied on a stream."""
    with pool.allocate(4096) as buffer:
        array = buffer.view("float32")
        for ask in (
            array.numpy,
            lambda: array.__dlpack__(dl_device=(1, 0)),
            lambda: array.__dlpack__(copy=True),
            lambda: memoryview(buffer),
        ):
            with pytest.raises(BufferError, match="copy"):
                ask()


@pytest.mark.parametrize("dtype", ["bool", "float16", "complex128", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_every_type_and_shape_goes_out_and_back(pool: AsyncMemoryPool, dtype: str, shape: tuple[int, ...]) -> None:
    """Type, shape and address survive the way through a capsule."""
    buffer = pool.allocate(4096)
    array = buffer.view(dtype, shape)
    back = asyncmem.asarray(_Carrier(array))
    assert (back.dtype, back.shape) == (array.dtype, shape)
    assert back.buffer.address == (buffer.address if array.nbytes else 0)
    assert back.buffer.location == "cuda"
    buffer.free()
    back.buffer.free()
    assert pool.stats().exported_bytes == 0


class _Carrier:
    """Passes a capsule on, as an array made of it would."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **asked: Any) -> object:
        return self.array.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


# -- in ----------------------------------------------------------------------------------------------------------------


def test_the_owner_is_told_who_will_use_its_memory(pool: AsyncMemoryPool, producer: Producer) -> None:
    """The owner gets the home stream's number, 1 for the legacy default, and orders that stream behind its own."""
    ours = pool.device.create_stream()
    foreign = asyncmem.asarray(producer, stream=ours)
    assert (foreign.shape, foreign.buffer.address) == (producer.array.shape, producer.array.buffer.address)
    assert (foreign.buffer.stream, foreign.buffer.device) == (ours, pool.device)
    default = asyncmem.asarray(producer)
    assert default.buffer.device is not pool.device
    assert default.buffer.device.name == pool.device.name
    assert [asked["stream"] for asked in producer.asked] == [ours.handle, LEGACY]
    assert all(asked["max_version"] >= (1, 0) for asked in producer.asked)


@pytest.mark.parametrize("interface", [True, False])
def test_our_stream_works_behind_the_owners(
    pool: AsyncMemoryPool, producer: Producer, fake: FakeDriver, interface: bool
) -> None:
    """What the owner's stream still has to do comes before the work of the stream that is named."""
    ours = pool.device.create_stream()
    fake.hold(producer.stream.handle)
    fake.launch(producer.stream.handle, writes=spot(producer.array.buffer))
    taken = asyncmem.asarray(OnlyInterface(producer) if interface else producer, stream=ours)
    fake.launch(ours.handle, reads=spot(taken.buffer))
    taken.buffer.use_on(None)
    other = pool.device.create_stream()
    taken.buffer.use_on(other)
    fake.launch(other.handle, reads=spot(taken.buffer))
    taken.buffer.hand_over(other)
    assert taken.buffer.stream is other
    fake.release()
    ours.synchronize_blocking()
    other.synchronize_blocking()
    taken.buffer.free()


def test_borrowed_memory_goes_on_to_others_in_order(
    pool: AsyncMemoryPool, theirs: Cuda, producer: Producer, fake: FakeDriver
) -> None:
    """A third library that takes an array over borrowed memory is ordered behind its home stream."""
    ours, third = pool.device.create_stream(), theirs.create_stream()
    taken = asyncmem.asarray(producer, stream=ours)
    fake.hold(ours.handle)
    fake.launch(ours.handle, writes=spot(taken.buffer))
    consumer = Consumer(taken, third.handle)
    fake.launch(third.handle, reads=consumer.spot)
    taken.buffer.free()
    assert not taken.buffer.alive
    fake.release()
    third.synchronize_blocking()
    del consumer, taken
    producer.array.buffer.free()
    assert producer.pool.stats().exported_bytes == 0


def test_an_interface_alone_is_found_on_its_device(pool: AsyncMemoryPool, producer: Producer, fake: FakeDriver) -> None:
    """The driver knows whose an address is; empty memory has none and is on the first device."""
    taken = asyncmem.asarray(OnlyInterface(producer))
    assert (taken.buffer.device.name, taken.buffer.address) == ("cuda:0", producer.array.buffer.address)
    assert taken.dtype == np.int32
    empty = asyncmem.asarray(OnlyInterface(producer, shape=(0, 4), data=(0, False), stream=None))
    assert (empty.shape, empty.nbytes) == ((0, 4), 0)
    with pytest.raises(asyncmem.DeviceError, match="cuPointerGetAttribute"):
        asyncmem.asarray(OnlyInterface(producer, data=(0x1234, False), stream=None))
    assert fake.violations() == []
    assert pool.stats().allocated_bytes == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"stream": 0}, "stream"),
        ({"mask": object()}, "mask"),
        ({"strides": (4, 2048)}, "contiguous"),
        ({"typestr": ">i4"}, "dtype"),
        ({"typestr": "|V2"}, "dtype"),
    ],
)
def test_interfaces_that_cannot_be_are_refused(
    pool: AsyncMemoryPool, producer: Producer, changes: dict[str, object], match: str
) -> None:
    """Masks, gaps, swapped bytes, records, and a stream 0 that could be either default."""
    with pytest.raises(InvalidRequest, match=match):
        asyncmem.asarray(OnlyInterface(producer, **changes), stream=pool.device.create_stream())


def test_an_interface_may_say_that_nobody_writes(pool: AsyncMemoryPool, producer: Producer) -> None:
    """What may only be read goes out as such."""
    address = producer.array.buffer.address
    taken = asyncmem.asarray(OnlyInterface(producer, data=(address, True)), stream=pool.device.create_stream())
    assert taken.buffer.readonly
    assert taken.__cuda_array_interface__["data"] == (address, True)
    assert receive(taken.__dlpack__(stream=LEGACY, max_version=(1, 0))).readonly


def test_managed_memory_is_the_gpus(pool: AsyncMemoryPool, theirs: Cuda) -> None:
    """kDLCUDAManaged is memory of that GPU's streams."""
    with contextlib.closing(Producer(theirs, place=(13, 0))) as producer:
        ours = pool.device.create_stream()
        assert asyncmem.asarray(producer, stream=ours).buffer.stream is ours
        assert asyncmem.asarray(producer).buffer.location == "cuda"


def test_a_stream_of_another_gpu_is_refused(driver: FakeDriver, fake: FakeDriver) -> None:
    """Memory of one card is not taken for a stream of another."""
    assert driver is fake
    fake.devices(2)
    with (
        contextlib.closing(Cuda(0)) as first,
        contextlib.closing(Cuda(1)) as second,
        contextlib.closing(Producer(second, place=(2, 1))) as producer,
    ):
        with pytest.raises(InvalidRequest, match=r"\(2, 1\)"):
            asyncmem.asarray(producer, stream=first.create_stream())
        assert asyncmem.asarray(producer, stream=producer.stream).buffer.device is second
        assert asyncmem.asarray(OnlyInterface(producer, stream=None)).buffer.device.name == "cuda:1"
    close_shared()


def test_page_locked_memory_is_host_memory_with_a_gpus_streams(pool: AsyncMemoryPool) -> None:
    """It says kDLCUDAHost, numpy shares it, and on the way back it belongs to whatever stream is named."""
    with AsyncMemoryPool(pool.device.pinned(), limit="1 MiB") as pinned:
        array = pinned.allocate(4096).view("float32")
        assert array.__dlpack_device__() == (3, 0)
        array.numpy()[:] = 3
        for same in (np.from_dlpack(array), np.asarray(array)):
            assert (same == 3).all()
        assert not hasattr(array, "__cuda_array_interface__")
        stream = pool.device.create_stream()
        back = asyncmem.asarray(_Carrier(array), stream=stream)
        assert (back.buffer.address, back.buffer.stream) == (array.buffer.address, stream)
        assert back.buffer.device is pool.device.pinned()
        assert asyncmem.asarray(_Carrier(array)).buffer.location == "host"
        back.buffer.free()
        array.buffer.free()
        del same


# -- streams of others -------------------------------------------------------------------------------------------------


class Foreign:
    """A stream object of another library: the stream lives as long as it."""

    def __init__(self, stream: GpuStream) -> None:
        self.owner = stream


class TorchStream(Foreign):
    @property
    def cuda_stream(self) -> int:
        return self.owner.handle


class CupyStream(Foreign):
    @property
    def ptr(self) -> int:
        return self.owner.handle


class NumbaStream(Foreign):
    @property
    def handle(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.owner.handle)


class CoreStream(Foreign):
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.owner.handle


def number(stream: GpuStream) -> int:
    return stream.handle


@pytest.mark.parametrize("kind", [TorchStream, CupyStream, NumbaStream, CoreStream, number])
def test_streams_of_other_libraries_are_taken_everywhere(
    pool: AsyncMemoryPool, theirs: Cuda, fake: FakeDriver, kind: Any
) -> None:
    """Their objects, and mere numbers, mean the stream itself: as home, user, new home, and at the free."""
    foreign = [theirs.create_stream() for _ in range(4)]
    home, user, heir, last = map(kind, foreign)
    buffer = pool.allocate(LIMIT, stream=home)
    place = spot(buffer)
    assert buffer.stream.handle == foreign[0].handle
    fake.hold(foreign[0].handle)
    fake.launch(foreign[0].handle, writes=place)
    buffer.use_on(user)
    fake.launch(foreign[1].handle, reads=place)
    buffer.hand_over(heir)
    assert buffer.stream.handle == foreign[2].handle
    fake.launch(foreign[2].handle, reads=place)
    buffer.use_on(last)
    fake.launch(foreign[3].handle, reads=place)
    buffer.free(last)
    fake.release()
    with pool.allocate(LIMIT, stream=foreign[0], timeout=10) as after:
        assert spot(after) == place
        fake.launch(foreign[0].handle, writes=place)
    assert fake.violations() == []


@pytest.mark.parametrize("how", ["home", "user"])
def test_a_stream_known_by_its_number_may_end_before_an_export(
    pool: AsyncMemoryPool, theirs: Cuda, fake: FakeDriver, how: str
) -> None:
    """It must live until the free. What comes later, as an export ends, asks nothing of a number that may be dead."""
    foreign, third = theirs.create_stream(), pool.device.create_stream()
    buffer = pool.allocate(LIMIT, stream=foreign.handle if how == "home" else None)
    place = spot(buffer)
    if how == "user":
        buffer.use_on(foreign.handle)
    fake.hold(foreign.handle)
    fake.launch(foreign.handle, reads=place)
    consumer = Consumer(buffer, LEGACY)
    buffer.free()
    del foreign
    gc.collect()
    del consumer
    assert pool.stats().exported_bytes == 0
    with let_go_soon(fake):
        after = pool.allocate(LIMIT, stream=third, timeout=10)
    fake.launch(third.handle, writes=spot(after))
    after.free()
    fake.release()
    assert fake.violations() == []


class Foreign:
    """A library's array of the GPU's memory."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


@pytest.mark.asyncio
@pytest.mark.may_block  # the process's own pool opens here where no test has used it before
async def test_memory_of_others_is_copied_by_its_own_methods(pool: AsyncMemoryPool) -> None:
    """To a pool's buffer, and to the host and back, behind the work of both homes."""
    theirs = await pool.full((1000,), 7, "float32")
    taken = asyncmem.asarray(Foreign(theirs))
    own = await pool.empty((1000,), "float32")
    await taken.copy_to(own)
    result = np.zeros(1000, "float32")
    await own.copy_to(result)
    assert (result == 7).all()
    await taken.copy_from(np.full(1000, 8, "float32"))
    await taken.copy_to(result)
    assert (result == 8).all()
    for one in (own, taken, theirs):
        one.free()
