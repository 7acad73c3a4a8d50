"""Many arrays over one buffer: each where it belongs, all there together or none, and freed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import anyio.lowlevel
import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, BufferReleased, InvalidRequest, OutOfMemoryError, PoolTimeout
from asyncmem.devices import Device, Host
from asyncmem.testing import SteppedPool
from tests.conservation import refillable, whole
from tests.sweeps import Stage, sweep, sweep_on_trio

from .support import MIB, quick_device

LIMIT = 8 * MIB


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each test on both."""
    return str(request.param)


@pytest.fixture(params=["host", "simulated"])
def device(request: pytest.FixtureRequest) -> Device:
    """A device with real memory."""
    return Host() if request.param == "host" else quick_device(backing=True)


class Dtype:
    """A type of elements that is none for numpy, and is called as torch's are."""

    def __str__(self) -> str:
        return "torch.bfloat16"


class Tensor:
    """What has a shape and a type of elements, and no memory."""

    shape = (5, 2)
    dtype = Dtype()


@pytest.mark.anyio
async def test_arrays_lie_one_behind_the_other_each_where_it_may_begin(device: Device) -> None:
    """A spec is a shape, a pair, or something to be like; the arrays do not overlap and keep the order asked."""
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        specs = [(3, 4), 7, ((2, 2), "float64"), (np.int64(3), np.int8), np.zeros((4, 1), np.int16), Tensor(), (), (0,)]
        async with pool.empty_batch(specs) as arrays:
            assert [(array.shape, str(array.dtype)) for array in arrays] == [
                ((3, 4), "float32"), ((7,), "float32"), ((2, 2), "float64"), ((3,), "int8"), ((4, 1), "int16"),
                ((5, 2), "bfloat16"), ((), "float32"), ((0,), "float32"),
            ]  # fmt: skip
            assert all(array.buffer is arrays.buffer and array.offset % 256 == 0 for array in arrays)
            assert all(one.offset + one.nbytes <= next_.offset for one, next_ in pairwise(arrays))
            assert arrays[3].address == arrays.buffer.address + arrays[3].offset
            like = await pool.empty_batch(arrays)
            assert [array.shape for array in like] == [array.shape for array in arrays]
            like.free()
            assert repr(arrays).startswith("<asyncmem.ArrayBatch of 8 arrays over <Buffer ")
        with pytest.raises(BufferReleased):
            _ = arrays[0].address
        whole(pool)
    device.close()


@pytest.mark.anyio
async def test_copies_and_exports_touch_their_own_array_alone(device: Device) -> None:
    """What goes into one array is seen in it, in the whole, and nowhere else."""
    async with AsyncMemoryPool(device, limit=LIMIT) as pool:
        arrays = await pool.empty_batch([5, (2, 3), 4], align=4)
        sources = [np.full(array.shape, number, np.float32) for number, array in enumerate(arrays, 1)]
        for array, source in zip(arrays, sources, strict=True):
            await array.copy_from(source)
        expected = np.concatenate([source.ravel() for source in sources])
        back = np.empty(15, np.float32)
        await arrays.flat.copy_to(back)
        np.testing.assert_array_equal(back, expected)
        other = await pool.empty(6)
        await other.copy_from(arrays[1])
        await arrays[2].copy_to(back[:4])
        assert set(back[:4]) == {3}
        np.testing.assert_array_equal(other.numpy(np.float32), [2] * 6)
        np.testing.assert_array_equal(arrays[1].numpy(), sources[1])
        np.testing.assert_array_equal(np.from_dlpack(arrays[1]), sources[1])
        np.testing.assert_array_equal(np.asarray(arrays[2]), sources[2])
        arrays.free()
        other.buffer.free()
    device.close()


@pytest.mark.anyio
async def test_gaps_are_zero_where_one_array_spans_all(device: Device) -> None:
    """So sums over the whole are sums over the arrays, whatever the memory held before."""
    async with AsyncMemoryPool(device, limit=LIMIT, segment_size=LIMIT) as pool:
        dirt = await pool.empty(1000, "uint8")
        await dirt.copy_from(np.full(1000, 255, np.uint8))
        dirt.buffer.free()
        arrays = await pool.empty_batch([3, 100, 1])
        for array in arrays:
            await array.copy_from(np.ones(array.shape, np.float32))
        assert arrays.nbytes == 256 + 512 + 4
        assert arrays.flat.size == arrays.nbytes // 4
        await arrays.buffer.stream.synchronize()
        assert arrays.flat.numpy(np.float32).sum() == 104
        arrays.free()
    device.close()


def test_threads_get_them_too_and_blocks_free_them() -> None:
    """Of budgets and leases as well as of the pool."""
    with AsyncMemoryPool(quick_device(), limit=LIMIT) as pool:
        budget = pool.budget("part", limit=MIB)
        with pool.allocate_arrays([3, 4], "int32") as arrays:
            assert [array.nbytes for array in arrays] == [12, 16]
        with pytest.raises(BufferReleased):
            arrays.flat.numpy()
        with pool.lease(MIB) as lease, lease.allocate_arrays([100]) as inner, budget.allocate_arrays([100]) as part:
            assert inner.buffer.nbytes == part.buffer.nbytes == 400
        arrays = pool.allocate_arrays([])
        assert (len(arrays), arrays.nbytes) == (0, 0)
        kept = pool.allocate_arrays([1000])[0]
        assert kept.buffer.alive
        del arrays, kept, inner, part
        whole(pool)


async def take_two_below_zero(pool: AsyncMemoryPool) -> None:
    await pool.empty((-2, -3))


WRONG: list[tuple[Callable[[AsyncMemoryPool], object], str]] = [
    (lambda pool: pool.allocate_arrays([(3, -1)]), "lengths of 0 and above"),
    (lambda pool: pool.allocate_arrays(["abc"]), "a pair of shape and dtype"),
    (lambda pool: pool.allocate_arrays(3), "specs: expected a list"),  # type: ignore[arg-type]  # what is tested
    (lambda pool: asyncio.run(take_two_below_zero(pool)), "shape: expected lengths of 0 and above"),
    (lambda pool: pool.allocate_arrays([(3, "floot")]), "a numpy dtype"),
    (lambda pool: pool.allocate_arrays([3], align=3), "a power of two"),
    (lambda pool: pool.allocate_arrays([3], align=1024), "up to 512"),
    (lambda pool: pool.allocate_arrays([3, (3, "int8")]).flat, "one type of elements"),
    (lambda pool: pool.allocate_arrays([]).flat, "one type of elements"),
    (lambda pool: pool.allocate(8).view("float64", (), 4), "a multiple of the element's 8 bytes"),
    (lambda pool: pool.allocate(8).view("float64", (), 8), "at most"),
    (lambda pool: pool.allocate(8).view("int8", (), -1), "offset"),
    (lambda pool: pool.allocate(8).view("int8", (), 9), "offset"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_cannot_be_right_is_refused(call: Callable[[AsyncMemoryPool], object], words: str) -> None:
    """By an error that says what was expected, and nothing is taken."""
    with AsyncMemoryPool(quick_device(), limit=LIMIT) as pool:
        with pytest.raises(InvalidRequest, match=words):
            call(pool)
        whole(pool)


@pytest.mark.anyio
async def test_more_than_there_can_be_fails_at_once_and_what_is_late_in_time() -> None:
    """Nothing of the batch is taken."""
    async with AsyncMemoryPool(quick_device(), limit=LIMIT) as pool:
        with pytest.raises(OutOfMemoryError):
            await pool.empty_batch([MIB] * 3)
        held = await pool.empty_batch([MIB // 4] * 6)
        with pytest.raises(PoolTimeout):
            await pool.empty_batch([MIB // 4] * 6, timeout=0.01)
        assert pool.stats().allocated_bytes == 6 * MIB
        held.free()
        whole(pool)


async def wait_for_arrays(stage: Stage) -> None:
    """Wait for arrays that are there only once somebody else frees his."""
    async with SteppedPool(quick_device(), limit=LIMIT, segment_size=LIMIT, stall_after=None) as pool:
        first = await pool.empty_batch([MIB, MIB // 2])

        async def use() -> None:
            async with pool.empty_batch([MIB, MIB // 2]) as arrays:
                await anyio.lowlevel.checkpoint()
                assert len(arrays) == 2

        async def let_go() -> None:
            try:
                await anyio.lowlevel.checkpoint()
            finally:
                first.free()

        stage.actor("user", use)
        stage.actor("freer", let_go)
        await stage.finish()
        whole(pool)
        await refillable(pool, LIMIT)


@pytest.mark.may_block
def test_arrays_that_nobody_waits_for_any_more_are_not_taken() -> None:
    """Whoever is cancelled at whichever step, everything comes back."""
    assert sweep(wait_for_arrays).strikes > 10
    assert sweep_on_trio(wait_for_arrays, stride=2).strikes > 5
