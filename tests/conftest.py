"""Fixtures that tests everywhere use: the event loops every promise must hold on, and a guard over their threads."""

import asyncio
import contextlib
import functools
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvloop
from blockbuster import BlockBuster, BlockBusterFunction
from hypothesis import settings

from asyncmem import AsyncMemoryPool, LeakWarning
from asyncmem.devices import Metal, OpenCL
from asyncmem.devices.base import Device, Fence

from .cuda.fake import SONAMES, FakeDriver
from .cuda.fake.session import load
from .metal.fake import FakeMetal
from .metal.session import REAL, a_machine, in_place, open_metal
from .processor import open_processor

if TYPE_CHECKING:
    from .gpu.card import Card

# The benchmarks lie beside the package and are not installed. At the end, so that the sources hide nothing installed.
sys.path.append(str(Path(__file__).parents[1]))

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

# What blocks by the device contract, and calls nothing else that does: within a call that is let be, all is.
_BLOCKING: dict[type, set[str]] = {
    Device: {"allocate_segment", "close", "free_segment", "memory"},
    Fence: {"block"},
}


# A run shows what the change did, so its examples are always the same; HYPOTHESIS_PROFILE=searching looks for new ones.
# How long an example takes says only how busy the machine is.
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.register_profile("searching", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

_FAILED = pytest.StashKey[bool]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have each worker of a whole run import other modules first: pytest takes long to rewrite the assertions of one.

    It keeps the outcome in a file, which the other workers read.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    here = Path(__file__).parent
    files = [file.relative_to(here.parent) for file in sorted(here.rglob("test_*.py"))]
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.fail.Exception, pytest.skip.Exception):  # collecting it tells
            importlib.import_module(".".join(file.with_suffix("").parts))


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Take what is there before a module out of the collector's sight: many tests run it, over all each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep for the fixtures whether the test failed."""
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


def has_failed(request: pytest.FixtureRequest) -> bool:
    """Whether a fixture's test has failed, as its end may ask."""
    return request.node.stash.get(_FAILED, False)


def close_pools(request: pytest.FixtureRequest, pools: list[AsyncMemoryPool]) -> None:
    """Close a test's pools and forget them. What a test that failed still holds is no second failure."""
    with warnings.catch_warnings():
        if has_failed(request):
            warnings.simplefilter("ignore", LeakWarning)
        while pools:
            pools.pop().close()


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, LoopFactory]:
    """Run every test marked `asyncio` on asyncio in debug mode, with eager tasks (3.12 and later) and on uvloop."""
    del config, item
    factories: dict[str, LoopFactory] = {"debug": _DebugLoop, "uvloop": uvloop.new_event_loop}
    if sys.version_info >= (3, 12):
        factories["eager"] = _eager_loop
    return factories


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run every test marked `anyio` on trio; asyncio is covered by the mark `asyncio`."""
    return "trio"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test marked `every_vendor` once for each vendor's GPUs."""
    if metafunc.definition.get_closest_marker("every_vendor"):
        metafunc.parametrize("vendor", SONAMES, indirect=True)


@pytest.fixture
def vendor(request: pytest.FixtureRequest) -> str:
    """Whose GPU a test is about: CUDA's, where it does not say that it is about every vendor's."""
    return getattr(request, "param", "cuda")


@pytest.fixture(scope="session")
def find_driver(pytestconfig: pytest.Config) -> Callable[[str], FakeDriver | None]:
    """The stand-in for a vendor's driver, built once for its sources; None where a real card is to be used."""

    @functools.cache
    def find(vendor: str) -> FakeDriver | None:
        assert pytestconfig.cache is not None
        return load(pytestconfig.cache.mkdir("fake-driver"), vendor)

    return find


@pytest.fixture
def driver(
    request: pytest.FixtureRequest, vendor: str, find_driver: Callable[[str], FakeDriver | None]
) -> Iterator[FakeDriver | None]:
    """The fake, with one device of 1 GiB; None on a real card, where tests marked `fake_only` are skipped."""
    if vendor == "rocm" and find_spec("hip") is None:
        pytest.skip("hip-python is not installed")
    fake_driver = find_driver(vendor)
    if fake_driver is None:
        if request.node.get_closest_marker("fake_only"):
            pytest.skip("steers the fake driver")
        yield None
        return
    if fake_driver.live():  # a test that failed has left something, which the others need not suffer for
        fake_driver.devices(1)
    else:
        fake_driver.reset()
    yield fake_driver
    fake_driver.release()
    gc.collect()
    fake_driver.devices(0)  # whoever looks for a GPU between these tests finds none


@pytest.fixture
def fake(driver: FakeDriver | None) -> FakeDriver:
    """The fake, for tests that steer it; on a real card they are skipped."""
    if driver is None:
        pytest.skip("steers the fake driver")
    return driver


@pytest.fixture(scope="session")
def the_card() -> Iterator["Card"]:
    """The real card, for tests that have no `driver`. Where there is none, tests fail: a GPU was asked for."""
    from .gpu.card import Card

    card = Card()
    yield card
    card.close()


@pytest.fixture
def opencl() -> Iterator[OpenCL]:
    """The processor as a device of OpenCL; tests are skipped where there is none for it."""
    device = open_processor()
    yield device
    device.close()


@pytest.fixture
def machine() -> Iterator[FakeMetal]:
    """A machine with a stand-in for Metal, which this process finds meanwhile; skipped where the real one is used."""
    if REAL:
        pytest.skip("steers the stand-in for Metal")
    with a_machine() as machine, in_place(machine):
        yield machine


@pytest.fixture
def metal(request: pytest.FixtureRequest) -> Iterator[Metal]:
    """A device of Metal, over the stand-in unless the real one is asked for."""
    device = open_metal(request)
    yield device
    device.close()


@pytest.fixture(autouse=True)
def no_blocking(request: pytest.FixtureRequest, guard: BlockBuster) -> Iterator[None]:
    """Fail a test in which asyncmem blocks the thread of a running asyncio loop, unless it is marked `may_block`.

    What the device contract says blocks counts as blocking here on every device, also where it takes no time.
    """
    if request.node.get_closest_marker("may_block"):
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.callback(guard.deactivate)
        guard.activate()
        for call in _driver_calls():
            stack.callback(call.activate().deactivate)
        yield


@pytest.fixture(scope="session")
def guard() -> BlockBuster:
    """Make the guard once: finding out what to watch takes longer than watching it."""
    return BlockBuster("asyncmem", excluded_modules=["asyncmem.testing"])


def _driver_calls() -> Iterator[BlockBusterFunction]:
    for base, methods in _BLOCKING.items():
        for kind in _subclasses(base):
            for method in methods & vars(kind).keys():
                # A class of a test's own goes away with it.
                ours = kind.__module__.startswith("asyncmem.")
                yield _driver_call(kind, method) if ours else _driver_call.__wrapped__(kind, method)


@functools.cache
def _driver_call(kind: type, method: str) -> BlockBusterFunction:
    return BlockBusterFunction(kind, method, scanned_modules="asyncmem", excluded_modules="asyncmem.testing")


def _subclasses(base: type) -> Iterator[type]:
    kind: type
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


class _DebugLoop(asyncio.SelectorEventLoop):
    def set_debug(self, enabled: bool) -> None:
        del enabled  # pytest-asyncio switches it off again in every loop that it is given
        super().set_debug(True)


if sys.version_info >= (3, 12):

    def _eager_loop() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)
        return loop
