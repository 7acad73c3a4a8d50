"""A card, and a library that asks for memory in C."""

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Cuda
from tests.compiler import find_compiler
from tests.conftest import close_pools
from tests.cuda.fake import FakeDriver
from tests.cuda.leftovers import check_nothing_left

MIB = 1 << 20


@pytest.fixture
def cuda(driver: FakeDriver | None) -> Iterator[Cuda]:
    """The first card; afterwards nothing of it is left, and no work was without order."""
    before = {} if driver is None else driver.live()
    device = Cuda(0)
    yield device
    device.close()
    check_nothing_left(driver, before)


@pytest.fixture
def pool(request: pytest.FixtureRequest, cuda: Cuda) -> Iterator[AsyncMemoryPool]:
    """A pool on it, whole and empty at the end."""
    made = [AsyncMemoryPool(cuda, limit=64 * MIB, segment_size=8 * MIB, min_free=0, stall_after=None, name="shared")]
    yield made[0]
    made[0].check()
    close_pools(request, made)
    request.node.funcargs.clear()  # which would keep the pool, and with it streams, until the last look at what is left


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library, whose calls let go of the interpreter's lock."""
    library = tmp_path_factory.mktemp("native") / "native.so"
    source = Path(__file__).with_name("native.cpp")
    command = [find_compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-o", library, source]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long
    loaded.churn.argtypes = [pointer, pointer, ctypes.c_int, pointer, number, number, size, ctypes.c_uint32]
    loaded.churn.restype = ctypes.c_long
    loaded.storm.argtypes = [pointer, pointer, pointer, ctypes.c_int, pointer, ctypes.c_int, number, size]
    loaded.storm.restype = number
    loaded.wait_and_take.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]
    loaded.wait_and_take.restype = pointer
    loaded.holding = ctypes.PyDLL(str(library))  # the same, but for the lock
    return loaded
