"""Every device that runs on any machine, each with a way to keep a stream busy until a test lets go."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from asyncmem.devices import Device, Host, HostStream, Simulated, SimulatedStream, Stream

# Long against what a test does while the stream is busy, short against a test.
WALL_WORK = 0.1


@dataclass(frozen=True)
class Rig:
    """A device under test; `occupy` keeps a stream busy until `release`, or for a moment where time is the wall's."""

    device: Device
    occupy: Callable[[Stream], None]
    release: Callable[[], None]


@pytest.fixture(params=["host", "virtual", "wall"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    make: dict[str, Callable[[], Rig]] = {"host": _host, "virtual": _virtual, "wall": _wall}
    made = make[request.param]()
    yield made
    made.release()
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
