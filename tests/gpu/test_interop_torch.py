"""torch on a card, with its memory from a pool: where tensors lie, what comes back and when, and what never happens."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest, Lease
from tests.conftest import close_pools, has_failed

MIB = 1 << 20
GIB = 1 << 30
LIMIT = 8 * GIB
LEASE = 256 * MIB

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
    pytest.mark.may_block,
]


@pytest.fixture(scope="session")
def interop(torch: Any) -> ModuleType:
    """The module under test."""
    assert torch
    return import_module("asyncmem.interop.torch")


@pytest.fixture
def pool(request: pytest.FixtureRequest, torch: Any, interop: Any) -> Iterator[AsyncMemoryPool]:
    """A pool beside torch's own memory; at the end it is whole, and nothing of it is live."""
    made = AsyncMemoryPool("cuda:0", limit=LIMIT, name="shared")
    made.open()
    yield made
    torch.cuda.synchronize()
    gc.collect()
    interop.give_back()
    made.check()
    if not has_failed(request):  # whose error keeps what lives in its frames
        settle(lambda: made.stats().allocated_bytes == 0)
    close_pools(request, [made])


def settle(holds: Callable[[], bool]) -> None:
    """Wait for what the pool is told soon."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.001)


def lies_in(lease: Lease, *tensors: Any) -> bool:
    return all(lease.address <= one.data_ptr() < lease.address + lease.nbytes for one in tensors)


def filled(torch: Any, value: int, nbytes: int = 16 * MIB) -> Any:
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


class TestLease:
    def test_tensors_lie_in_the_lease(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Inside of the block torch allocates from the lease, small and large; outside of it, from its own memory."""
        with pool.lease(LEASE) as lease:
            with interop.use(lease):
                small, middle, large = (torch.zeros(n, device="cuda") for n in (10, 1 * MIB, 8 * MIB))
                assert lies_in(lease, small, middle, large)
                assert lies_in(lease, large + 1)
            assert not lies_in(lease, torch.zeros(10, device="cuda"))
            del small, middle, large
            interop.give_back()
            settle(lambda: lease.stats().allocated_bytes == 0)

    def test_statistics_and_record_stream_work(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """torch counts what it has from us, shows it in snapshots, and defers what another stream uses."""
        with pool.lease(LEASE) as lease, interop.use(lease):
            # Not before the block: the first one of a process has torch make its workspaces.
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            x = filled(torch, 1)
            assert torch.cuda.memory_allocated() == before[0] + 16 * MIB
            assert torch.cuda.memory_reserved() >= before[1] + 16 * MIB
            assert any(lease.address <= one["address"] < lease.address + LEASE for one in torch.cuda.memory_snapshot())
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x += 1
            x.record_stream(side)
            torch.cuda.current_stream().wait_stream(side)
            assert int(x[0]) == 2
            del x
        assert torch.cuda.memory_allocated() == before[0]

    def test_lease_too_small_says_so(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """torch raises its own error in our words, the cause has the facts, and the block goes on."""
        with pool.lease(LEASE) as lease, interop.use(lease, tag="model"):
            kept = filled(torch, 1, 200 * MIB)
            with pytest.raises(torch.OutOfMemoryError, match="from a lease of 256 MiB") as caught:
                filled(torch, 2, 100 * MIB)
            text = str(caught.value)
            assert text.startswith("CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total capacity of ")
            assert "'model' 200 MiB" in text
            assert "lease 300 MiB" in text
            assert isinstance(caught.value.__cause__, asyncmem.OutOfMemoryError)
            assert int(kept[-1]) == 1
            assert lies_in(lease, filled(torch, 3, 32 * MIB))
            del kept, caught

    def test_memory_outside_stays_cached(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """The end of a block gives back what torch has cached of ours, and nothing else."""
        small, x = torch.zeros(1, device="cuda"), filled(torch, 1, 512 * MIB)
        reserved = torch.cuda.memory_reserved()
        del x
        for _ in range(3):
            with pool.lease(LEASE) as lease, interop.use(lease):
                filled(torch, 1)
        assert torch.cuda.memory_reserved() == reserved
        del small
        torch.cuda.empty_cache()

    def test_tensor_outlives_its_lease(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """It keeps its segment and its values while others get the rest, and gives it back once it is gone."""
        with pool.lease(LEASE) as lease, interop.use(lease):
            kept = filled(torch, 7)
        for value in range(3):
            with pool.lease(LIMIT // 2) as lease, interop.use(lease):
                filled(torch, value, LIMIT // 2)
        assert bool((kept == 7).all())
        assert pool.stats().allocated_bytes >= 16 * MIB
        del kept
        interop.give_back()
        settle(lambda: pool.stats().allocated_bytes == 0)

    def test_backward_stays_in_the_lease(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Gradients come from it, too."""
        with pool.lease(LEASE) as lease, interop.use(lease):
            weights = torch.randn(1024, 1024, device="cuda", requires_grad=True)
            (weights @ weights).sum().backward()
            assert lies_in(lease, weights, weights.grad)
            del weights

    def test_graph_captured_inside_replays(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """A graph has memory of its own, so it outlives the lease."""
        x = torch.zeros(1024, device="cuda")
        with pool.lease(LEASE) as lease, interop.use(lease):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                (x + 1).sum()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = (x + 1).sum()
        with pool.lease(LIMIT // 2) as lease, interop.use(lease):
            filled(torch, 9, LIMIT // 2)
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            assert float(y) == 1024 * (value + 1)
        del y, graph

    def test_compiled_with_graphs_runs(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """So does `torch.compile` with reduce-overhead, called inside of leases again and again."""
        pytest.importorskip("triton")
        torch._dynamo.reset()
        step = torch.compile(lambda x: torch.relu(x * 2 + 1).sum(), mode="reduce-overhead")
        for value in range(6):
            with pool.lease(LEASE) as lease, interop.use(lease):
                x = torch.full((1 << 20,), float(value), device="cuda")
                torch.compiler.cudagraph_mark_step_begin()
                assert float(step(x)) == (1 << 20) * (2 * value + 1)
                del x
        torch._dynamo.reset()
        gc.collect()
        interop.give_back()

    def test_error_that_is_kept_keeps_its_tensors(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """A block and its lease end by an error, whose frames keep tensors in use, and wait for none of them."""

        def fail() -> None:
            with pool.lease(LEASE) as lease, interop.use(lease):
                x = filled(torch, 5, 128 * MIB)
                torch.cuda._sleep(1_000_000_000)
                x.add_(1)
                raise ValueError("the program's")

        torch.cuda._sleep(1)
        filled(torch, 5, 2).add_(1)  # a kernel that is loaded first waits for the card
        with pytest.raises(ValueError, match="the program's") as caught:
            fail()
        assert not torch.cuda.current_stream().query(), "the block has waited for the card"
        assert pool.stats().allocated_bytes >= 128 * MIB
        with pool.lease(LEASE) as lease, interop.use(lease):
            filled(torch, 9, 128 * MIB)
        x = caught.traceback[-1].frame.f_locals["x"]
        assert bool((x == 6).all())
        del caught, x
        gc.collect()
        interop.give_back()
        settle(lambda: pool.stats().allocated_bytes == 0)

    def test_pool_is_dropped_before_its_tensors(self, torch: Any, interop: Any) -> None:
        """They stay valid, and torch gives their memory back to a pool that nobody else has any more."""

        def run() -> Any:
            short = AsyncMemoryPool("cuda:0", limit=LEASE)
            with short.lease(LEASE) as lease, interop.use(lease):
                kept = filled(torch, 7)
            with pytest.warns(asyncmem.LeakWarning):
                short.close()
            return kept

        kept = run()
        gc.collect()
        assert bool((kept == 7).all())
        del kept
        interop.give_back()


class TestOrder:
    def test_side_stream_that_torch_forgets(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Work of a side stream goes on after the block, and whoever gets the memory next comes behind it."""
        side, wrong = torch.cuda.Stream(), list[tuple[int, int]]()
        least, most = (torch.zeros((), dtype=torch.uint8, device="cuda") for _ in range(2))
        others = pool.allocate(LIMIT - LEASE - 32 * MIB)  # so that the next lease gets the same memory
        for _ in range(20):
            with pool.lease(LEASE, timeout=30) as lease, interop.use(lease):
                x = filled(torch, 1, 128 * MIB)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    torch.cuda._sleep(20_000_000)
                    torch.aminmax(x, out=(least, most))  # which takes no memory as large as x
                x.record_stream(side)
                del x
            with pool.lease(LEASE, timeout=30) as lease, interop.use(lease):
                filled(torch, 2, 128 * MIB)
            side.synchronize()
            if (int(least), int(most)) != (1, 1):
                wrong.append((int(least), int(most)))
        others.free()
        assert wrong == []

    def test_leases_on_streams_of_their_own(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Each stream finds what it wrote, however the leases' memory goes round."""
        streams, wrong = [torch.cuda.Stream() for _ in range(4)], []
        for step in range(100):
            stream = streams[step % 4]
            with pool.lease(LIMIT // 4, stream=stream) as lease, torch.cuda.stream(stream), interop.use(lease):
                x = filled(torch, step, 64 * MIB)
                torch.cuda._sleep(200_000)
                y = x + 1
                same = (y == step + 1).all()
                del x, y
                if not bool(same):
                    wrong.append(step)
                del same
        assert wrong == []


class TestThreads:
    def test_many_threads_use_leases(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Blocks that overlap begin and end in any order, tensors outlive some, and each value is right."""

        def work(seed: int) -> int:
            wrong = 0
            stream = torch.cuda.Stream()
            for step in range(60):
                value = (seed * 60 + step) % 251
                with pool.lease(LEASE, stream=stream, timeout=60) as lease, torch.cuda.stream(stream):
                    with interop.use(lease):
                        x = filled(torch, value)
                        y = x.clone()
                        if step % 3:
                            del x
                    wrong += int((y != value).sum())
                    del y
            return wrong

        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(work, range(4))) == 0
        interop.give_back()

    def test_graphs_are_captured_beside_blocks(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Blocks of another thread that end meanwhile end no capture, on streams that no pool has seen."""
        over, steps = threading.Event(), [0]

        def work() -> None:
            while not over.is_set():
                with pool.lease(LEASE, timeout=60) as lease, interop.use(lease):
                    filled(torch, 1)
                steps[0] += 1

        x = torch.zeros(1024, device="cuda")
        _ = (x + 1).sum()
        with ThreadPoolExecutor(1) as threads:
            worker = threads.submit(work)
            try:
                for value in range(100):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                        y = (x + 1).sum()
                    x.fill_(float(value))
                    graph.replay()
                    assert float(y) == 1024 * (value + 1)
                    del y, graph
            finally:
                over.set()
            worker.result()
        assert steps[0] > 0
        settle(lambda: pool.stats().allocated_bytes == 0)

    def test_no_deadlock_of_locks(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Threads that grow, wait, free and ask torch for figures with the interpreter's lock held get on."""
        end = time.monotonic() + 15
        steps = [0] * 5

        def grow(number: int) -> None:
            while time.monotonic() < end:
                with pool.budget(f"budget {number}", limit=GIB) as budget, interop.use(budget, timeout=30):
                    held = [filled(torch, 1, 64 * MIB) for _ in range(8)]
                    steps[number] += len(held)
                    del held
                pool.empty_cache()

        def ask() -> None:
            while time.monotonic() < end:
                torch.cuda.memory_stats()
                tensor = torch.zeros(1 << 20, device="cuda")
                del tensor
                steps[4] += 1

        threads = [*(threading.Thread(target=grow, args=(i,)) for i in range(4)), threading.Thread(target=ask)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        assert not any(one.is_alive() for one in threads)
        assert all(steps), steps

    def test_pool_waits_on_torchs_thread(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """A full pool makes the thread wait until another gives memory back."""
        held = pool.allocate(LIMIT - LEASE)
        done = threading.Event()

        def ask() -> None:
            with interop.use(pool, timeout=60):
                filled(torch, 1, GIB)
            done.set()

        thread = threading.Thread(target=ask)
        thread.start()
        settle(lambda: pool.stats().waiting == 1)
        held.free()
        assert done.wait(30)
        thread.join()


class TestLoops:
    def test_tasks_of_one_loop_have_a_lease_each(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """Ten times more requests than fit wait for their leases, and none fails for memory."""
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(4))).cuda()
        fits = LIMIT // (1 * GIB)

        async def serve(number: int) -> bool:
            async with pool.lease(1 * GIB, tag=f"request {number}") as lease:
                with interop.use(lease), torch.inference_mode():
                    x = torch.full((4096, 2048), float(number % 3), device="cuda")
                    assert lies_in(lease, x)
                    y = model(x)
                    assert lies_in(lease, y)
                    result = float(y[0, 0])
                    del x, y
                await asyncio.sleep(0.001)
                return result == expected[number % 3]

        with torch.inference_mode():
            expected = [float(model(torch.full((4096, 2048), float(i), device="cuda"))[0, 0]) for i in range(3)]

        async def main() -> list[bool]:
            return await asyncio.gather(*(serve(number) for number in range(10 * fits)))

        assert all(asyncio.run(main()))

    def test_tensors_leave_nothing_where_all_wait(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """What one that has outlived its block had comes back while requests wait, although no block ends any more."""

        async def wait() -> int:
            async with pool.lease(LIMIT) as lease:
                return lease.nbytes

        async def main() -> None:
            async with pool.lease(LIMIT) as lease:
                with interop.use(lease):
                    kept = [filled(torch, 1)]
            waiting = asyncio.create_task(wait())
            for _ in range(3):
                await asyncio.sleep(0)
            assert pool.stats().waiting == 1
            kept.clear()
            assert await waiting == LIMIT

        asyncio.run(main())

    def test_block_that_awaits_raises(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """The loop ends the block, so that no other task allocates from its lease."""

        async def main() -> None:
            async with pool.lease(LEASE) as lease:
                with pytest.raises(InvalidRequest, match="without an await inside"), interop.use(lease):  # noqa: PT012
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    assert not lies_in(lease, torch.zeros(10, device="cuda"))

        asyncio.run(main())

    def test_loops_thread_does_not_block(self, torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
        """There a pool or a budget is refused: it might grow or wait."""
        del torch

        async def main() -> None:
            with pytest.raises(InvalidRequest, match="a lease on an event loop's thread"), interop.use(pool):
                pass

        asyncio.run(main())


def test_locks_are_free_while_torch_asks(torch: Any, interop: Any, pool: AsyncMemoryPool) -> None:
    """torch is told to allocate without its lock, and keeps its other settings."""
    with pool.lease(LEASE) as lease, interop.use(lease):
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
    assert settings["release_lock_on_cudamalloc"]
