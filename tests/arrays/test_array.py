"""Typed views, and what other libraries make of a buffer without a copy."""

import ctypes
import gc
from types import SimpleNamespace

import numpy as np
import pytest

from asyncmem.arrays import dtype_size
from asyncmem.arrays._dlpack import COPIED
from asyncmem.errors import BufferReleased, InvalidRequest
from tests.core.support import FakePool, FakeStream, assert_all_free

from .capsules import Versioned, consume


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


def test_numpy_shares_the_memory_every_way(pool: FakePool) -> None:
    """numpy(), asarray, from_dlpack and frombuffer see each other's writes."""
    array = pool.allocate(4 * 12).view("float32", (3, 4))
    array.numpy()[:] = 3
    for same in (array.numpy(), np.asarray(array), np.from_dlpack(array)):
        assert same.shape == (3, 4)
        assert same.dtype == np.float32
        assert (same == 3).all()
    assert np.frombuffer(memoryview(array.buffer), dtype=np.float32).sum() == 36
    assert np.from_dlpack(array.buffer).dtype == np.uint8


@pytest.mark.parametrize("make", [np.asarray, np.from_dlpack, lambda a: a.numpy()], ids=["asarray", "dlpack", "numpy"])
def test_an_array_made_elsewhere_keeps_the_block_after_free(pool: FakePool, make: type) -> None:
    """Memory that numpy holds is given back only when numpy lets go."""
    buffer = pool.allocate(4096)
    foreign = make(buffer.view("int64"))
    buffer.free()
    assert pool.core.exported_bytes == 4096
    del foreign
    gc.collect()
    assert pool.core.exported_bytes == 0
    assert_all_free(pool)


def test_every_use_of_an_array_over_a_freed_buffer_raises(pool: FakePool) -> None:
    """A view does not keep its buffer from being freed."""
    array = pool.allocate(4096).view()
    array.buffer.free()
    for use in (array.numpy, array.__dlpack__, lambda: array.__array_interface__):
        with pytest.raises(BufferReleased):
            use()


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 2)])
def test_capsules_have_the_version_asked_for(pool: FakePool, version: tuple[int, int] | None) -> None:
    """A consumer of DLPack 1 gets a versioned capsule, an older one the legacy kind; unused ones free themselves."""
    array = pool.allocate(4096).view("uint8")
    capsule = array.__dlpack__(max_version=version)
    kind = "dltensor_versioned" if version is not None and version >= (1, 0) else "dltensor"
    assert f'"{kind}"' in repr(capsule)
    array.buffer.free()
    assert pool.core.exported_bytes == 4096
    del capsule
    assert pool.core.exported_bytes == 0


def test_short_floats_travel_by_dlpack_only(pool: FakePool) -> None:
    """bfloat16 and float8 have no numpy type: views and capsules work, numpy() says what to do instead."""
    array = pool.allocate(64).view("bfloat16", (2, -1))
    assert (array.shape, array.dtype, array.nbytes, dtype_size("float8_e5m2")) == ((2, 16), "bfloat16", 64, 1)
    assert array.__dlpack__(max_version=(1, 0)) is not None
    with pytest.raises(BufferError, match="uint16"):
        array.numpy()
    with pytest.raises(AttributeError, match="DLPack"):
        _ = array.__array_interface__


@pytest.mark.parametrize("dtype", ["object", "datetime64[s]", ">f4", "no such type", 17])
def test_types_that_devices_do_not_share_are_refused(pool: FakePool, dtype: object) -> None:
    """Objects, dates, swapped bytes and nonsense raise InvalidRequest."""
    with pytest.raises(InvalidRequest, match="dtype"):
        pool.allocate(64).view(dtype)


@pytest.mark.parametrize("shape", [(17,), (-2,), (-1, -1), (3, -1), 1.5, ("a",)])
def test_shapes_that_do_not_fit_are_refused(pool: FakePool, shape: object) -> None:
    """A shape must fit into the buffer, and -1 must divide it."""
    with pytest.raises((InvalidRequest, TypeError)):
        pool.allocate(64).view("float32", shape)  # type: ignore[arg-type]  # what is tested


def test_memory_the_host_cannot_read_is_not_read() -> None:
    """Where the device is not host readable, host protocols say so by the errors their consumers know."""
    buffer = FakePool(host_readable=False, kind="simulated").allocate(64)
    with pytest.raises(BufferError, match="cannot be read by the host"):
        memoryview(buffer)
    assert not hasattr(buffer, "__array_interface__")
    assert not hasattr(buffer, "__cuda_array_interface__")


def test_cuda_memory_offers_its_interface_and_notes_unknown_users() -> None:
    """Reading the CUDA array interface notes users that name no stream; its default stream is the protocol's 1."""
    pool = FakePool(host_readable=False, kind="cuda")
    buffer = pool.allocate(64)
    interface = buffer.view("float32").__cuda_array_interface__
    assert (interface["version"], interface["shape"], interface["typestr"]) == (3, (16,), "<f4")
    assert interface["stream"] == 1
    assert buffer._noted().users == {pool.core.retire.everywhere()}


def test_dlpack_orders_the_consumers_stream_on_cuda() -> None:
    """None is the legacy default stream, -1 a consumer that orders itself, a number that stream."""
    pool = FakePool(host_readable=False, kind="cuda")
    for stream in (None, -1, 7):
        pool.allocate(64).__dlpack__(stream=stream)
    assert pool.device.named == [1, 7]
    assert pool.device.records_of_all == 1


def test_exports_that_cannot_be_are_buffer_errors(pool: FakePool) -> None:
    """Another device raises BufferError, a stream for host memory InvalidRequest; a copy is a copy."""
    array = pool.allocate(64).view()
    with pytest.raises(BufferError, match="device"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(InvalidRequest, match="stream"):
        array.__dlpack__(stream=5)
    copied = np.from_dlpack(array, copy=True)
    array.numpy()[:] = 9
    assert copied.max() == 0 or not (copied == 9).all()


def test_an_empty_buffer_is_a_valid_view_of_nothing(pool: FakePool) -> None:
    """Zero bytes can be viewed and exported, and freeing them gives nothing back."""
    stream = pool.core.stream_objects[0]
    assert stream is not None
    buffer = pool.core.borrow(0, 0, stream, SimpleNamespace(readonly=False))
    assert (buffer.address, len(memoryview(buffer)), buffer.view("float32").shape) == (0, 0, (0,))
    assert np.from_dlpack(buffer).size == 0
    buffer.free()
    assert_all_free(pool)


def test_each_numpy_array_is_an_export_by_itself(pool: FakePool) -> None:
    """What asarray made holds the memory until it is gone, and the view that it was made of holds nothing."""
    array = pool.allocate(4096).view("int32", (32, 32))
    first, second = np.asarray(array), np.asarray(array)
    del first
    array.buffer.free()
    assert pool.core.exported_bytes == 4096
    del second
    assert pool.core.exported_bytes == 0
    assert_all_free(pool)


@pytest.mark.parametrize("make", [np.asarray, np.from_dlpack, lambda a: a.numpy()], ids=["asarray", "dlpack", "numpy"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1)])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float64", "complex64", "complex128"])
def test_shapes_of_no_and_of_one_element_travel(pool: FakePool, make: type, shape: tuple[int, ...], dtype: str) -> None:
    """Arrays without dimensions or without elements keep shape, type and value."""
    buffer = pool.allocate(512)
    array = buffer.view(dtype, shape)
    same = make(array)
    assert (same.shape, same.dtype) == (shape, np.dtype(dtype))
    same[...] = 1
    assert (array.numpy() == 1).all()
    assert memoryview(buffer)[: array.nbytes].tobytes() == np.ones(shape, dtype).tobytes()


def test_numpy_checks_the_type_that_it_is_told(pool: FakePool) -> None:
    """The type given for type checkers is the array's own, or an error."""
    array = pool.allocate(64).view("float32")
    assert array.numpy(np.float32).dtype == np.float32
    with pytest.raises(InvalidRequest, match="float32"):
        array.numpy(np.int32)


@pytest.mark.parametrize("stream", [0, -2, True, 1.0, "1"])
def test_streams_that_the_protocol_has_not_are_refused(stream: object) -> None:
    """0 could mean either default stream; nothing is exported then."""
    pool = FakePool(host_readable=False, kind="cuda")
    buffer = pool.allocate(64)
    with pytest.raises(InvalidRequest, match="stream"):
        buffer.__dlpack__(stream=stream)  # type: ignore[arg-type]  # what is tested
    assert buffer._notes is None
    buffer.free()
    assert pool.core.exported_bytes == 0


def test_page_locked_memory_is_host_memory_to_those_who_ask(pool: FakePool) -> None:
    """It says kDLCUDAHost of itself, and travels as kDLCPU on demand."""
    pool.device.dlpack_device = (3, 0)
    array = pool.allocate(64).view("float32")
    assert array.__dlpack_device__() == (3, 0)
    for device in (None, (3, 0), (1, 0)):
        capsule = array.__dlpack__(dl_device=device, max_version=(1, 0))
        managed, let_go = consume(capsule, b"dltensor_versioned")
        assert (managed.tensor.device_type, managed.tensor.device_id) == (device or (3, 0))
        let_go()
    with pytest.raises(InvalidRequest, match="stream"):
        array.__dlpack__(stream=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_is_on_its_own(pool: FakePool, dtype: str) -> None:
    """A copy holds the values of its moment, says that it is one, and keeps nothing of the buffer."""
    buffer = pool.allocate(64)
    memoryview(buffer)[:] = bytes(range(64))
    capsule = buffer.view(dtype).__dlpack__(copy=True, max_version=(1, 0))
    buffer.free()
    assert pool.core.exported_bytes == 0
    managed, let_go = consume(capsule, b"dltensor_versioned")
    assert isinstance(managed, Versioned)
    assert managed.flags == COPIED
    assert ctypes.string_at(managed.tensor.data, 64) == bytes(range(64))
    let_go()


def test_who_reads_a_cuda_interface_keeps_what_offered_it() -> None:
    """Such a consumer holds the object that it asked, so the block waits for that object to be gone."""
    pool = FakePool(host_readable=False, kind="cuda")
    last = FakeStream()
    for typed in (False, True):
        buffer = pool.allocate(4096)
        asked = buffer.view("float32") if typed else buffer
        interface = asked.__cuda_array_interface__
        assert interface["data"] == (buffer.address, False)
        assert interface["strides"] is None
        assert asked.__cuda_array_interface__ == interface
        buffer.free(last)
        del buffer
        assert pool.core.exported_bytes == 4096
        del asked
        assert pool.core.exported_bytes == 0
    assert (last.records, pool.device.records_of_all) == (2, 2)
    assert_all_free(pool)


def test_dropping_a_buffer_whose_interface_was_read_frees_it_once() -> None:
    """Nobody is left who could have kept it."""
    pool = FakePool(host_readable=False, kind="cuda")
    buffer = pool.allocate(4096)
    assert buffer.__cuda_array_interface__["shape"] == (4096,)
    del buffer
    assert pool.device.records_of_all == 1
    assert pool.core.exported_bytes == 0
    assert_all_free(pool)


def test_an_interface_that_cannot_be_offered_notes_nobody() -> None:
    """A short float has no array interface, and asking for it changes nothing."""
    pool = FakePool(host_readable=False, kind="cuda")
    array = pool.allocate(64).view("bfloat16")
    with pytest.raises(AttributeError, match="DLPack"):
        _ = array.__cuda_array_interface__
    assert array.buffer._notes is None
