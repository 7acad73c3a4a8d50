"""Which Metal the tests of this process run over: a stand-in, or that of this Mac, as `ASYNCMEM_TEST_METAL` says."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncmem.devices import Metal

from .fake import FakeMetal

REAL = os.environ.get("ASYNCMEM_TEST_METAL") == "real"


@contextmanager
def in_place(machine: FakeMetal) -> Iterator[None]:
    """Have the machine found by whoever looks for Metal."""
    # Nothing else goes back: what is imported meanwhile, such as a driver's module, can be loaded only once.
    with pytest.MonkeyPatch.context() as patch:
        for name, module in machine.modules().items():
            patch.setitem(sys.modules, name, module)
        yield


@contextmanager
def a_machine() -> Iterator[FakeMetal]:
    """Make one; it must not be used in a way that Metal would not forgive."""
    machine = FakeMetal()
    yield machine
    machine.stop()
    assert machine.wrong == []


def open_metal(request: pytest.FixtureRequest) -> Metal:
    """Open the first device of a new machine, or of this Mac, for as long as the test runs."""
    if REAL:
        return Metal()
    keeper = a_machine()
    machine = keeper.__enter__()
    request.addfinalizer(lambda: keeper.__exit__(None, None, None))
    with in_place(machine):
        return Metal()
