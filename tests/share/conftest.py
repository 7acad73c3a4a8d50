"""Fixtures: other processes, and a pool of memory to share with them."""

import sys
from collections.abc import Iterator

import pytest

from asyncmem import AsyncMemoryPool

from .peer import Peer, Peers

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # it needs Linux, as the documentation says


@pytest.fixture(scope="session")
def program() -> Iterator[Peers]:
    """What makes processes, started once."""
    with Peers() as peers:
        yield peers


@pytest.fixture
def peers(program: Peers) -> Iterator[Peers]:
    """What makes processes; they end with the test."""
    yield program
    program.clear()


@pytest.fixture
def peer(peers: Peers) -> Peer:
    """Another process."""
    return peers.new()


@pytest.fixture
def pool() -> Iterator[AsyncMemoryPool]:
    """A pool of memory that can be shared."""
    with AsyncMemoryPool("host", share_limit="64 MiB") as outer:
        yield outer.shared
