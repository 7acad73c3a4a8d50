"""Items that go to other processes are the same there, and what is no item is refused before memory is taken."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem import Array, AsyncMemoryPool, Buffer, InvalidRequest
from asyncmem.ranks.items import leaves_of, pack, unpack
from asyncmem.text import to_json

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
ITEMS = st.recursive(
    PLAIN,
    lambda parts: st.lists(parts) | st.lists(parts).map(tuple) | st.dictionaries(PLAIN, parts),
    max_leaves=20,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda parts: (
        st.lists(parts)
        | st.dictionaries(st.sampled_from(["tuple", "list", "dict", "bytes", "memory", "?"]), parts, max_size=2)
        | st.builds(lambda *leaf: {"memory": list(leaf)}, st.sampled_from(["float32", "x", ""]), parts, parts, parts)
    ),
    max_leaves=30,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[AsyncMemoryPool]:
    """Memory for items."""
    with AsyncMemoryPool("host", limit="1 MiB") as pool:
        yield pool


def as_sent(form: Any) -> Any:
    return json.loads(to_json(form))


@given(item=ITEMS)
def test_plain_values_arrive_as_they_are(item: Any) -> None:
    """With their types: tuples are no lists, and True is not 1."""
    packed = pack(item)
    assert repr(unpack(as_sent(packed.form), lambda _: None)) == repr(item)
    assert (packed.nbytes, packed.arrays) == (0, [])


def test_memory_has_its_place_among_all(pool: AsyncMemoryPool) -> None:
    """Each array begins at a multiple of 512 bytes, and arrives with its elements and shape; a buffer is one again."""
    with pool.allocate(1000) as buffer, pool.allocate(4096) as other:
        packed = pack({"a": buffer, "b": [other.view("bfloat16", (3, 5), 64), other.view("int8", (0, 7))]})
        assert [leaf[:3] for leaf in leaves_of(as_sent(packed.form))] == [
            ("uint8", None, 1000),
            ("bfloat16", (3, 5), 30),
            ("int8", (0, 7), 0),
        ]
        assert packed.offsets == [leaf.offset for leaf in leaves_of(packed.form)] == [0, 1024, 1536]
        assert packed.nbytes == 1536
        assert [type(one) for one in packed.arrays] == [Array] * 3
        assert isinstance(buffer, Buffer)


@pytest.mark.parametrize("part", [object(), {1, 2}, 1j, print])
def test_what_cannot_go_is_refused(part: object) -> None:
    """By the name of what it is a part of."""
    with pytest.raises(InvalidRequest, match="output: expected buffers, arrays, plain values"):
        pack([part])


@given(form=JSON)
def test_what_is_no_item_is_refused(form: Any) -> None:
    """Whatever comes, there is an item or a ValueError, and the bytes of memory are those of its shape."""
    try:
        leaves = leaves_of(form)
    except ValueError:
        return
    assert all(leaf.nbytes >= 0 and leaf.offset >= 0 for leaf in leaves)


def test_what_is_nested_too_deep_is_refused() -> None:
    """It ends in no other error."""
    form: Any = None
    for _ in range(100_000):
        form = {"list": [form]}
    with pytest.raises(ValueError, match="no item"):
        leaves_of(form)
    while form is not None:
        form = form["list"].pop()
