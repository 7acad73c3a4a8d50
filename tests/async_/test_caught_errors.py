"""An error that was caught keeps no memory of the frames that it came through, whether or not garbage is collected."""

from __future__ import annotations

import ast
import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, DeadlockError, DeviceError, OutOfMemoryError, PoolTimeout
from asyncmem.devices import Simulated

HALF = 8 << 20


@pytest.fixture(autouse=True)
def no_garbage_is_collected() -> Iterator[None]:
    """What is freed is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def fill(pool: AsyncMemoryPool) -> list[object]:
    """Take all that there may be."""
    return [await pool.allocate_async(HALF), await pool.allocate_async(HALF)]


async def awaited_timeout(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        await pool.allocate_async(512, timeout=0.01)
    except PoolTimeout:
        assert held


async def batch_timeout(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        await pool.allocate_batch([512, 512], timeout=0.01)
    except PoolTimeout:
        assert held


async def awaited_out_of_memory(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        await pool.allocate_async(8 * HALF)
    except OutOfMemoryError:
        assert held


async def synchronous_out_of_memory(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        pool.allocate(512)
    except OutOfMemoryError:
        assert held


async def synchronous_timeout(pool: AsyncMemoryPool) -> None:
    def work() -> None:
        held = [pool.allocate(HALF), pool.allocate(HALF)]
        try:
            pool.allocate(512, timeout=0.01)
        except PoolTimeout:
            assert held

    await asyncio.to_thread(work)


async def lease_timeout(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    try:
        async with pool.lease(HALF, timeout=0.01):
            pytest.fail("there was memory")
    except PoolTimeout:
        assert held


async def inside_of_a_lease(pool: AsyncMemoryPool) -> None:
    async with pool.lease(2 * HALF) as lease:
        held = [lease.allocate(HALF), lease.allocate(HALF)]
        try:
            await lease.allocate_async(512, timeout=0.01)
        except (PoolTimeout, OutOfMemoryError):
            assert held


async def deadlock(pool: AsyncMemoryPool) -> None:
    async with pool.allocate_async(HALF) as first, pool.allocate_async(HALF) as second:
        try:
            await pool.allocate_async(512)
        except DeadlockError:
            assert first.alive
            assert second.alive


async def a_request_that_is_kept(pool: AsyncMemoryPool) -> None:
    held = await fill(pool)
    request = pool.allocate_async(512, timeout=0.01)
    for _ in range(2):
        try:
            await request
        except PoolTimeout:
            assert held
    del held
    assert pool.stats().allocated_bytes == 0
    assert isinstance(request.exception(), PoolTimeout)


@pytest.mark.parametrize(
    "work",
    [
        awaited_timeout,
        batch_timeout,
        awaited_out_of_memory,
        synchronous_out_of_memory,
        synchronous_timeout,
        lease_timeout,
        inside_of_a_lease,
        deadlock,
        a_request_that_is_kept,
    ],
)
def test_a_caught_error_keeps_no_memory(work: Callable[[AsyncMemoryPool], Awaitable[None]]) -> None:
    """The next request is served."""

    async def main() -> None:
        async with AsyncMemoryPool("host", limit=2 * HALF, segment_size=2 * HALF, stall_after=None) as pool:
            await work(pool)
            assert pool.stats().allocated_bytes == 0
            (await pool.allocate_async(2 * HALF, timeout=60)).free()

    asyncio.run(main())


class GrantingLoop(asyncio.SelectorEventLoop):
    """Makes a call in the middle of the next wait that begins, where another thread may grant the request."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def create_future(self) -> asyncio.Future[object]:
        """Make the call, and a future."""
        while self.calls:
            self.calls.pop()()
        return super().create_future()


def test_a_task_that_is_granted_as_it_falls_asleep_keeps_no_memory() -> None:
    """Its request is its coroutine, whose wait knows the task: they must not keep each other."""

    async def work(pool: AsyncMemoryPool, loop: GrantingLoop) -> None:
        held = await pool.allocate_async(2 * HALF)
        task = asyncio.create_task(pool.allocate_async(HALF))
        loop.calls.append(held.free)
        granted = await task
        assert not loop.calls
        assert granted.alive

    loop = GrantingLoop()
    with AsyncMemoryPool("simulated", limit=2 * HALF) as pool:
        loop.run_until_complete(work(pool, loop))
        assert pool.stats().allocated_bytes == 0
    loop.close()


def test_what_a_device_refuses_keeps_no_memory() -> None:
    """The host's memory and a simulated device's calls refuse in frames of their own."""
    device = Simulated("64 MiB")
    with AsyncMemoryPool(device, limit="16 MiB") as pool, AsyncMemoryPool("host", limit="16 MiB") as host:

        def refused() -> None:
            held = [pool.allocate(512), host.allocate(512)]
            with pytest.raises(OutOfMemoryError):
                host.device.allocate_segment(1 << 60)
            device.fail("fill")
            with pytest.raises(DeviceError):
                device.fill(held[0].address, 512, 0, device.default_stream)

        refused()
        assert pool.stats().allocated_bytes == host.stats().allocated_bytes == 0


def kept_errors(source: str) -> list[str]:
    """Return "line: name" of what is raised by a function whose frame keeps it: they keep each other."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
        caught = {(id(inner), node.name) for node in handlers for inner in ast.walk(node)}
        deleted = [target for node in nodes if isinstance(node, ast.Delete) for target in node.targets]
        forgotten = {target.id for target in deleted if isinstance(target, ast.Name)}
        found += [
            f"{node.lineno}: {node.exc.id}"
            for node in nodes
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id[0].islower()
            if (id(node), node.exc.id) not in caught and node.exc.id not in forgotten
        ]
    return found


def test_no_function_keeps_what_it_raises() -> None:
    """Its frame would hold the error and the error its frame, with the caller's buffers, until garbage is collected."""
    root = Path(asyncmem.__file__).parent
    files = [file for file in root.rglob("*.py") if "cli" not in file.parts]  # a command's process ends with its error
    assert len(files) > 100
    assert {str(file.relative_to(root)): kept for file in files if (kept := kept_errors(file.read_text()))} == {}
    assert kept_errors("def f():\n  error = ValueError()\n  raise error") == ["3: error"]
    assert kept_errors("def f():\n  try: g()\n  except OSError as error: raise error") == []
