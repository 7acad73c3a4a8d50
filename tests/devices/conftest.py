"""Every device, each with a way to keep a stream busy until a test lets go; GPUs over a fake where there is none."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from asyncmem.devices import (
    Cuda,
    Device,
    GpuStream,
    Host,
    HostStream,
    MetalStream,
    OpenCLStream,
    Rocm,
    Simulated,
    SimulatedStream,
    Stream,
)
from asyncmem.devices.gpu.device import Gpu
from asyncmem.devices.rocm import loaded_copies
from tests.cuda.fake import FakeDriver
from tests.metal.session import open_metal
from tests.processor import open_processor

pytest.register_assert_rewrite("asyncmem.testing.device_contract")
from asyncmem.testing.device_contract import Rig  # noqa: E402  # not before its assertions are rewritten

if TYPE_CHECKING:
    from tests.gpu.card import Card

# By a thread of the driver's, which may still be in one of them after its test.
_CALLED: list[object] = []

# Long against what a test does while the stream is busy, short against a test.
WALL_WORK = 0.4


@pytest.fixture
def vendor(request: pytest.FixtureRequest) -> str:
    """Whose GPU is meant, where it is one."""
    callspec = getattr(request.node, "callspec", None)
    return "rocm" if callspec is not None and callspec.params.get("rig") == "rocm" else "cuda"


@pytest.fixture(params=["host", "virtual", "wall", "cuda", "rocm", "opencl", "metal"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    make: dict[str, Callable[[], Rig]] = {"host": _host, "virtual": _virtual, "wall": _wall, "opencl": _opencl}
    make["metal"] = lambda: _metal(request)
    card: Card | None = None
    if request.param == "cuda":
        driver: FakeDriver | None = request.getfixturevalue("driver")
        if driver is None:
            card = request.getfixturevalue("the_card")
            make["cuda"] = lambda: _real_card(card)
        else:
            make["cuda"] = lambda: _fake_card(driver)
    if request.param == "rocm":
        request.getfixturevalue("driver")
        make["rocm"] = _rocm
    made = make[request.param]()
    yield made
    made.release()
    if card:
        card.clean_up()
    if isinstance(made.device, Gpu):
        for segment in list(made.device._segments._out.values()):  # some tests leave theirs to the process's end
            made.device.free_segment(segment)
    made.device.close()


@pytest.fixture
def device(rig: Rig) -> Device:
    return rig.device


@pytest.fixture
def host() -> Iterator[Host]:
    device = Host()
    yield device
    device.close()


def _host() -> Rig:
    gate = threading.Event()

    def occupy(stream: Stream) -> None:
        assert isinstance(stream, HostStream)
        stream.run(gate.wait)

    return Rig(Host(), occupy, gate.set)


def _virtual() -> Rig:
    device = Simulated(backing=True, autojump=False)

    def occupy(stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        stream.launch(1.0)

    return Rig(device, occupy, device.run_until_idle)


def _wall() -> Rig:
    def occupy(stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        stream.launch(WALL_WORK)

    return Rig(Simulated(backing=True, clock="wall"), occupy, lambda: None)


def _opencl() -> Rig:
    device = open_processor()
    cl = device.driver.cl
    gate = cl.UserEvent(device.context)

    def occupy(stream: Stream) -> None:
        assert isinstance(stream, OpenCLStream)
        cl.enqueue_barrier(stream.queue, wait_for=[gate])

    def release() -> None:
        if gate.command_execution_status != cl.command_execution_status.COMPLETE:
            gate.set_status(cl.command_execution_status.COMPLETE)

    return Rig(device, occupy, release)


def _metal(request: pytest.FixtureRequest) -> Rig:
    device = open_metal(request)
    driver = device.driver
    gate = driver.make(device.mtl_device.newSharedEvent)

    def occupy(stream: Stream) -> None:
        assert isinstance(stream, MetalStream)
        with driver.pool():
            work = stream.queue.commandBuffer()
            assert work is not None
            work.encodeWaitForEvent_value_(gate, 1)
            work.commit()

    return Rig(device, occupy, lambda: gate.setSignaledValue_(1))


def _fake_card(driver: FakeDriver) -> Rig:
    def occupy(stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        driver.hold(stream.handle)
        driver.launch(stream.handle)

    return Rig(Cuda(), occupy, driver.release)


def _rocm() -> Rig:
    """By a function of the host, for which no kernel has to be compiled: the same on a card and over the fake."""
    device = Rocm()
    gate = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: gate.wait())
    _CALLED.append(wait)
    launch = ctypes.CDLL(loaded_copies()[0]).hipLaunchHostFunc
    launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

    def occupy(stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        with device.context.entered():
            assert launch(stream.handle, wait, None) == 0

    return Rig(device, occupy, gate.set)


def _real_card(card: "Card") -> Rig:
    device = Cuda()
    gate = card.gate()

    def occupy(stream: Stream) -> None:
        assert isinstance(stream, GpuStream)
        with device.context.entered():
            card.hold(stream.handle, gate)

    # The gate is of a context that lives on when the device is closed.
    return Rig(device, occupy, lambda: gate.set(1))
