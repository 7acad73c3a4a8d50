"""Items that go to other processes: what goes in comes out, and what is no item is refused before memory is taken."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from asyncmem import InvalidRequest
from asyncmem.share import items as sent
from asyncmem.share.items import ProtocolError


@dataclass
class Sample:
    """A record."""

    pixels: object
    label: str


class Pair(NamedTuple):
    """Another."""

    left: object
    right: object


TYPES = [Sample, Pair]

plain = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text() | some.binary()
items = some.recursive(
    plain,
    lambda parts: some.lists(parts) | some.tuples(parts, parts)
    | some.dictionaries(some.text() | some.integers(), parts)
    | some.builds(Sample, parts, some.text()) | some.builds(Pair, parts, parts),
    max_leaves=20,
)  # fmt: skip


def described(item: object) -> tuple[bytes, list[object]]:
    tree, leaves = sent.flatten(item, TYPES)
    return sent.encode(tree, [leaf for one in leaves if (leaf := sent.leaf_of(one))]), leaves


@given(items)
def test_an_item_comes_out_as_it_went_in(item: object) -> None:
    """With the types of all its containers."""
    meta, leaves = described(item)
    tree, found = sent.decode(meta, 1 << 30)
    assert [one.nbytes for one in found] == [len(one) for one in leaves]  # type: ignore[arg-type]  # bytes
    again = sent.unflatten(tree, leaves, TYPES)
    assert again == item
    assert type(again) is type(item)


@pytest.mark.parametrize("dtype", ["f4", ">i2", "?", "c16", "M8[ns]", "S5", "U3"])
def test_numpy_arrays_of_plain_elements_go(dtype: str) -> None:
    """Numbers of either byte order, dates and text."""
    (leaf,) = sent.decode(described(np.zeros((3, 2), dtype))[0], 1 << 20)[1]
    assert np.dtype(leaf.dtype) == np.dtype(dtype)
    assert (leaf.shape, leaf.nbytes) == ((3, 2), np.zeros((3, 2), dtype).nbytes)


@pytest.mark.parametrize("item", [object(), {1, 2}, np.array([object()]), np.zeros(2, "i4,i4"), Exception(), open])
def test_what_would_need_pickle_is_refused(item: object) -> None:
    """By an error that says what goes."""
    with pytest.raises(InvalidRequest, match="item: expected arrays"):
        described([item])


def test_records_that_were_not_named_are_refused() -> None:
    """The error says what to do."""
    with pytest.raises(InvalidRequest, match=r"item: expected arrays.*name them"):
        sent.flatten(Sample(1, ""), hint="name them")


json_values = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8)
    | some.sampled_from(["a", "r", "t", "l", "d", "array", "numpy", "scalar", "bytes", "float32", "<f4", "O", "V8"]),
    lambda parts: some.lists(parts, max_size=6) | some.dictionaries(some.text(max_size=3), parts, max_size=3),
    max_leaves=30,
)  # fmt: skip
rows = some.tuples(
    some.sampled_from(["array", "buffer", "numpy", "scalar", "bytes", "x"]),
    some.sampled_from(["float32", "uint8", "<f4", "O", "V8", "S0", "i4,i4", "M8[as]", "", "bfloat16"]),
    some.lists(some.integers(-1, 1 << 70), max_size=4),
    some.integers(-1, 1 << 70),
    some.sampled_from(["", "cuda", 3]),
    some.none() | some.sampled_from(["00" * 36, "00", ""]) | some.text(max_size=4),
)


@given(some.binary() | json_values.map(json.dumps).map(str.encode)
       | some.tuples(json_values, some.lists(rows, max_size=4)).map(json.dumps).map(str.encode))  # fmt: skip
def test_any_description_is_read_or_refused(meta: bytes) -> None:
    """No input raises anything else, has more than there is room for, or makes what is no item."""
    room = 1 << 16
    try:
        tree, leaves = sent.decode(meta, room)
        sent.unflatten(tree, [leaf.made_of(leaf.inline or bytes(leaf.nbytes)) for leaf in leaves], TYPES)
    except ProtocolError:
        return
    assert sum(one.nbytes for one in leaves if one.inline is None) <= room


@pytest.mark.parametrize("deep", ["[" * 200_000, '[["l",' * 100_000, "[" * 500 + "]" * 500])
def test_depth_is_no_way_to_end_a_process(deep: str) -> None:
    """A description may be nested as deep as it likes."""
    with pytest.raises(ProtocolError):
        sent.decode(deep.encode(), 1 << 20)
    with pytest.raises(ProtocolError):
        sent.unflatten(_nested(100_000), [], [])


def _nested(depth: int) -> Any:
    tree: Any = 1
    for _ in range(depth):
        tree = ["l", tree]
    return tree
