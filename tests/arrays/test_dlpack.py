"""Capsules, given and taken: who owns what is in them, and who hears when it is not needed any more."""

import ctypes
import gc
import threading

import numpy as np
import pytest

from asyncmem.arrays._dlpack import READ_ONLY, legacy_capsule, receive, versioned_capsule
from asyncmem.devices import Stream
from tests.core.support import FakePool, assert_all_free

from .capsules import Producer, Versioned, consume


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


def test_capsules_own_their_owner() -> None:
    """The object behind a capsule lives exactly as long as the capsule."""
    owner = np.zeros(4)
    capsule = legacy_capsule(owner, owner.ctypes.data, (2, 2), (2, 64, 1), (1, 0))
    died = threading.Event()
    watched = Watched(died)
    other = versioned_capsule(watched, 0, (0,), (2, 64, 1), (1, 0))
    del owner, watched
    assert capsule is not None
    assert not died.is_set()
    del other
    assert died.is_set()


class Watched:
    readonly = False

    def __init__(self, died: threading.Event) -> None:
        self.died = died

    def __del__(self) -> None:
        self.died.set()


@pytest.mark.parametrize(("version", "name"), [((1, 0), b"dltensor_versioned"), (None, b"dltensor")])
def test_a_consumer_may_let_go_on_a_thread_without_the_interpreter(
    pool: FakePool, version: tuple[int, int] | None, name: bytes
) -> None:
    """The deleter takes the interpreter's lock itself, on whatever thread a consumer calls it."""
    buffer = pool.allocate(4096)
    managed, let_go = consume(buffer.view("float32", (32, 32)).__dlpack__(max_version=version), name)
    tensor = managed.tensor
    assert (tensor.data, tensor.ndim, tensor.shape[1], tensor.strides[0]) == (buffer.address, 2, 32, 32)
    buffer.free()
    assert pool.core.exported_bytes == 4096
    thread = threading.Thread(target=let_go)
    thread.start()
    thread.join()
    assert pool.core.exported_bytes == 0
    assert_all_free(pool)


@pytest.mark.parametrize("versioned", [True, False])
def test_the_lender_hears_once(versioned: bool) -> None:
    """Memory received is given back by one call of the deleter, when the loan dies and not before."""
    producer = Producer(4096, (3, 4), (4, 1), versioned=versioned, offset=64)
    capsule = producer.__dlpack__()
    loan = receive(capsule)
    assert (loan.address, loan.shape, loan.strides, loan.dtype, loan.device) == (
        4160, (3, 4), (4, 1), (0, 64, 1), (1, 0)
    )  # fmt: skip
    assert f'"used_{producer.name.decode()}"' in repr(capsule)
    del capsule
    assert producer.deleted == 0
    del loan
    assert producer.deleted == 1


def test_the_lender_hears_from_the_garbage_collector_on_any_thread() -> None:
    """A loan in a cycle of garbage is given back by whichever thread collects it."""
    producer = Producer(0, (0,))
    cycle: list[object] = [receive(producer.__dlpack__())]
    cycle.append(cycle)
    del cycle
    assert producer.deleted == 0
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert producer.deleted == 1


def test_a_capsule_is_consumed_once() -> None:
    """What was consumed, or is no capsule of DLPack's, is refused and stays as it is."""
    producer = Producer(4096, (1,))
    capsule = producer.__dlpack__()
    loan = receive(capsule)
    with pytest.raises(BufferError, match="unconsumed"):
        receive(capsule)
    with pytest.raises(BufferError, match="unconsumed"):
        receive("dltensor")
    del loan
    assert producer.deleted == 1


def test_a_dlpack_to_come_is_refused_unread() -> None:
    """Another major version means another struct: nothing of it is touched."""
    producer = Producer(4096, (1,))
    assert isinstance(producer.managed, Versioned)
    producer.managed.major = 2
    capsule = producer.__dlpack__()
    with pytest.raises(BufferError, match="DLPack 2"):
        receive(capsule)
    assert '"dltensor_versioned"' in repr(capsule)
    assert producer.deleted == 0


def test_a_lender_without_a_deleter_needs_none() -> None:
    """DLPack allows memory that nobody gives back."""
    producer = Producer(4096, (1,))
    producer.managed.deleter = type(producer.managed.deleter)()
    del_of = receive(producer.__dlpack__())
    del del_of
    assert producer.deleted == 0


def test_a_loan_says_that_it_may_only_be_read() -> None:
    """The flag of a versioned capsule is kept."""
    producer = Producer(4096, (1,))
    assert isinstance(producer.managed, Versioned)
    assert not receive(producer.__dlpack__()).readonly
    producer.managed.flags = READ_ONLY
    assert receive(producer.__dlpack__()).readonly


def test_an_unused_capsule_of_ours_survives_a_pending_error(pool: FakePool) -> None:
    """A capsule dropped while an error is on its way gives its memory back and leaves the error alone."""
    buffer = pool.allocate(512)

    def fail() -> None:
        capsule = buffer.__dlpack__()
        assert capsule is not None
        buffer.free()
        raise KeyError("kept")

    with pytest.raises(KeyError, match="kept"):
        fail()
    gc.collect()
    assert pool.core.exported_bytes == 0


def stream_of(pool: FakePool) -> Stream:
    stream = pool.core.stream_objects[0]
    assert stream is not None
    return stream


class TestBorrowed:
    """Buffers over memory that is none of the heap's."""

    def test_the_loan_ends_with_the_buffer(self, pool: FakePool) -> None:
        """Freeing lets go of it, and so does dropping."""
        for free in (True, False):
            died = threading.Event()
            buffer = pool.core.borrow(4096, 64, stream_of(pool), Watched(died))
            assert (buffer.address, buffer.nbytes, buffer._block_bytes, buffer.readonly) == (4096, 64, 0, False)
            if free:
                buffer.free()
                assert died.is_set()
            del buffer
            assert died.is_set()
        assert_all_free(pool)

    def test_the_loan_ends_behind_the_last_export(self, pool: FakePool) -> None:
        """Memory that numpy holds is not given back to its owner before."""
        memory = (ctypes.c_char * 64)()
        for free in (True, False):
            died = threading.Event()
            buffer = pool.core.borrow(ctypes.addressof(memory), 64, stream_of(pool), Watched(died))
            array = buffer.view().numpy()
            if free:
                buffer.free()
            del buffer
            assert not died.is_set()
            array[:] = 7
            del array
            assert died.is_set()
        assert bytes(memory) == b"\7" * 64
        assert pool.core.exported_bytes == 0

    def test_what_may_only_be_read_is_nowhere_writable(self, pool: FakePool) -> None:
        """Every way out says so, and a way that cannot say it is closed."""
        memory = (ctypes.c_char * 64)()
        buffer = pool.core.borrow(ctypes.addressof(memory), 64, stream_of(pool), ReadOnly())
        assert buffer.readonly
        assert memoryview(buffer).readonly
        array = buffer.view("float32")
        for made in (array.numpy(), np.asarray(array)):
            assert not made.flags.writeable
        if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1):  # before, it knows no DLPack that can say so
            assert not np.from_dlpack(array).flags.writeable
        with pytest.raises(BufferError, match="only be read"):
            array.__dlpack__()


class ReadOnly:
    readonly = True
