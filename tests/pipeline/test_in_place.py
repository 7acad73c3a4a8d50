"""From a stage's code it is seen that it takes nothing of its share; whatever is not certain counts as taking."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from asyncmem.pipeline.in_place import works_in_place

# ruff: noqa: ARG001, ARG002 - what is not used is what this is about


async def passes_on(item: Any, pool: Any) -> Any:
    return item


async def names_it_otherwise(item: Any, _: Any) -> Any:
    return [part for part in item if part != "pool"]


async def asks_for_the_stream(item: Any, pool: Any) -> Any:
    pool.stream.launch(item)
    return item, pool.stream


class Model:
    """Methods and objects that are called have themselves before the item."""

    async def step(self, item: Any, pool: Any) -> Any:
        return self, item

    async def grow(self, item: Any, pool: Any) -> Any:
        return await pool.allocate_async(item)

    async def __call__(self, item: Any, pool: Any) -> Any:
        return item


class Taking(Model):
    async def __call__(self, item: Any, pool: Any) -> Any:
        return await self.grow(item, pool)


@pytest.mark.parametrize(
    "function", [passes_on, names_it_otherwise, asks_for_the_stream, Model().step, Model(), Taking().step]
)
def test_what_never_looks_at_its_share_takes_nothing(function: Callable[..., Any]) -> None:
    """Nor does what looks at the stream alone."""
    assert works_in_place(function)


async def allocates(item: Any, pool: Any) -> Any:
    return await pool.allocate_async(item)


async def allocates_now_and_then(item: Any, pool: Any) -> Any:
    if item == "large":
        await pool.empty(1)
    return item


async def passes_it_to_others(item: Any, pool: Any) -> Any:
    return await allocates(item, pool)


async def passes_it_beside_a_stream(item: Any, pool: Any) -> Any:
    return await allocates(pool, item.stream)


async def keeps_it_for_later(item: Any, pool: Any) -> Any:
    other = pool
    return other.stream


async def has_it_in_a_function(item: Any, pool: Any) -> Any:
    return lambda: pool


async def has_it_in_a_comprehension(item: Any, pool: Any) -> Any:
    return [await pool.empty(one) for one in item]


async def evaluates(item: Any, pool: Any) -> Any:
    return eval("pool")  # noqa: S307 - the way to a variable is what this is about


async def asks_for_its_variables(item: Any, pool: Any) -> Any:
    return locals()["pool"]


async def takes_anything(*anything: Any) -> Any:
    return anything[1]


@functools.wraps(passes_on)
async def wraps_another(*anything: Any, **options: Any) -> Any:
    return anything[1]


@pytest.mark.parametrize(
    "function",
    [
        allocates, allocates_now_and_then, passes_it_to_others, passes_it_beside_a_stream, keeps_it_for_later,
        has_it_in_a_function, has_it_in_a_comprehension, evaluates, asks_for_its_variables, takes_anything,
        wraps_another, functools.partial(passes_on), Model().grow, Taking(), len, object(),
    ],
)  # fmt: skip
def test_what_may_take_something_is_not_taken_for_less(function: Callable[..., Any]) -> None:
    """Whatever else is done with the share may end in an allocation; of wrappers and compiled code nothing is known."""
    assert not works_in_place(function)
