"""Items that go to the next rank are the same there, and each part of their memory has its place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem import Array, AsyncMemoryPool, InvalidRequest
from asyncmem.ranks.carriers import pack, places_of
from asyncmem.share.items import leaves_of, unflatten
from asyncmem.text import to_json

SCALARS = st.sampled_from([np.float32(0.5), np.int64(-3), np.datetime64("2026-01-01"), np.True_])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | SCALARS
ITEMS = st.recursive(
    PLAIN,
    lambda parts: st.lists(parts) | st.lists(parts).map(tuple) | st.dictionaries(PLAIN, parts),
    max_leaves=20,
)


def as_heard(form: Any) -> Any:
    return json.loads(to_json(form))


@given(item=ITEMS)
def test_plain_values_arrive_as_they_are(item: Any) -> None:
    """With their types: tuples are no lists, and True is not 1."""
    packed = pack(item)
    tree, rows = as_heard(packed.form)
    found = [leaf.made_of(leaf.inline) for leaf in leaves_of(rows) if leaf.inline is not None]
    assert repr(unflatten(tree, found)) == repr(item)
    assert (packed.nbytes, packed.arrays, packed.offsets) == (0, [], [])


def test_memory_has_its_place_among_all() -> None:
    """Each array begins at a multiple of 512 bytes, and arrives with its elements and shape; a buffer is one again."""
    with AsyncMemoryPool("host", limit="1 MiB") as pool, pool.allocate(1000) as buffer, pool.allocate(4096) as other:
        packed = pack({"a": buffer, "b": [b"x", other.view("bfloat16", (3, 5), 64), other.view("int8", (0, 7))]})
        leaves = [leaf for leaf in leaves_of(as_heard(packed.form)[1]) if leaf.inline is None]
        assert [(leaf.kind, leaf.dtype, leaf.shape, leaf.nbytes) for leaf in leaves] == [
            ("buffer", "uint8", (1000,), 1000),
            ("array", "bfloat16", (3, 5), 30),
            ("array", "int8", (0, 7), 0),
        ]
        assert packed.offsets == [0, 1024, 1536]
        assert packed.nbytes == 1536
        assert places_of(packed.arrays) == [0, 1024, 1536, 1536]
        assert [type(one) for one in packed.arrays] == [Array] * 3
        assert leaves[0].made_of(buffer) is buffer


@pytest.mark.parametrize("part", [object(), {1, 2}, 1j, print, np.zeros(3), np.array([print])])
def test_what_cannot_go_is_refused(part: object) -> None:
    """With what could."""
    with pytest.raises(InvalidRequest, match="item: expected arrays"):
        pack([part])
