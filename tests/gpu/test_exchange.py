"""Memory goes to other libraries and comes back on the card: by value, and in the order of streams.

Work is held back by a kernel that waits for a gate, so what does not wait for it is seen to have come too early.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import pytest

import asyncmem
from asyncmem import Array, AsyncMemoryPool

from .card import WORD, Card, PoolMaker

WORDS = 1 << 20
NBYTES = WORDS * WORD
LIMIT = 32 << 20
# Past the time that submitting takes, so that the order is the stream's and not the host's.
LATER = 0.2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Library(Protocol):
    """What the tests need of an array library, on its current stream; values are int32."""

    def new_stream(self) -> Any:
        """A stream that runs beside all others."""

    def handle(self, stream: Any) -> int:
        """The driver's number of it."""

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make it the current one."""

    def take(self, array: Array, stream: Any) -> Any:
        """An array of the library's over our memory."""

    def address(self, taken: Any) -> int:
        """Where it lies."""

    def make(self, value: int, stream: Any) -> Any:
        """Memory of its own, so many words of that value."""

    def read(self, taken: Any, stream: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The values, in the stream's order; waits."""


class Torch:
    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def new_stream(self) -> Any:
        return self.torch.cuda.Stream()

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self.torch.cuda.stream(stream)
        return context

    def take(self, array: Array, _stream: Any) -> Any:
        return self.torch.from_dlpack(array)

    def address(self, taken: Any) -> int:
        return int(taken.data_ptr())

    def make(self, value: int, _stream: Any) -> Any:
        return self.torch.full((WORDS,), value, dtype=self.torch.int32, device="cuda")

    def read(self, taken: Any, _stream: Any) -> Any:
        return taken.cpu().numpy()


class Cupy:
    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def new_stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def handle(self, stream: Any) -> int:
        return int(stream.ptr)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = stream
        return context

    def take(self, array: Array, _stream: Any) -> Any:
        return self.cupy.from_dlpack(array)

    def address(self, taken: Any) -> int:
        return int(taken.data.ptr)

    def make(self, value: int, _stream: Any) -> Any:
        return self.cupy.full(WORDS, value, dtype=np.int32)

    def read(self, taken: Any, _stream: Any) -> Any:
        return taken.get()


class Numba:
    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def new_stream(self) -> Any:
        return self.cuda.stream()

    def handle(self, stream: Any) -> int:
        return int(getattr(stream.handle, "value", stream.handle))

    def on(self, _stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def take(self, array: Array, _stream: Any) -> Any:
        return self.cuda.as_cuda_array(array)

    def address(self, taken: Any) -> int:
        return int(taken.__cuda_array_interface__["data"][0])

    def make(self, value: int, stream: Any) -> Any:
        return self.cuda.to_device(np.full(WORDS, value, np.int32), stream=stream)

    def read(self, taken: Any, stream: Any) -> Any:
        values = taken.copy_to_host(stream=stream)
        stream.synchronize()
        return values


@pytest.fixture
def numba() -> Any:
    """Numba's CUDA target; skipped where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs to read, not ours
        return pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")


@pytest.fixture(params=["torch", "cupy", "numba"])
def library(request: pytest.FixtureRequest, card: Card) -> Library:
    """Each library that is installed, with the card's context current."""
    module = request.getfixturevalue(request.param)
    card.enter()
    kinds: dict[str, type[Any]] = {"torch": Torch, "cupy": Cupy, "numba": Numba}
    made: Library = kinds[request.param](module)
    made.read(made.make(1, made.new_stream()), made.new_stream())  # loads what it loads before anything is held back
    return made


@pytest.fixture
def pool(make_pool: PoolMaker) -> AsyncMemoryPool:
    """A pool with memory of either kind."""
    return make_pool(LIMIT)


def test_the_consumer_sees_what_the_home_stream_finishes_later(
    card: Card, pool: AsyncMemoryPool, library: Library
) -> None:
    """What the home stream has been told to write is there when the other library's stream reads."""
    home, theirs, gate = pool.device.create_stream(), library.new_stream(), card.gate()
    buffer = pool.allocate(NBYTES, stream=home)
    card.fill(home.handle, buffer, 1)
    card.hold(home.handle, gate)
    card.fill(home.handle, buffer, 7)
    with card.opening(gate, LATER), library.on(theirs):
        taken = library.take(buffer.view("int32"), theirs)
        assert library.address(taken) == buffer.address
        values = library.read(taken, theirs)
    assert (values == 7).all()
    del taken
    buffer.free()


def test_our_stream_sees_what_the_producer_finishes_later(card: Card, pool: AsyncMemoryPool, library: Library) -> None:
    """What the owner has been told to write is there when the stream that is named reads."""
    ours, theirs, gate, wrong = pool.device.create_stream(), library.new_stream(), card.gate(), card.number()
    with library.on(theirs):
        source = library.make(1, theirs)
        taken = asyncmem.asarray(source, stream=theirs)  # no order: only to write to it
        card.hold(library.handle(theirs), gate)
        card.fill(library.handle(theirs), taken.buffer, 9)
        with card.opening(gate, LATER):
            back = asyncmem.asarray(source, stream=ours)
            assert (back.buffer.address, back.shape, back.buffer.stream) == (library.address(source), (WORDS,), ours)
            card.compare(ours.handle, back.buffer, 9, wrong)
    card.synchronize()
    assert wrong.value == 0
    assert pool.stats().allocated_bytes == 0


def test_out_and_back_is_the_same_memory(pool: AsyncMemoryPool, library: Library) -> None:
    """Our own memory comes back over the same address, with the values that the other library sees."""
    theirs = library.new_stream()
    buffer = pool.allocate(NBYTES)
    with library.on(theirs):
        taken = library.take(buffer.view("int32"), theirs)
        back = asyncmem.asarray(taken, stream=theirs)
        again = library.take(back, theirs)
        pool.device.fill(buffer.address, NBYTES, 3, back.buffer.stream)
        assert (library.read(again, theirs) == 0x03030303).all()
    assert back.buffer.address == buffer.address
    buffer.free()
    assert pool.stats().exported_bytes == NBYTES
    del taken, again
    back.buffer.free()
    del back  # whose array interface numba has read, so that it is an export itself, and keeps the memory until its end
    assert pool.stats().exported_bytes == 0


def test_memory_freed_while_exported_is_reused_behind_its_consumer(
    card: Card, pool: AsyncMemoryPool, library: Library
) -> None:
    """The block is nobody's while the consumer has it, and waits for the consumer's stream when it lets go."""
    theirs, third, gate, wrong = library.new_stream(), pool.device.create_stream(), card.gate(), card.number()
    buffer = pool.allocate(LIMIT, stream=pool.device.create_stream())  # all there is: the next takes the same memory
    address = buffer.address
    with library.on(theirs):
        taken = library.take(buffer.view("int32"), theirs)
        seen = asyncmem.asarray(taken, stream=theirs)
        card.hold(library.handle(theirs), gate)
        card.fill(library.handle(theirs), seen.buffer, 5)
        buffer.free()
        assert pool.try_allocate(LIMIT, stream=third) is None
        with card.opening(gate, LATER):
            seen.buffer.free()
            del taken, seen, buffer
            after = pool.allocate(LIMIT, stream=third, timeout=10)
            card.fill(third.handle, after, 6)
            card.compare(third.handle, after, 6, wrong)
    card.synchronize()
    assert wrong.value == 0
    card.compare(third.handle, after, 6, wrong)
    card.synchronize()
    assert (after.address, wrong.value) == (address, 0)
    after.free()


def test_a_stream_that_ended_before_its_array_holds_nothing_up(
    card: Card, pool: AsyncMemoryPool, library: Library
) -> None:
    """A consumer may drop its stream first: the block is then ordered behind the whole card, and comes back."""
    theirs = library.new_stream()
    buffer = pool.allocate(NBYTES)
    with library.on(theirs):
        taken = library.take(buffer.view("int32"), theirs)
    del theirs
    buffer.free()
    del taken
    card.synchronize()
    assert pool.stats().exported_bytes == 0
    pool.allocate(NBYTES, stream=pool.device.create_stream(), timeout=10).free()


def test_streams_of_the_libraries_are_streams_of_ours(card: Card, pool: AsyncMemoryPool, library: Library) -> None:
    """A library's stream is the same whether given as object or, while that lives, as number."""
    theirs = library.new_stream()
    home = pool.device.stream_of(theirs)
    assert home.handle == library.handle(theirs)
    assert pool.device.stream_of(library.handle(theirs)) is home
    wrong = card.number()
    with pool.allocate(NBYTES, stream=theirs) as buffer:
        assert buffer.stream is home
        card.fill(library.handle(theirs), buffer, 2)
        card.compare(home.handle, buffer, 2, wrong)
    card.synchronize()
    assert wrong.value == 0


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int64", "float16", "float32", "float64", "complex64", "complex128"]
)
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5)])
def test_every_type_and_shape_goes_to_cupy_by_both_protocols(
    pool: AsyncMemoryPool, cupy: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    """Type, shape and values are the same by DLPack and by the array interface, and on the way back."""
    buffer = pool.allocate(1024)
    array = buffer.view(dtype, shape)
    for taken in (cupy.from_dlpack(array), cupy.asarray(array)):
        assert (taken.shape, taken.dtype) == (shape, np.dtype(dtype))
        taken[...] = 1
        assert (taken.get() == np.ones(shape, dtype)).all()
        back = asyncmem.asarray(taken)
        assert (back.shape, back.dtype) == (shape, np.dtype(dtype))
        assert back.buffer.address == (buffer.address if array.nbytes else 0)
        back.buffer.free()
    del taken, array
    buffer.free()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_short_floats_go_to_torch(pool: AsyncMemoryPool, torch: Any, name: str) -> None:
    """The types of accelerators keep their values both ways."""
    buffer = pool.allocate(1024)
    tensor = torch.from_dlpack(buffer.view(name, (4, 8)))
    assert tensor.dtype == getattr(torch, name)
    tensor.copy_(torch.arange(32, device="cuda").reshape(4, 8))
    back = asyncmem.asarray(tensor)
    assert (back.dtype, back.shape) == (name, (4, 8))
    assert torch.from_dlpack(back).float().cpu().flatten().tolist()[:9] == list(range(9))
    back.buffer.free()
    del tensor
    buffer.free()


def test_torch_refuses_what_has_gaps(torch: Any) -> None:
    """A transposed tensor is no array, and one that is made contiguous is."""
    tensor = torch.zeros((3, 4), device="cuda").T
    with pytest.raises(asyncmem.InvalidRequest, match="contiguous"):
        asyncmem.asarray(tensor)
    assert asyncmem.asarray(tensor.contiguous()).shape == (4, 3)


def test_cuda_core_takes_and_gives(card: Card, pool: AsyncMemoryPool) -> None:
    """Its views are over our memory, in the order of the stream that they are given, and its buffers come in."""
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    from cuda.core.utils import StridedMemoryView

    device = core.Device(0)
    device.set_current()
    theirs, home, gate = device.create_stream(), pool.device.create_stream(), card.gate()
    handle = int(theirs.handle)
    buffer = pool.allocate(NBYTES, stream=home)
    wrong = card.number()
    card.hold(home.handle, gate)
    card.fill(home.handle, buffer, 4)
    with card.opening(gate, LATER):
        view = StridedMemoryView.from_dlpack(buffer.view("int32"), stream_ptr=handle)
        assert (view.ptr, view.shape, view.readonly) == (buffer.address, (WORDS,), False)
        card.compare(handle, buffer, 4, wrong)
    buffer.free()
    del view
    card.synchronize()
    assert wrong.value == 0
    assert pool.stats().exported_bytes == 0

    memory = device.allocate(4096, stream=theirs)
    memory.fill(3, stream=theirs)
    taken = asyncmem.asarray(memory, stream=theirs)
    assert (taken.buffer.address, taken.nbytes) == (int(memory.handle), 4096)
    card.compare(handle, taken.buffer, 0x03030303, wrong)
    theirs.sync()
    assert wrong.value == 0
    taken.buffer.free()
    memory.close(theirs)


def test_page_locked_memory_is_numpys_and_torchs(pool: AsyncMemoryPool, torch: Any) -> None:
    """Memory of the pinned device says kDLCUDAHost; numpy takes that, and torch takes numpy's."""
    torch.cuda.init()  # before, torch takes no memory for page-locked
    with AsyncMemoryPool(pool.device.pinned(), limit="8 MiB") as pinned:
        buffer = pinned.allocate(4096)
        array = buffer.view("float32")
        assert array.__dlpack_device__()[0] == 3
        array.numpy()[:] = 2
        for same in (np.from_dlpack(array), np.from_dlpack(array, device="cpu"), np.asarray(array)):
            assert (same == 2).all()
        tensor = torch.from_numpy(array.numpy())
        assert (tensor.data_ptr(), tensor.is_pinned()) == (buffer.address, True)
        assert tensor.sum().item() == 2048
        del tensor, same
        buffer.free()


@pytest.mark.parametrize("named", ["object", "number"])
def test_a_graph_of_torch_has_memory_of_a_pool(torch: Any, card: Card, make_pool: PoolMaker, named: str) -> None:
    """Its captured stream is new to the pool, and named by another object each time; every replay finds its bytes."""
    pool = make_pool(LIMIT)
    source, graph = torch.zeros(WORDS, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    lent = pool.allocate(NBYTES)
    assert torch.as_tensor(Lent(lent), device="cuda").shape == (WORDS,)
    with pool.graph() as memory, torch.cuda.graph(graph):
        current = torch.cuda.current_stream() if named == "object" else torch.cuda.current_stream().cuda_stream
        buffers = [pool.allocate(NBYTES, stream=current) for _ in range(2)]
        del lent
        taken = [torch.from_dlpack(buffer.view("int32", (WORDS,))) for buffer in buffers]
        taken[0].copy_(source)
        torch.add(taken[0], 1, out=taken[1])
        result = taken[1] * 2
        del taken
        for buffer in buffers:
            buffer.free()
    others = [pool.allocate(NBYTES, timeout=10) for _ in range(4)]
    for value in range(5):
        source.fill_(value)
        for other in others:
            card.fill(0, other, 99)
        graph.replay()
        assert torch.equal(result, torch.full_like(result, 2 * (value + 1)))
    wrong = card.number()
    for other in others:
        card.compare(0, other, 99, wrong)
        other.free()
    card.synchronize()
    assert wrong.value == 0
    del graph
    memory.release()
    pool.allocate(LIMIT, timeout=10).free()


class Lent:
    """What a reading of `__cuda_array_interface__` is given, as words."""

    def __init__(self, buffer: Any) -> None:
        self.__cuda_array_interface__ = buffer.view("int32", (WORDS,)).__cuda_array_interface__


def test_a_graph_of_cupy_has_memory_of_a_pool(cupy: Any, card: Card, make_pool: PoolMaker) -> None:
    """A stream of CuPy's is captured in its own way, and named by what CuPy says is current."""
    pool = make_pool(LIMIT)
    stream = cupy.cuda.Stream(non_blocking=True)
    source = cupy.zeros(WORDS, dtype=cupy.int32)
    card.synchronize()
    with pool.graph() as memory, stream:
        stream.begin_capture()
        buffer = pool.allocate(NBYTES, stream=cupy.cuda.get_current_stream())
        array = cupy.ndarray(
            (WORDS,), cupy.int32, cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(buffer.address, NBYTES, buffer), 0)
        )
        cupy.add(source, 1, out=array)
        cupy.multiply(array, 3, out=source)
        graph = stream.end_capture()
    expected = 0
    for _ in range(3):
        graph.launch(stream)
        stream.synchronize()
        expected = 3 * (expected + 1)
        assert int(source[0]) == int(source[-1]) == expected
    del graph, array
    buffer.free()
    memory.release()
    pool.allocate(LIMIT, timeout=10).free()
