"""What goes from a stage on one device to a stage on another."""

from dataclasses import dataclass

import numpy as np
import pytest

from asyncmem import Array, AsyncMemoryPool, Batch, Buffer
from asyncmem.devices import Simulated
from asyncmem.pipeline.trees import copy_buffers, free_buffers

MIB = 1 << 20


@dataclass
class Item:
    """A tree as users make them."""

    whole: Buffer
    arrays: dict[str, Array]
    pieces: Batch
    name: str


@pytest.mark.asyncio
async def test_an_item_of_any_kind_arrives_on_the_other_device_with_its_bytes() -> None:
    """Buffers, arrays and batches in dataclasses and dicts are copied, plain values come along, and the shape stays."""
    here = Simulated(8 * MIB, backing=True)
    there = Simulated(8 * MIB, backing=True, index=1, beside=here)
    async with (
        AsyncMemoryPool(here, limit=8 * MIB) as first,
        AsyncMemoryPool(there, limit=8 * MIB, peers=[here]) as second,
    ):
        item = Item(
            whole=await first.allocate_async(1000),
            arrays={"grid": await first.empty((2, 3), "float32")},
            pieces=await first.allocate_batch([100, 200]),
            name="plain",
        )
        await item.whole.copy_from(bytes(range(250)) * 4)
        await item.arrays["grid"].copy_from(np.arange(6, dtype="float32"))
        for number, piece in enumerate(item.pieces):
            await piece.copy_from(bytes([number]) * piece.nbytes)
        made = await copy_buffers(item, second.allocate_async, here.default_stream)
        free_buffers(item)
        assert isinstance(made, Item)
        assert made.name == "plain"
        back = bytearray(1000)
        await made.whole.copy_to(back)
        assert back == bytes(range(250)) * 4
        grid = np.empty((2, 3), "float32")
        await made.arrays["grid"].copy_to(grid)
        assert grid.tolist() == [[0, 1, 2], [3, 4, 5]]
        for number, piece in enumerate(made.pieces):
            assert piece.device is there
            back = bytearray(piece.nbytes)
            await piece.copy_to(back)
            assert back == bytes([number]) * piece.nbytes
        free_buffers([made.whole, made.arrays, list(made.pieces)])
        assert (first.stats().allocated_bytes, second.stats().allocated_bytes) == (0, 0)
