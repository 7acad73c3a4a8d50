"""What goes to a device and what passes: by what it is, not by which library made it."""

from __future__ import annotations

import array

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.devices import Simulated
from asyncmem.pipeline.staging import host_array


class Tensor:
    """An array of the host that speaks DLPack alone, as torch's do."""

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers

    def __dlpack__(self, **options: object) -> object:
        return self._numbers.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._numbers.__dlpack_device__()


NUMBERS = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (NUMBERS, NUMBERS),
        (NUMBERS.T, NUMBERS.T),
        (NUMBERS[:, 1:3], NUMBERS[:, 1:3]),
        (np.float64(3)[...], np.array(3.0)),
        (np.zeros((0, 3), np.int8), np.zeros((0, 3), np.int8)),
        (Tensor(NUMBERS), NUMBERS),
        (Tensor(NUMBERS.T), NUMBERS.T),
        (bytearray(b"abc"), np.frombuffer(b"abc", np.uint8)),
        (memoryview(b"abc"), np.frombuffer(b"abc", np.uint8)),
        (array.array("i", [1, 2]), np.array([1, 2], np.int32)),
    ],
    ids=lambda one: type(one).__name__,
)
def test_arrays_of_the_host_are_read_in_row_major_order(leaf: object, expected: np.ndarray) -> None:
    """Whatever order they lie in."""
    found = host_array(leaf)
    assert found is not None
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert bytes(found.data) == expected.tobytes()


def test_what_lies_in_order_is_not_copied() -> None:
    """The array is over the leaf's own memory."""
    found = host_array(NUMBERS)
    assert found is not None
    assert np.shares_memory(np.asarray(found.data), NUMBERS)


@pytest.mark.parametrize(
    "leaf",
    [1, 2.5, "text", b"bytes", None, np.float32(1), np.array(["a"]), np.array([object()]), np.array(["2020"], "M8[D]")],
    ids=lambda one: type(one).__name__,
)
def test_what_no_device_holds_passes(leaf: object) -> None:
    """Plain values, text, dates and objects stay what they are."""
    assert host_array(leaf) is None


def test_arrays_of_a_device_pass() -> None:
    """They are where they belong."""
    with AsyncMemoryPool(Simulated(1 << 20), limit=1 << 20) as pool, pool.allocate(64) as buffer:
        assert host_array(buffer.view("float32")) is None


def test_swapped_elements_are_refused() -> None:
    """By an error that names them, and not by wrong numbers."""
    with pytest.raises(InvalidRequest, match="dtype"):
        host_array(np.zeros(2, ">f4"))


class ShortFloats:
    """A tensor of elements that numpy has no name for."""

    def __init__(self, pool: AsyncMemoryPool) -> None:
        self._array = pool.allocate(8).view("bfloat16", (2, 2))

    def __dlpack__(self, **options: object) -> object:
        return self._array.__dlpack__(**options)  # type: ignore[arg-type]  # as they came

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_short_floats_go_too() -> None:
    """By DLPack, which alone has a name for them."""
    with AsyncMemoryPool("host", limit=1 << 20) as pool:
        found = host_array(ShortFloats(pool))
        assert found is not None
        assert (found.shape, found.dtype, found.data.nbytes) == ((2, 2), "bfloat16", 8)
        del found
        assert pool.stats().allocated_bytes == 0
