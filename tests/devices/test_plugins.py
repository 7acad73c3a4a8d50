"""Devices of other distributions are found by their entry points, and a broken one says whose it is."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncmem import AsyncMemoryPool, BackendUnavailable, DeviceError, InvalidRequest
from asyncmem.devices import Host, Simulated, device, devices

Install = Callable[..., None]

MODULE = """
from asyncmem import DeviceError
from asyncmem.devices import Simulated


class Other(Simulated):
    def __init__(self, index):
        super().__init__("4 GiB")
        self.name = f"other:{index}"


def lost(index):
    raise DeviceError("open", code=7, code_name="LOST")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution that offers devices of the module `otherdevices`."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "otherdevices.py").write_text(MODULE)

    def make(distribution: str = "other-devices", **offers: str) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {value}" for name, value in offers.items())
        (info / "entry_points.txt").write_text(f"[asyncmem.devices]\n{lines}\n")

    yield make
    sys.modules.pop("otherdevices", None)


def test_one_is_made_by_its_name_and_number(install: Install) -> None:
    """For whoever asks for a device, and for a pool."""
    install(other="otherdevices:Other")
    assert device("other").name == "other:0"
    made = device("other:3")
    assert isinstance(made, Simulated)
    assert made.name == "other:3"
    with AsyncMemoryPool("other:1") as pool:
        assert pool.device.name == "other:1"
        pool.allocate(1000).free()


def test_one_is_loaded_only_when_it_is_asked_for(install: Install) -> None:
    """Neither for the names that are ours, nor for a list of what is there."""
    install(other="otherdevices:Other", host="otherdevices:Other")
    assert type(device("host")) is Host
    devices()
    with pytest.raises(InvalidRequest):
        device("another")
    assert "otherdevices" not in sys.modules


def test_their_names_are_among_those_there_are(install: Install) -> None:
    """An unknown name is answered with all that are known."""
    install(other="otherdevices:Other")
    with pytest.raises(InvalidRequest, match="'opencl:N', 'other'"):
        device("others")
    with pytest.raises(InvalidRequest, match="'other'"):
        device("other:x")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("nowhere:Other", "No module named 'nowhere'"),
        ("otherdevices:Missing", "Missing"),
        ("otherdevices:MODULES", "AttributeError"),
        ("otherdevices:__name__", "TypeError"),
        ("builtins:hex", "it makes a str, which is no"),
    ],
)
def test_a_broken_one_says_whose_it_is_and_why(install: Install, value: str, why: str) -> None:
    """With the entry point, the distribution, and what became of it."""
    install(other=value)
    with pytest.raises(BackendUnavailable, match=why) as caught:
        device("other:2")
    assert caught.value.device == "other:2"
    assert f"{value!r} of other-devices" in str(caught.value)


def test_an_error_of_its_own_is_passed_on(install: Install) -> None:
    """It has said what is wrong."""
    install(other="otherdevices:lost")
    with pytest.raises(DeviceError, match="LOST"):
        device("other")


def test_two_of_one_name_are_refused(install: Install) -> None:
    """Which one is meant, nobody can say."""
    install(other="otherdevices:Other")
    install("rival", other="elsewhere:Rival")
    with pytest.raises(BackendUnavailable, match=r"of other-devices.*of rival|of rival.*of other-devices"):
        device("other")
