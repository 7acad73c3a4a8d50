"""Fixtures: the processes of a group."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.share.peer import Peers

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # it needs Linux, as the documentation says


@pytest.fixture(scope="session")
def program() -> Iterator[Peers]:
    """What makes processes, started once."""
    with Peers(str(Path(__file__).with_name("member.py"))) as peers:
        yield peers


@pytest.fixture
def members(program: Peers) -> Iterator[Peers]:
    """What makes processes; they end with the test."""
    yield program
    program.clear()
