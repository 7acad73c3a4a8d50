"""A tree keeps its shape and its types, whatever becomes of its leaves."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from asyncmem.pipeline.trees import map_leaves


class Pair(NamedTuple):
    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Record:
    image: object
    label: object = field(default=0)


class Names(list[object]):
    """A list with something of its own."""


class Shape(tuple[int, ...]):
    """A tuple that is a thing by itself, as torch's sizes are."""

    __slots__ = ()


def tenfold(leaf: object) -> object:
    return leaf * 10 if isinstance(leaf, int) else leaf


def ordinary() -> defaultdict[str, object]:
    return defaultdict(list, {"a": 1})


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (1, 10),
        ("text", "text"),
        ((1, [2, {"a": 3}], ()), (10, [20, {"a": 30}], ())),
        (Pair(1, Pair(2, None)), Pair(10, Pair(20, None))),
        (Record(1, (2,)), Record(10, (20,))),
        (OrderedDict(b=1, a=2), OrderedDict(b=10, a=20)),
        (UserDict({"a": 1}), UserDict({"a": 10})),
        (ordinary(), defaultdict(list, {"a": 10})),
        (Names([1, 2]), Names([10, 20])),
        (Record, Record),
        (Shape([1, 2]), Shape([1, 2])),
    ],
    ids=repr,
)
def test_kinds_are_kept_and_the_original_is_as_it_was(tree: object, expected: object) -> None:
    """Nothing is changed in place."""
    before = repr(tree)
    found = map_leaves(tree, tenfold)
    assert found == expected
    assert type(found) is type(expected)
    assert repr(tree) == before


def test_leaves_come_in_order() -> None:
    """Twice the same order, so that what was taken out can be put back."""
    tree = {"b": [1, (2, Record(3, 4))], "a": 5}
    seen: list[object] = []
    map_leaves(tree, seen.append)
    assert seen == [1, 2, 3, 4, 5]
