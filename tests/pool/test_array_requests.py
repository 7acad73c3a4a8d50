"""Arrays by ``await`` and by ``async with``, of zeros, ones and any value; and names that other libraries use."""

import asyncio

import numpy as np
import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError

MIB = 1 << 20


@pytest.mark.asyncio
async def test_a_block_frees_its_array() -> None:
    """By ``async with`` on the request, by ``with`` on the array, and by `free`."""
    async with AsyncMemoryPool("host", limit=MIB) as pool:
        async with pool.empty((4, 4)) as first, pool.empty_batch([(2,), (3,)]) as batch:
            assert (first.shape, len(batch)) == ((4, 4), 2)
        with await pool.zeros(8, "int32") as second:
            assert second.numpy().tolist() == [0] * 8
        third = await pool.empty(3)
        third.free()
        assert [one.buffer.alive for one in (first, second, third)] == [False] * 3
        assert pool.stats().allocated_bytes == 0


@pytest.mark.asyncio
async def test_ones_and_any_value() -> None:
    """The elements are what numpy makes of the value."""
    async with AsyncMemoryPool("host", limit=MIB) as pool:
        async with pool.ones((2, 3)) as ones, pool.full(4, -7, "int16") as full, pool.full((0,), 1) as nothing:
            assert np.array_equal(ones.numpy(), np.ones((2, 3), "float32"))
            assert full.numpy().tolist() == [-7] * 4
            assert nothing.nbytes == 0
        for value, dtype in (("x", "float32"), (1, "bfloat16"), (1 << 40, "int16")):
            with pytest.raises(InvalidRequest, match="value"):
                pool.full(2, value, dtype)


@pytest.mark.asyncio
async def test_a_value_takes_no_memory_of_the_host_before_the_pool_has_some() -> None:
    """Neither where there is never enough, nor while the request waits; a row goes into every row."""
    async with AsyncMemoryPool("host", limit=MIB) as pool:
        for shape in (1 << 45, (1 << 44, 2)):
            with pytest.raises(OutOfMemoryError):
                await pool.full(shape, 1, "int8")
        async with pool.full((2, 3), [1, 2, 3], "int16") as rows, pool.full((), 5) as one:
            assert rows.numpy().tolist() == [[1, 2, 3]] * 2
            assert one.numpy().tolist() == 5
        with pytest.raises(InvalidRequest, match="value"):
            pool.full((2, 3), [1, 2])


@pytest.mark.asyncio
async def test_a_request_for_an_array_is_a_coroutine() -> None:
    """Tasks take it; one that is cancelled has allocated nothing, and wrong arguments are refused at the call."""
    async with AsyncMemoryPool("host", limit=MIB) as pool:
        array, zeros = await asyncio.gather(pool.empty(1), asyncio.create_task(pool.zeros(1)))
        array.free()
        zeros.free()
        with await pool.allocate_async(MIB):
            task = asyncio.create_task(pool.empty(1))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert pool.stats().allocated_bytes == 0
        with pytest.raises(InvalidRequest):
            pool.empty(-1)


def test_a_budget_for_a_block() -> None:
    """It is closed at the end."""
    with AsyncMemoryPool("host", limit=MIB) as pool:
        with pool.budget("b", limit=1024) as budget:
            budget.allocate(1024).free()
        with pytest.raises(asyncmem.PoolClosed):
            budget.allocate(1)

        async def block() -> None:
            async with pool.budget("c", limit=1024) as inner:
                (await inner.allocate_async(1)).free()

        asyncio.run(block())


@pytest.mark.parametrize(
    ("name", "ours"),
    [("memory_summary", "summary()"), ("malloc", "allocate(size)"), ("set_limit", "resize(limit=...)")],
)
def test_what_others_call_a_method_of_a_pool(name: str, ours: str) -> None:
    """The error names ours."""
    with pytest.raises(AttributeError) as caught:
        getattr(AsyncMemoryPool("host"), name)
    assert ours in str(caught.value)


@pytest.mark.parametrize(("name", "ours"), [("record_stream", "use_on(stream)"), ("data_ptr", "address")])
def test_what_others_call_an_attribute_of_a_buffer(name: str, ours: str) -> None:
    """The error names ours."""
    with AsyncMemoryPool("host", limit=MIB) as pool, pool.allocate(1) as buffer:
        with pytest.raises(AttributeError) as caught:
            getattr(buffer, name)
        assert ours in str(caught.value)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = buffer.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [AsyncMemoryPool, asyncmem.Budget, asyncmem.Lease, asyncmem.Buffer])
def test_others_names_cost_nothing(kind: type) -> None:
    """A class with a `__getattr__` has its methods looked up anew at each call, which takes half of a hit."""
    assert not hasattr(kind, "__getattr__")


def test_others_names_are_not_offered() -> None:
    """`dir`, by which editors complete names, has ours alone."""
    with AsyncMemoryPool("host", limit=MIB) as pool, pool.allocate(1) as buffer:
        assert not {"malloc", "free", "release"} & set(dir(pool))
        assert not {"record_stream", "release", "ptr"} & set(dir(buffer))
        assert "allocate" in dir(pool)
        assert "free" in dir(buffer)


@pytest.mark.parametrize(
    ("name", "ours"), [("max_size", "limit"), ("maximum_pool_size", "limit"), ("initial_pool_size", "pregrow")]
)
def test_what_others_call_an_option(name: str, ours: str) -> None:
    """The error names ours, and is a TypeError too, as for any unknown keyword."""
    with pytest.raises(TypeError, match=f"did you mean '{ours}'") as caught:
        AsyncMemoryPool("host", **{name: MIB})  # type: ignore[arg-type]
    assert isinstance(caught.value, InvalidRequest)


@pytest.mark.parametrize("module", ["insight", "pipeline", "planning", "replay", "testing"])
def test_parts_are_there_without_an_import(module: str) -> None:
    """They are imported when they are asked for."""
    assert getattr(asyncmem, module).__name__ == f"asyncmem.{module}"
    assert module in dir(asyncmem)
