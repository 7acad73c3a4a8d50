"""A block that changes its thread ends before its task lets another one run, or raises."""

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import anyio.lowlevel
import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.core import AddressedBuffers
from asyncmem.devices import Cuda, Simulated
from asyncmem.interop.routing import device_of, need_no_blocking, until_suspended

from .conftest import MIB

Scenario = Callable[[], Awaitable[None]]


class Thread:
    """What a block changes of its thread: who is inside."""

    def __init__(self) -> None:
        self.inside: list[str] = []

    def use(self, who: str) -> AbstractContextManager[None]:
        return until_suspended(who, lambda: self.inside.append(who), lambda: self.inside.remove(who))


async def turn() -> None:
    """Let the loop turn twice, on whichever loop: the block was open before the first began."""
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()


def test_block_changes_its_thread_until_it_ends() -> None:
    """Without a loop blocks nest, and end in turn, also by an error."""
    thread = Thread()
    with thread.use("a"), thread.use("b"):
        assert thread.inside == ["a", "b"]
    with pytest.raises(ValueError, match="mine"), thread.use("a"):
        raise ValueError("mine")
    assert thread.inside == []


async def take_turns() -> None:
    """Each task has its own block between two awaits."""
    thread = Thread()

    async def step(who: str) -> None:
        for _ in range(3):
            with thread.use(who), thread.use(f"{who} inside"):
                assert thread.inside == [who, f"{who} inside"]
            await turn()

    async with anyio.create_task_group() as group:
        for who in "abc":
            group.start_soon(step, who)
    assert thread.inside == []


async def await_inside() -> None:
    """The loop ends a block that awaits, so that later rounds find the thread as it was, and the end of it raises."""
    thread = Thread()
    with pytest.raises(InvalidRequest, match="without an await inside"), thread.use("a"):  # noqa: PT012
        await turn()
        assert thread.inside == []
    assert thread.inside == []


async def fail_after_awaiting() -> None:
    """An error of such a block, or a cancellation, goes on as it is, with a note."""
    thread = Thread()
    with pytest.raises(ValueError, match="mine") as caught, thread.use("a"):  # noqa: PT012
        await turn()
        raise ValueError("mine")
    assert "without an await inside" in caught.value.__notes__[0]


SCENARIOS = [take_turns, await_inside, fail_after_awaiting]


@pytest.mark.asyncio
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_on_asyncio(scenario: Scenario) -> None:
    """Blocks are their tasks' own."""
    await scenario()


@pytest.mark.anyio
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_on_trio(scenario: Scenario) -> None:
    """The same."""
    await scenario()


@pytest.mark.asyncio
async def test_block_of_another_task_finds_one_that_is_open() -> None:
    """A task that runs in the very round in which another's block is open is refused, and told whose it is."""
    thread = Thread()
    turned = asyncio.Event()

    async def leaky() -> None:
        with thread.use("the leaky one"):
            await turned.wait()

    async def other() -> None:
        with pytest.raises(InvalidRequest, match="the leaky one"), thread.use("the other"):
            pass
        turned.set()

    leaks = asyncio.ensure_future(leaky())
    await asyncio.ensure_future(other())
    with pytest.raises(InvalidRequest, match="without an await inside"):
        await leaks
    assert thread.inside == []


def test_block_must_end_on_its_thread() -> None:
    """What it changed is another thread's."""
    thread = Thread()
    block = thread.use("a")
    with ThreadPoolExecutor() as threads:
        threads.submit(block.__enter__).result()
        with pytest.raises(InvalidRequest, match="on the thread where it began"):
            block.__exit__(None, None, None)
    assert thread.inside == ["a"]


@pytest.mark.parametrize(
    ("module", "library", "package"),
    [
        ("torch", "torch", "torch"), ("cupy", "cupy", "cupy"), ("numba", "numba", "numba"),
        ("cuda_core", "cuda.core", "cuda-core"), ("rmm", "rmm", "rmm-cu13"),
    ],
)  # fmt: skip
def test_missing_library_says_what_to_install(module: str, library: str, package: str) -> None:
    """asyncmem itself needs none of them."""
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"try: import asyncmem.interop.{module}\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith(library)
    assert f"is missing: pip install '{package}" in done.stdout


class TestShares:
    """What a library needs of a pool, a budget or a lease before it gets memory."""

    def test_only_memory_of_cuda_will_do(self, pool: AsyncMemoryPool) -> None:
        """Its number is the device's; other things are refused by name."""
        assert device_of(pool) == 0
        with pool.lease(MIB) as lease:
            assert device_of(lease) == 0
        with AsyncMemoryPool(Simulated(), limit=MIB) as other, pytest.raises(InvalidRequest, match="CUDA device"):
            device_of(other)
        with pytest.raises(InvalidRequest, match="a pool, a budget or a lease"):
            device_of("cuda:0")  # type: ignore[arg-type]

    def test_memory_of_the_host_is_refused(self, cuda: Cuda) -> None:
        """A pool may fall back to it; the library gets an error, and the memory goes back."""
        with AsyncMemoryPool(cuda, limit=8 * MIB, min_free=0, fallback="host") as small:
            buffers, stream = AddressedBuffers(small, lambda _, one, __: one, tag="library"), cuda.default_stream
            held = buffers.allocate(8 * MIB, stream)
            with pytest.raises(InvalidRequest, match="no host memory"):
                buffers.allocate(MIB, stream)
            assert small.stats().cpu_fallbacks == 1
            buffers.free(held, 8 * MIB, stream)
            buffers.free(buffers.allocate(MIB, stream), MIB, stream)

    @pytest.mark.asyncio
    async def test_only_leases_serve_on_a_loops_thread(self, pool: AsyncMemoryPool) -> None:
        """A pool or a budget might wait there, or grow."""
        async with pool.lease(MIB) as lease:
            need_no_blocking(lease)
        with pytest.raises(InvalidRequest, match="a lease on an event loop's thread"):
            need_no_blocking(pool)

    def test_all_serve_on_other_threads(self, pool: AsyncMemoryPool) -> None:
        """They may block there."""
        need_no_blocking(pool)
