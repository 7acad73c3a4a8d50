"""Fixtures: processes of a cluster."""

import sys
from collections.abc import Iterator

import pytest

from .machines import Machine, Machines

if sys.platform != "linux":
    collect_ignore_glob = ["test_placed.py", "test_faults.py"]  # their processes are forked


@pytest.fixture(scope="session")
def program() -> Iterator[Machines]:
    """What makes processes, started once."""
    with Machines() as machines:
        yield machines


@pytest.fixture(scope="module")
def scheduler(program: Machines) -> Iterator[Machine]:
    """A scheduler with three workers, for the tests of a file that leave them alive."""
    scheduler = program.scheduler()
    for _ in range(3):
        program.worker(scheduler)
    yield scheduler
    program.clear()


@pytest.fixture
def machines(program: Machines) -> Iterator[Machines]:
    """What makes processes; they end with the test."""
    yield program
    program.clear()
