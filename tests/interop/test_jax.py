"""JAX by DLPack, in both directions, on memory of the host; on a card, see `tests/gpu/test_interop_libraries.py`."""

import gc
from typing import Any

import numpy as np
import pytest

import asyncmem
from asyncmem import AsyncMemoryPool

jax: Any = pytest.importorskip("jax", reason="JAX is not installed")


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16", "float8_e4m3fn"])
async def test_jax_computes_on_a_pools_memory(dtype: str) -> None:
    """Without a copy, also of types that numpy alone has not; a freed buffer's block waits for JAX's array."""
    async with AsyncMemoryPool("host", limit="1 MiB") as pool:
        x = await pool.full((100, 10), 2, dtype)
        await x.buffer.stream.synchronize()
        y = jax.dlpack.from_dlpack(x)
        assert (str(y.dtype), y.shape) == (dtype, (100, 10))
        assert y.unsafe_buffer_pointer() == x.buffer.address
        x.buffer.free()
        assert pool.stats().exported_bytes == y.nbytes
        assert float((y.astype("float32") * 2).sum()) == 4000
        del y
        jax.clear_caches()
        gc.collect()
        assert pool.stats().exported_bytes == 0


@pytest.mark.asyncio
async def test_array_of_jax_is_taken_in() -> None:
    """Without a copy; it is JAX's until it is let go of, and can be copied into a pool's memory."""
    there = jax.numpy.arange(12.0).reshape(3, 4)
    there.block_until_ready()
    here = asyncmem.asarray(there)
    assert here.buffer.address == there.unsafe_buffer_pointer()
    assert (here.shape, here.dtype) == ((3, 4), "float32")
    async with AsyncMemoryPool("host", limit="1 MiB") as pool:
        mine = await pool.empty((3, 4), "float32")
        await mine.copy_from(there)
        assert (mine.numpy() == np.arange(12.0).reshape(3, 4)).all()
        mine.buffer.free()
