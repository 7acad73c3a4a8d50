"""Memory of other libraries as arrays: the same addresses and values, and owners that live as long as needed."""

import array
import ctypes
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import asyncmem
from asyncmem import exchange
from asyncmem.core import Core
from asyncmem.devices import Device, Host, Simulated, StreamOrderError

ELEMENTS = ["bool", "int8", "uint16", "int32", "uint64", "float16", "float32", "float64", "complex64", "complex128"]


class Lender:
    """A numpy array behind one protocol only, as other libraries have theirs."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values


class Dlpack(Lender):
    def __dlpack__(self, **asked: Any) -> object:
        return self.values.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class OldDlpack(Dlpack):
    """From before DLPack 1.0: it knows of no versions."""

    def __dlpack__(self, *, stream: object = None) -> object:  # type: ignore[override]  # that is its age
        return self.values.__dlpack__(stream=stream)


class Elsewhere(Dlpack):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 7, 0


def plain(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values


LENDERS = [plain, Dlpack, OldDlpack]


@pytest.fixture
def pool() -> Iterator[asyncmem.AsyncMemoryPool]:
    with asyncmem.AsyncMemoryPool("host", limit="64 MiB") as pool:
        yield pool


@pytest.mark.parametrize("lender", LENDERS)
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_an_array_over_foreign_memory_is_that_memory(lender: Any, dtype: str) -> None:
    """Address, shape, type and values are those of the owner, and both see each other's writes."""
    values = np.arange(24).astype(dtype).reshape(2, 3, 4)
    taken = asyncmem.asarray(lender(values))
    assert (taken.buffer.address, taken.shape, taken.dtype) == (values.ctypes.data, (2, 3, 4), values.dtype)
    assert (taken.numpy() == values).all()
    values[1, 2, 3] = 0
    taken.numpy()[0, 0, 1] = 1
    assert taken.numpy()[1, 2, 3] == 0
    assert values[0, 0, 1] == 1


@pytest.mark.parametrize("lender", LENDERS)
@pytest.mark.parametrize("shape", [(), (0,), (4, 0, 3), (1, 1), (1, 5, 1)])
def test_shapes_with_few_elements_come_too(lender: Any, shape: tuple[int, ...]) -> None:
    """No dimensions, no elements, and lengths of one, where strides mean nothing."""
    values = np.ones(shape, "float32")
    taken = asyncmem.asarray(lender(values))
    assert taken.shape == shape
    assert taken.buffer.address == (values.ctypes.data if values.size else 0)
    assert (taken.numpy() == 1).all()


@pytest.mark.parametrize("lender", LENDERS)
def test_gaps_and_other_orders_are_refused(lender: Any) -> None:
    """Only row-major memory without gaps is an array; the error says what to do."""
    values = np.arange(12.0).reshape(3, 4)
    for strange in (values.T, values[:, :2], values[::2], values[::-1], np.broadcast_to(values[0], (3, 4)).copy("F")):
        with pytest.raises(asyncmem.InvalidRequest, match="contiguous"):
            asyncmem.asarray(lender(strange))
    assert asyncmem.asarray(lender(values[1:])).numpy()[0, 0] == 4


@pytest.mark.parametrize("lender", LENDERS)
@pytest.mark.parametrize("end", ["free", "drop"])
def test_the_owner_lives_until_the_buffer_and_all_made_of_it_are_gone(lender: Any, end: str) -> None:
    """Freed or dropped, borrowed memory goes back at once, or behind the last export."""
    values = np.arange(1000)
    alive = weakref.ref(values)
    taken = asyncmem.asarray(lender(values))
    made = [taken.numpy(), np.from_dlpack(taken), np.asarray(taken)]
    del values
    if end == "free":
        taken.buffer.free()
        with pytest.raises(asyncmem.BufferReleased):
            taken.numpy()
    else:
        del taken
    while made:
        assert alive() is not None
        assert made.pop()[999] == 999
    assert alive() is None


def test_a_block_lets_go_at_its_end() -> None:
    """Borrowed buffers are used like others: in a block, freed twice, viewed again, handed over."""
    values = np.arange(4)
    alive = weakref.ref(values)
    with asyncmem.asarray(values).buffer as buffer:
        del values
        buffer.hand_over(buffer.device.create_stream("other"))
        buffer.use_on(None)
        assert buffer.stream.name == "other"
        assert buffer.view("int64").numpy().sum() == 6
    buffer.free()
    assert alive() is None
    with pytest.raises(asyncmem.InvalidRequest, match="fallback"):
        _ = asyncmem.asarray(np.zeros(4)).buffer.to_device()


def test_memory_goes_back_on_the_thread_that_drops_it() -> None:
    """Any thread may be the one, also through the garbage collector."""
    values = np.arange(4)
    alive = weakref.ref(values)
    cycle: list[object] = [asyncmem.asarray(Dlpack(values))]
    cycle.append(cycle)
    del values, cycle
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert alive() is None


def test_what_is_borrowed_on_the_default_stream_shares_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core for each would take several times as long as the rest."""
    made: list[Device] = []

    def make(device: Device, *args: Any, **options: Any) -> Core:
        made.append(device)
        return Core(device, *args, **options)

    values = np.arange(4)
    host = asyncmem.asarray(values).buffer.device
    monkeypatch.setattr(exchange, "Core", make)
    monkeypatch.setattr(exchange, "_cores", {})
    for _ in range(100):
        asyncmem.asarray(values)
    assert made == [host]


@pytest.mark.parametrize("way", ["named", "handed over"])
def test_streams_are_kept_no_longer_than_the_buffers_that_are_at_home_there(way: str) -> None:
    """What is borrowed later does not know them."""
    stream = asyncmem.asarray(np.arange(4)).buffer.device.create_stream("short-lived")
    alive = weakref.ref(stream)
    taken = asyncmem.asarray(np.arange(4), stream=stream if way == "named" else None)
    if way == "handed over":
        taken.buffer.hand_over(stream)
    later = asyncmem.asarray(np.arange(4))
    del stream, taken
    gc.collect()
    assert alive() is None
    assert later.numpy().sum() == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # what 3.12 says of fork beside threads
def test_a_forked_child_borrows_for_itself() -> None:
    """Freed there, the memory goes back to its owner, though its parent has borrowed before."""
    before = asyncmem.asarray(np.arange(4))
    child = os.fork()
    if not child:
        values = np.arange(5)
        alive = weakref.ref(values)
        buffer = asyncmem.asarray(values).buffer
        del values
        buffer.free()
        os._exit(0 if alive() is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert before.numpy().sum() == 6


@pytest.mark.parametrize("dtype", [*ELEMENTS, "bfloat16", "float8_e5m2"])
def test_what_we_gave_away_comes_back_over_the_same_address(pool: asyncmem.AsyncMemoryPool, dtype: str) -> None:
    """Out and back is the same memory, and the block stays until what came back is gone."""
    buffer = pool.allocate(4096)
    memoryview(buffer)[:] = bytes(range(256)) * 16
    out = buffer.view(dtype, (16, -1))
    back = asyncmem.asarray(Passed(out))
    assert (back.buffer.address, back.shape, back.dtype) == (out.buffer.address, out.shape, out.dtype)
    assert bytes(memoryview(back.buffer)) == bytes(range(256)) * 16
    buffer.free()
    assert pool.stats().exported_bytes == 4096
    again = asyncmem.asarray(Passed(back))
    back.buffer.free()
    assert pool.stats().exported_bytes == 4096
    again.buffer.free()
    assert pool.stats().exported_bytes == 0


class Passed:
    """What is not ours any more, but over our memory: as tensors made by torch.from_dlpack are."""

    def __init__(self, array: asyncmem.Array) -> None:
        self.array = array
        self.capsule = array.__dlpack__(max_version=(1, 0))

    def __dlpack__(self, **_asked: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_our_own_are_answered_as_they_are(pool: asyncmem.AsyncMemoryPool) -> None:
    """An array is itself, and a buffer its bytes."""
    buffer = pool.allocate(512)
    array = buffer.view("float32")
    assert asyncmem.asarray(array) is array
    assert asyncmem.asarray(buffer).buffer is buffer


def test_naming_a_stream_makes_it_a_user_of_our_own() -> None:
    """The stream waits for what the home stream has submitted; the simulated device would refuse it otherwise."""
    device = Simulated()
    other = device.create_stream()
    with asyncmem.AsyncMemoryPool(device, limit="1 MiB") as pool, pool.allocate(4096) as buffer:
        device.default_stream.launch(1.0, writes=[buffer])
        with pytest.raises(StreamOrderError):
            other.launch(1.0, reads=[buffer])
        assert asyncmem.asarray(buffer, stream=other).buffer is buffer
        other.launch(1.0, reads=[buffer])


def test_what_may_only_be_read_stays_so() -> None:
    """Read-only owners are believed, by numpy arrays and by the buffer protocol."""
    fixed = np.arange(4)
    fixed.flags.writeable = False
    for source in (fixed, b"four"):
        taken = asyncmem.asarray(source)
        assert taken.buffer.readonly
        assert not taken.numpy().flags.writeable
        with pytest.raises(BufferError, match="only be read"):
            taken.__dlpack__()
    assert asyncmem.asarray(b"four").numpy().tobytes() == b"four"


def test_everything_with_a_buffer_comes(pool: asyncmem.AsyncMemoryPool) -> None:
    """Objects of the standard library share their memory too, with their element types."""
    numbers = array.array("d", [1, 2, 3])
    taken = asyncmem.asarray(numbers)
    taken.numpy()[1] = 5
    assert numbers[1] == 5
    raw = (ctypes.c_int32 * 4)(1, 2, 3, 4)
    assert asyncmem.asarray(raw).numpy(np.int32).sum() == 10
    assert asyncmem.asarray(memoryview(pool.allocate(64))).shape == (64,)


@pytest.mark.parametrize("source", [None, 7, "text", [1.0, 2.0], object()])
def test_what_has_no_memory_is_refused(source: object) -> None:
    """Values that would have to be copied first are an error that names what is taken."""
    with pytest.raises(asyncmem.InvalidRequest, match="__dlpack__"):
        asyncmem.asarray(source)


@pytest.mark.parametrize("dtype", ["datetime64[s]", ">f4", "S3", "object"])
def test_elements_that_devices_do_not_share_are_refused(dtype: str) -> None:
    """Dates, swapped bytes, texts and objects are no elements of an array."""
    with pytest.raises(asyncmem.InvalidRequest, match="dtype"):
        asyncmem.asarray(np.zeros(3, dtype))


def test_memory_of_unknown_devices_is_refused() -> None:
    """A device that is not ours is named by DLPack's number."""
    with pytest.raises(asyncmem.InvalidRequest, match=r"\(7, 0\)"):
        asyncmem.asarray(Elsewhere(np.zeros(3)))


def test_a_stream_names_the_device_and_is_the_home() -> None:
    """The buffer is of the stream's own device; a stream of a device that does not have the memory is refused."""
    stream = Host().create_stream()
    taken = asyncmem.asarray(np.zeros(3), stream=stream)
    assert taken.buffer.stream is stream
    assert taken.buffer.device is stream.device
    assert asyncmem.asarray(np.zeros(3)).buffer.device is asyncmem.asarray(np.ones(3)).buffer.device
    with pytest.raises(asyncmem.InvalidRequest, match="stream"):
        asyncmem.asarray(np.zeros(3), stream=Simulated().create_stream())


def test_memory_of_a_device_without_a_name_comes_with_its_stream() -> None:
    """What only its own device's streams can place needs one of them."""
    device = Simulated()
    with asyncmem.AsyncMemoryPool(device, limit="1 MiB") as pool:
        sent = Passed(pool.allocate(4096).view("float32"))
        with pytest.raises(asyncmem.InvalidRequest, match="stream"):
            asyncmem.asarray(sent)
        back = asyncmem.asarray(sent, stream=device.default_stream)
        assert (back.shape, back.buffer.device) == ((1024,), device)
        del back, sent


def test_torch_tensors_come_and_go() -> None:
    """Tensors of torch share their memory both ways, with the short floats that numpy does not have."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int16):
        tensor = torch.arange(12).reshape(3, 4).to(dtype)
        taken = asyncmem.asarray(tensor)
        assert (taken.buffer.address, taken.shape) == (tensor.data_ptr(), (3, 4))
        back = torch.from_dlpack(taken)
        assert back.dtype == dtype
        assert back.data_ptr() == tensor.data_ptr()
        taken.buffer.free()
        assert torch.equal(back.to(torch.complex64), tensor.to(torch.complex64))
    with pytest.raises(asyncmem.InvalidRequest, match="contiguous"):
        asyncmem.asarray(torch.zeros(3, 4).T)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_short_floats_of_ml_dtypes_keep_their_names(name: str) -> None:
    """numpy arrays of that package's types come in under the names that devices know."""
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    values = np.ones(8, getattr(ml_dtypes, name))
    taken = asyncmem.asarray(values)
    assert (taken.dtype, taken.buffer.address) == (name, values.ctypes.data)
    assert taken.buffer.view(values.dtype).dtype == name


@pytest.mark.asyncio
@pytest.mark.may_block  # the process's own pool opens here where no test has used it before
async def test_copies_go_both_ways_by_the_methods_of_either(pool: asyncmem.AsyncMemoryPool) -> None:
    """Memory of others is copied as a pool's is: to the host, to a pool's buffer and back, and to other such memory."""
    values = np.arange(24, dtype="float32").reshape(2, 3, 4)
    taken, other = asyncmem.asarray(values), asyncmem.asarray(np.zeros_like(values))
    own = await pool.empty(values.shape, "float32")
    await taken.copy_to(own)
    await other.copy_from(own)
    result = np.empty_like(values)
    await other.copy_to(result)
    assert (result == values).all()
    await taken.copy_from(np.ones_like(values))
    await other.copy_from(taken)
    assert (other.numpy() == 1).all()
    with pytest.raises(asyncmem.InvalidRequest):
        taken.copy_from(np.zeros(3, "float32"))
    own.free()
