"""Devices are found by name, and a wrong name says what there is."""

import pytest

from asyncmem.devices import Host, Simulated, device
from asyncmem.errors import BackendUnavailable, InvalidRequest


@pytest.mark.parametrize(
    ("name", "kind", "full_name"),
    [
        ("auto", Host, "host"),
        ("host", Host, "host"),
        ("simulated", Simulated, "simulated:0"),
        ("simulated:1", Simulated, "simulated:1"),
    ],
)
def test_a_name_makes_a_device(name: str, kind: type, full_name: str) -> None:
    """Without a GPU, "auto" is the host."""
    made = device(name)
    assert type(made) is kind
    assert made.name == full_name


def test_each_name_makes_a_device_of_its_own() -> None:
    """So the one who asked may close it."""
    assert device("host") is not device("host")


def test_a_device_is_passed_through() -> None:
    """What is a device already stays the same object."""
    simulated = Simulated()
    assert device(simulated) is simulated


def test_cuda_says_what_was_tried_and_what_to_use() -> None:
    """A device that cannot be had is no typing error."""
    with pytest.raises(BackendUnavailable, match="cuda:0") as caught:
        device("cuda:0")
    assert caught.value.tried
    assert "'host'" in caught.value.install


@pytest.mark.parametrize("source", ["", "gpu", "cuda:x", "simulated:-1", "host:1", 7, None])
def test_other_names_are_refused(source: object) -> None:
    """The error lists the names there are."""
    with pytest.raises(InvalidRequest, match="host"):
        device(source)  # type: ignore[arg-type]  # that is the point
