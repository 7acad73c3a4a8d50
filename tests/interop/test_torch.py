"""torch allocates from pools, budgets and leases: its build without CUDA, and the calls that it needs, over a stand-in.

Without a GPU torch makes no tensor there, so here is how it asks for memory; its tensors are in `tests/gpu`.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, BackendUnavailable, InvalidRequest, Lease
from asyncmem.devices import Cuda
from tests.cuda.fake import FakeDriver

from .conftest import MIB

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

if TYPE_CHECKING:
    from .torch_cuda import Tensor, TorchCuda

pytestmark = pytest.mark.fake_only

NEEDS = r"Install a build for CUDA, torch 2\.11"


@pytest.fixture
def interop() -> Iterator[Any]:
    """The module under test, which finds torch as it is now."""
    with pytest.MonkeyPatch.context() as patch:
        for call in ("capture_begin", "capture_end"):  # which it wraps for good
            patch.setattr(torch.cuda.CUDAGraph, call, getattr(torch.cuda.CUDAGraph, call))
        patch.delitem(sys.modules, "asyncmem.interop.torch", raising=False)
        yield import_module("asyncmem.interop.torch")
        patch.delitem(sys.modules, "asyncmem.interop.torch", raising=False)


def settle(holds: Callable[[], bool]) -> None:
    """Wait for what the pool is told soon."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.001)


def lies_in(lease: Lease, *tensors: Tensor) -> bool:
    return all(lease.address <= one.data_ptr() < lease.address + lease.nbytes for one in tensors)


class TestWithoutCuda:
    """torch's build for the CPU."""

    def test_error_says_what_to_install(self, interop: Any, pool: AsyncMemoryPool) -> None:
        """Nothing is changed then: not the lease, and not torch."""
        backwards = torch._C._is_multithreading_enabled()
        with pool.lease(4 * MIB) as lease:
            for block in (interop.use(lease), interop.use(pool)):
                with pytest.raises(BackendUnavailable, match=NEEDS), block:
                    pytest.fail("there is no such memory")
            with pytest.raises(BackendUnavailable, match=NEEDS):
                interop.install(pool)
            with pytest.raises(BackendUnavailable, match=NEEDS):
                interop.give_back()
            lease.allocate(4 * MIB).free()
        assert torch._C._is_multithreading_enabled() == backwards

    def test_only_cudas_memory_is_torchs(self, interop: Any, pool: AsyncMemoryPool) -> None:
        """Other kinds of memory are refused, and to install, leases and two for one device."""
        with AsyncMemoryPool("host", limit=MIB) as host:
            with pytest.raises(InvalidRequest, match="memory of a CUDA device"), interop.use(host):
                pass
            with pytest.raises(InvalidRequest, match="memory of a CUDA device"):
                interop.install(host)
        with pool.lease(MIB) as lease:
            for shares in ((), (pool, pool), (lease,)):
                with pytest.raises(InvalidRequest, match="a pool or a budget for each device"):
                    interop.install(*shares)

    @pytest.mark.parametrize(
        ("inside", "names"),
        [
            ("cuda", ("CUDAGraph", "MemPool", "current_stream", "device", "device_count", "graph_pool_handle", "init",
                      "is_available", "is_current_stream_capturing", "is_initialized", "get_allocator_backend")),
            ("cuda.CUDAGraph", ("capture_begin", "capture_end")),
            ("cuda.memory", ("_snapshot",)),
            ("_C", ("_accelerator_setAllocatorSettings", "_cuda_beginAllocateCurrentThreadToPool",
                    "_cuda_endAllocateToPool", "_cuda_releasePool", "_is_multithreading_enabled",
                    "_set_multithreading_enabled")),
        ],
    )  # fmt: skip
    def test_names_are_torchs(self, inside: str, names: tuple[str, ...]) -> None:
        """What the module needs of torch, and a build without CUDA has, too, is there by that name."""
        found = torch
        for part in inside.split("."):
            found = getattr(found, part)
        assert [name for name in names if not hasattr(found, name)] == []


@pytest.fixture
def cuda_memory(native: Any) -> Iterator[TorchCuda]:
    """torch's calls for CUDA memory, by the stand-in for them."""
    from .torch_cuda import TorchCuda

    made = TorchCuda(native)
    with pytest.MonkeyPatch.context() as patch:
        made.put(patch.setattr, raising=False)
        yield made
        assert made.underway == []


@pytest.fixture
def on_card(cuda_memory: TorchCuda, interop: Any, pool: AsyncMemoryPool) -> Iterator[Any]:
    """The module under test over them; at the end nothing of the pool is live, and torch has what it had."""
    yield interop
    gc.collect()
    interop.give_back()
    settle(lambda: pool.stats().allocated_bytes == 0 and not pool._core.routes)
    assert len([one for one in cuda_memory.pools.values() if one.segments]) <= 1


class TestLease:
    def test_tensors_lie_in_the_lease(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """Inside of the block and on this thread; what products keep, and what is made outside, does not."""
        with pool.lease(48 * MIB) as lease:
            with on_card.use(lease, tag="model"):
                tensors = [cuda_memory.allocate(nbytes) for nbytes in (40, MIB, 3 * MIB, 24 * MIB)]
                assert lies_in(lease, *tensors)
                torch.mm(*tensors[:2])
                assert pool._core.tag_bytes() == {"model": (2 + 20 + 24) * MIB}
                with ThreadPoolExecutor() as threads:
                    assert not lies_in(lease, threads.submit(cuda_memory.allocate, 512).result())
            (workspace,) = cuda_memory.workspaces.values()
            assert not lies_in(lease, workspace)
            assert not lies_in(lease, cuda_memory.allocate(512))
            del tensors

    def test_lease_too_small_says_so(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """torch raises its own error in our words, the cause has the facts, and the block goes on."""
        with pool.lease(32 * MIB) as lease, on_card.use(lease, tag="model"):
            kept = cuda_memory.allocate(20 * MIB)
            with pytest.raises(torch.OutOfMemoryError, match="from a lease of 32 MiB") as caught:
                cuda_memory.allocate(16 * MIB)
            assert str(caught.value).startswith(
                "CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 1024.00 MiB of which "
            )
            assert isinstance(caught.value.__cause__, asyncmem.OutOfMemoryError)
            assert caught.value.__cause__.holders == (("model", 20 * MIB),)
            assert lies_in(lease, kept, cuda_memory.allocate(12 * MIB))
            del kept, caught

    def test_torchs_own_lack_keeps_its_words(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """Where it is not our memory that is missing, nothing of ours is said, also not of an earlier failure."""
        with pool.lease(2 * MIB) as lease, on_card.use(lease):
            with pytest.raises(torch.OutOfMemoryError, match="from a lease"):
                cuda_memory.allocate(4 * MIB)
            cuda_memory.allocate(512)
        assert str(cuda_memory.fail(64 * MIB)) == "CUDA out of memory. Tried to allocate 64.00 MiB."

    def test_wait_in_vain_reads_like_no_memory(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool
    ) -> None:
        """Programs look for torch's words, and the rest tells how long it has waited."""
        with pool.allocate(60 * MIB), on_card.use(pool, timeout=0.01):
            with pytest.raises(torch.OutOfMemoryError, match=r"16\.00 MiB.*pool 'shared' had no") as caught:
                cuda_memory.allocate(16 * MIB)
            assert isinstance(caught.value.__cause__, asyncmem.PoolTimeout)
            del caught

    def test_observers_are_told(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """Those that a program attaches before and after ours, once for each failure, also where ours raises."""
        told: list[str] = []
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: told.append("early"))
        with pool.lease(2 * MIB) as lease, on_card.use(lease):
            torch._C._cuda_attach_out_of_memory_observer(lambda *seen: told.append(f"late {seen[1] // MIB}"))
            with pytest.raises(torch.OutOfMemoryError, match="from a lease"):
                cuda_memory.allocate(24 * MIB)
        assert told == ["early", "late 24"]
        cuda_memory.fail(64 * MIB)
        assert told == ["early", "late 24", "early", "late 64"]

    def test_memory_outside_stays_cached(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """The end of a block gives back what torch has cached of ours, and nothing else."""
        del (cached := [cuda_memory.allocate(12 * MIB)])[:]
        with pool.lease(32 * MIB) as lease:
            for _ in range(3):
                with on_card.use(lease):
                    cuda_memory.allocate(24 * MIB)
                assert lease.stats().allocated_bytes == 0
        assert 12 * MIB in {one.nbytes for one in cuda_memory.pools[(0, 0)].segments}
        assert not cached

    @pytest.mark.parametrize("told", ["by a later block", "by the program"])
    def test_tensor_outlives_its_lease(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool, told: str
    ) -> None:
        """It keeps its segment, which goes back at the end of a later block, or when the program says so."""
        with pool.lease(32 * MIB) as lease, on_card.use(lease):
            kept = cuda_memory.allocate(8 * MIB)
        assert pool.stats().allocated_bytes == 20 * MIB
        del kept
        assert pool.stats().allocated_bytes == 20 * MIB
        if told == "by the program":
            on_card.give_back()
        else:
            with on_card.use(pool):
                pass
        settle(lambda: pool.stats().allocated_bytes == 0)

    @pytest.mark.asyncio
    async def test_tensors_leave_nothing_where_all_wait(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool
    ) -> None:
        """What one that has outlived its block had comes back while requests wait, although no block ends any more."""
        async with pool.lease(64 * MIB) as lease:
            with on_card.use(lease):
                kept = [cuda_memory.allocate(8 * MIB)]

        async def wait() -> int:
            async with pool.lease(64 * MIB) as lease:
                return lease.nbytes

        waiting = asyncio.create_task(wait())
        for _ in range(3):
            await asyncio.sleep(0)
        assert pool.stats().waiting == 1
        kept.clear()
        assert await waiting == 64 * MIB

    def test_recorded_memory_comes_back_after_the_block(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool, cuda: Cuda
    ) -> None:
        """What was freed after `record_stream` waits for an allocation while no thread is inside; the end makes one."""
        side = cuda.create_stream("side")
        with pool.lease(32 * MIB) as lease, on_card.use(lease):
            x = cuda_memory.allocate(24 * MIB)
            x.record_stream(side)
            del x
            assert pool.stats().allocated_bytes >= 24 * MIB
        settle(lambda: pool.stats().allocated_bytes == 0)

    def test_blocks_nest(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """The inner one serves, and then the outer one again, also after an error."""
        with pool.lease(8 * MIB) as outer, pool.lease(8 * MIB) as inner, on_card.use(outer):
            with pytest.raises(ValueError, match="mine"), on_card.use(inner):  # noqa: PT012
                assert lies_in(inner, cuda_memory.allocate(512))
                raise ValueError("mine")
            assert lies_in(outer, cuda_memory.allocate(512))
        assert torch._C._is_multithreading_enabled()

    def test_backward_passes_stay_on_the_thread(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool
    ) -> None:
        """torch's own setting says so inside, and is as it was afterwards."""
        assert cuda_memory
        with pool.lease(8 * MIB) as lease, on_card.use(lease):
            seen: list[int] = []
            x = torch.ones(3, requires_grad=True)
            x.register_hook(lambda _: seen.append(threading.get_ident()))
            (x * 2).sum().backward()
            assert seen == [threading.get_ident()]
            assert not torch._C._is_multithreading_enabled()
        assert torch._C._is_multithreading_enabled()

    def test_pool_of_torchs_dies_beside_a_block(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool
    ) -> None:
        """Blocks of two threads end in any order: ours die while they count as used, which torch would end for."""
        inside, over = threading.Event(), threading.Event()

        def stay() -> None:
            with pool.lease(8 * MIB) as lease, on_card.use(lease):
                x = cuda_memory.allocate(512)
                inside.set()
                assert over.wait(30)
                assert lies_in(lease, x)
                del x

        with ThreadPoolExecutor() as threads:
            staying = threads.submit(stay)
            assert inside.wait(30)
            with pool.lease(32 * MIB) as lease:
                with on_card.use(lease):
                    cuda_memory.allocate(24 * MIB)
                assert lease.stats().allocated_bytes == 0
            over.set()
            staying.result()


class TestSettings:
    def test_locks_are_free_while_torch_asks(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """torch is told to allocate without its lock, keeps its other settings, and is told once."""
        cuda_memory.settings = "max_split_size_mb:64"
        with pool.lease(4 * MIB) as lease:
            for _ in range(2):
                with on_card.use(lease):
                    pass
        assert cuda_memory.settings == "max_split_size_mb:64,release_lock_on_cudamalloc:True"
        assert len(cuda_memory.observers) == 1

    def test_another_backend_is_named(self, cuda_memory: TorchCuda, interop: Any, pool: AsyncMemoryPool) -> None:
        """It has no pools."""
        cuda_memory.backend = "cudaMallocAsync"
        with pytest.raises(BackendUnavailable, match="cudaMallocAsync"), interop.use(pool):
            pass


class TestThreads:
    @pytest.mark.parametrize("shared", ["leases", "pool"])
    def test_many_threads_are_served(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool, shared: str
    ) -> None:
        """With leases of their own and in one pool, where they wait; tensors outlive blocks, and all comes back."""

        def work() -> None:
            for step in range(25):
                with pool.lease(24 * MIB, timeout=60) if shared == "leases" else nullcontext(pool) as share:
                    with on_card.use(share, timeout=60):
                        x, y = cuda_memory.allocate(512), cuda_memory.allocate(MIB)
                        assert x.data_ptr() != y.data_ptr()
                        if step % 3:
                            del x
                    del y
                x = None
                on_card.give_back()  # or all might wait for what is left of tensors that have outlived their blocks

        with ThreadPoolExecutor(4) as threads:
            for one in [threads.submit(work) for _ in range(4)]:
                one.result()

    def test_thread_that_waits_holds_no_lock_of_torchs(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool
    ) -> None:
        """Others allocate and free meanwhile."""
        held = pool.allocate(60 * MIB)

        def ask() -> int:
            with on_card.use(pool, timeout=60):
                return cuda_memory.allocate(32 * MIB).nbytes

        with ThreadPoolExecutor() as threads:
            asks = threads.submit(ask)
            settle(lambda: pool.stats().waiting == 1)
            assert cuda_memory.lock.acquire(timeout=60)
            cuda_memory.lock.release()
            cuda_memory.allocate(512)
            assert not asks.done()
            held.free()
            assert asks.result(60) == 32 * MIB


class TestLoops:
    @pytest.mark.asyncio
    async def test_tasks_have_a_lease_each(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """Ten times more than fit wait for their leases, and none fails for memory."""

        async def serve() -> bool:
            async with pool.lease(20 * MIB) as lease:
                with on_card.use(lease):
                    x = cuda_memory.allocate(2 * MIB)
                    right = lies_in(lease, x)
                    del x
                await asyncio.sleep(0)
                return right

        assert all(await asyncio.gather(*(serve() for _ in range(30))))

    @pytest.mark.asyncio
    async def test_block_that_awaits_raises(self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool) -> None:
        """The loop ends it, so that no other task allocates from its lease; a pool is refused there."""
        async with pool.lease(4 * MIB) as lease:
            with pytest.raises(InvalidRequest, match="without an await inside"), on_card.use(lease):  # noqa: PT012
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not lies_in(lease, cuda_memory.allocate(512))
        with pytest.raises(InvalidRequest, match="a lease on an event loop's thread"), on_card.use(pool):
            pass


class TestCaptures:
    def test_captures_are_told_to_the_devices(
        self, cuda_memory: TorchCuda, on_card: Any, pool: AsyncMemoryPool, cuda: Cuda
    ) -> None:
        """From the first to the last, whichever of torch's calls ends one, for each device that serves torch."""
        assert cuda_memory
        told: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "begin_captures", lambda: told.append("begin"))
            patch.setattr(cuda, "end_captures", lambda: told.append("end"))
            early = torch.cuda.CUDAGraph()
            early.capture_begin()
            assert told == []
            with pool.lease(4 * MIB) as lease, on_card.use(lease):
                assert told == ["begin"], "a device that serves torch from now on is told, too"
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            early.capture_end()
            assert told == ["begin"]
            del graph  # dropped in the middle of its capture
            gc.collect()
            assert told == ["begin", "end"]
            with pytest.raises(RuntimeError, match="cannot capture"):
                early.capture_begin(fails=True)
            assert told == ["begin", "end"] * 2


INSTALLED = """
import ctypes, sys
sys.path[:0] = {folders!r}
import fake as package
fake = package.FakeDriver({library!r})
import torch, torch_cuda
import asyncmem

MIB = 1 << 20
double = torch_cuda.TorchCuda(ctypes.CDLL({native!r}))
double.put()
import asyncmem.interop.torch as interop

pool = asyncmem.AsyncMemoryPool("cuda:0", limit=64 * MIB, segment_size=64 * MIB, min_free=0)
interop.install(pool)
torch.cuda.init()
"""


def test_process_allocates_from_a_pool(fake: FakeDriver, native: Any) -> None:
    """torch's own reports are of the pool, full is an error of torch's in our words, and a lease serves inside."""
    program = """
x = double.allocate(16 * MIB)
assert pool._core.tag_bytes() == {"torch": 16 * MIB}
assert torch.cuda.memory_allocated() == 16 * MIB
y = double.allocate(8 * MIB)
del y
assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (16 * MIB, 24 * MIB)
assert torch.cuda.memory_reserved() == pool.stats().reserved_bytes
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == 16 * MIB
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.memory_stats()["allocation.all.freed"] == 0
assert "16384 KiB" in torch.cuda.memory_summary()
assert "16384 KiB" in torch.cuda.memory_summary(abbreviated=True)
try:
    double.allocate(60 * MIB)
except RuntimeError as error:
    assert "CUDA out of memory" in str(error) and "'torch' 16 MiB" in str(error), error
else:
    raise AssertionError
with pool.lease(4 * MIB) as lease, interop.use(lease, tag="request"):
    z = double.allocate(MIB)
    assert z.data_ptr() == lease.address and pool._core.tag_bytes()["request"] == MIB
    del z
    assert lease.stats().allocated_bytes == 0
side = pool.device.create_stream()
x.record_stream(torch_cuda.Stream(side.handle))
del x
assert torch.cuda.memory_allocated() == 0
try:
    interop.install(pool)
except asyncmem.BackendUnavailable:
    pass
else:
    raise AssertionError
"""
    folders = [str(Path(__file__).parents[1] / "cuda"), str(Path(__file__).parent)]
    begin = INSTALLED.format(folders=folders, library=str(fake.path), native=native._name)
    command = [sys.executable, "-W", "ignore", "-c", begin + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
