"""Numba allocates from pools, budgets and leases. Each program is a process, since Numba keeps its memory manager."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda.fake import FakeDriver

pytestmark = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed")

BEGIN = """
import gc, sys
sys.path.insert(0, {folder!r})
import fake as package
fake = package.FakeDriver({library!r})
import numpy as np
import asyncmem
from numba import cuda
MIB = 1 << 20
"""


def run(fake: FakeDriver, program: str, **environ: str) -> str:
    """Run a program over the fake driver and return what it wrote."""
    begin = BEGIN.format(folder=str(Path(__file__).parents[1] / "cuda"), library=str(fake.path))
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=os.environ | environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


MANAGER = {"NUMBA_CUDA_MEMORY_MANAGER": "asyncmem.interop.numba"}


def test_arrays_lie_in_the_share_of_their_block(fake: FakeDriver) -> None:
    """They go back as they die; what is too large raises, and blocks nest."""
    program = """
import asyncmem.interop.numba as interop

with asyncmem.AsyncMemoryPool("cuda:0", limit=64 * MIB) as pool, pool.lease(4 * MIB) as lease:
    with interop.use(lease, tag="model"):
        x = cuda.to_device(np.arange(1 << 18, dtype=np.int32))
        assert x.device_ctypes_pointer.value == lease.address
        assert x.copy_to_host()[-1] == (1 << 18) - 1
        assert pool._core.tag_bytes() == {"model": MIB}
        assert cuda.device_array(0).size == 0
        try:
            cuda.device_array(MIB, dtype=np.int32)
        except asyncmem.OutOfMemoryError as error:
            assert "from a lease of 4 MiB" in str(error)
        with pool.budget("some", limit=8 * MIB) as budget, interop.use(budget):
            y = cuda.device_array(MIB, dtype=np.int32)
            assert budget.stats().allocated_bytes == 4 * MIB
            del y
            assert budget.stats().allocated_bytes == 0
    assert lease.stats().allocated_bytes == MIB
    del x
    assert lease.stats().allocated_bytes == 0
    with asyncmem.AsyncMemoryPool("cuda:0", limit=2 * MIB, min_free=0, fallback="host") as small, interop.use(small):
        y = cuda.device_array(2 * MIB, dtype=np.uint8)
        try:
            cuda.device_array(2 * MIB, dtype=np.uint8)
        except asyncmem.InvalidRequest as error:
            assert "no host memory" in str(error)
        else:
            raise AssertionError
    print(asyncmem.device("cuda:0").pool.stats().allocated_bytes)
"""
    assert run(fake, program, **MANAGER) == "0\n"


def test_threads_may_begin_at_once(fake: FakeDriver) -> None:
    """Numba makes its list of devices at the first use, and fails where two threads do so."""
    program = """
import threading
import asyncmem.interop.numba as interop

sys.setswitchinterval(1e-6)
failed, together = [], threading.Barrier(8)

def begin():
    together.wait()
    try:
        with interop.use(pool):
            cuda.device_array(100)
    except BaseException as error:
        failed.append(error)

with asyncmem.AsyncMemoryPool("cuda:0", limit=64 * MIB) as pool:
    threads = [threading.Thread(target=begin) for _ in range(8)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    gc.collect()
assert not failed, failed
"""
    run(fake, program, **MANAGER)


def test_memory_of_no_block_is_the_process_pools(fake: FakeDriver) -> None:
    """Figures of the device are the driver's, and other processes get no handle."""
    program = """
x = cuda.to_device(np.arange(1 << 18, dtype=np.int32))
pool = asyncmem.device("cuda:0").pool
assert pool._core.tag_bytes() == {"numba": MIB}
found = cuda.current_context().get_memory_info()
assert 0 < found.free < found.total == 1 << 30
try:
    x.get_ipc_handle()
except NotImplementedError as error:
    print(error)
del x
assert pool.stats().allocated_bytes == 0
"""
    assert "another process" in run(fake, program, **MANAGER)


def test_memory_goes_back_behind_every_stream(fake: FakeDriver) -> None:
    """Numba says of none which has used it, so whoever gets it next comes behind all of them."""
    program = """
import asyncmem.interop.numba as interop

with asyncmem.AsyncMemoryPool("cuda:0", limit=8 * MIB, min_free=0) as pool:
    side, other = pool.device.create_stream(), pool.device.create_stream()  # which do not wait for the default stream
    with interop.use(pool):
        x = cuda.device_array(8 * MIB, dtype=np.uint8)
        place = (x.device_ctypes_pointer.value, 8 * MIB)
        fake.hold(side.handle)
        fake.launch(side.handle, writes=[place])
        del x
    with pool.allocate(8 * MIB, stream=other) as again:
        assert again.address == place[0]
        fake.launch(other.handle, writes=[place])
        fake.release()
    print(fake.violations())
"""
    assert run(fake, program, **MANAGER) == "[]\n"


def test_another_manager_is_named(fake: FakeDriver) -> None:
    """Where Numba has its own already, a block raises, and says what to set."""
    program = """
import asyncmem.interop.numba as interop

with asyncmem.AsyncMemoryPool("cuda:0", limit=8 * MIB) as pool:
    try:
        interop.use(pool)
    except asyncmem.BackendUnavailable as error:
        print(error)
"""
    assert "NUMBA_CUDA_MEMORY_MANAGER" in run(fake, program)
