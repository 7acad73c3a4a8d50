"""The marker for hazards, and the loops on which a promise is tried."""

from pathlib import Path

import pytest

from .loops import LOOPS, VIRTUAL, Run


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "hazard(*ids): the test guards against these entries of hazards.HAZARDS")


@pytest.fixture(params=VIRTUAL, ids=lambda run: run.__name__)
def virtually(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function under virtual time: step by step on asyncio, and on trio."""
    run: Run = request.param
    return run


@pytest.fixture(params=LOOPS, ids=lambda run: run.__name__)
def everywhere(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine function on each real loop: asyncio in debug mode, eager tasks, uvloop and trio."""
    run: Run = request.param
    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Take the guard over blocking calls from tests without a real loop: there the worker's calls are steps of it."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here) and "everywhere" not in getattr(item, "fixturenames", ()):
            item.add_marker("may_block")
