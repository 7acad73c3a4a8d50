"""Marks for pytest: how much memory a test may have, and that it gives all of it back.

pytest imports this at every start, so it lies outside of asyncmem, which is imported only where a test has a mark.
PYTEST_DONT_REWRITE (it asserts nothing): pytest cannot rewrite what an editable install finds, and would warn of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

_MARKS = (
    'asyncmem_limit(size): the test fails if it has more live at once in all pools than that, such as "64 MiB"',
    "asyncmem_no_leaks: the test fails if buffers that it allocates are live after it",
)


def pytest_configure(config: pytest.Config) -> None:
    """Make the marks known."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch a marked test; one that fails by itself is not judged."""
    limit, no_leaks = item.get_closest_marker("asyncmem_limit"), item.get_closest_marker("asyncmem_no_leaks")
    if limit is None and no_leaks is None:
        return (yield)
    from asyncmem.insight.trackers import Watch

    with Watch(limit=None if limit is None else _size(limit), leaks=no_leaks is not None) as watch:
        result = yield
    if complaint := watch.complaint():
        pytest.fail(complaint, pytrace=False)
    return result


def _size(mark: pytest.Mark) -> int:
    from asyncmem.errors import InvalidRequest
    from asyncmem.units import parse_size

    if len(mark.args) != 1 or mark.kwargs:
        pytest.fail('asyncmem_limit takes one size: asyncmem_limit("64 MiB")', pytrace=False)
    try:
        return parse_size(mark.args[0], what="asyncmem_limit")
    except InvalidRequest as error:
        pytest.fail(str(error), pytrace=False)
