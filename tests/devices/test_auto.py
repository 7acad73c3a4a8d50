"""Devices are found by name, and a wrong name says what there is."""

from contextlib import closing
from functools import partial

import pytest

from asyncmem.devices import Host, Simulated, device, discovery
from asyncmem.errors import BackendUnavailable, InvalidRequest
from tests.cuda.fake import FakeDriver


def test_auto_is_a_gpu_where_there_is_one(driver: FakeDriver | None) -> None:
    """The first one; and what the name has made is the caller's to close."""
    del driver
    made = device("auto")
    assert made.name == "cuda:0"
    made.close()


@pytest.mark.fake_only
def test_auto_is_the_host_where_there_is_no_gpu(fake: FakeDriver) -> None:
    """Also where a driver is installed."""
    fake.devices(0)
    made = device("auto")
    assert type(made) is Host
    assert made.name == "host"


@pytest.mark.fake_only
@pytest.mark.usefixtures("opencl")
def test_auto_is_a_gpu_by_opencl_where_cuda_has_none(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is no processor; this machine's is taken for one."""
    fake.devices(0)
    monkeypatch.setattr(discovery, "is_processor", lambda _: False)
    made = device("auto")
    assert made.name == "opencl:0"
    made.close()


@pytest.mark.parametrize(
    ("name", "kind", "full_name"),
    [
        ("host", Host, "host"),
        ("simulated", Simulated, "simulated:0"),
        ("simulated:1", Simulated, "simulated:1"),
    ],
)
def test_a_name_makes_a_device(name: str, kind: type, full_name: str) -> None:
    """Its own name says which it is."""
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
    """A device that cannot be had is no typing error; nobody has so many GPUs."""
    with pytest.raises(BackendUnavailable, match="cuda:99") as caught:
        device("cuda:99")
    assert caught.value.tried
    assert "'host'" in caught.value.install


def test_a_gpu_or_the_processor() -> None:
    """By the words that other libraries have."""
    with closing(device("cpu")) as host:
        assert isinstance(host, Host)
    with pytest.MonkeyPatch.context() as patch:
        for one in ("Cuda", "Rocm", "Metal", "_opencl_gpu"):
            patch.setattr(f"asyncmem.devices.discovery.{one}", partial(_absent, one))
        with pytest.raises(BackendUnavailable, match="gpu") as caught:
            device("gpu")
        assert caught.value.tried == ("Cuda", "Rocm", "Metal", "_opencl_gpu")
        patch.setattr("asyncmem.devices.discovery.Metal", Simulated)
        with closing(device("gpu")) as found:
            assert isinstance(found, Simulated)


def _absent(name: str) -> None:
    raise BackendUnavailable(name, tried=(name,))


@pytest.mark.parametrize("source", ["", "cpu:1", ":1", "cuda:x", "opencl:-1", "simulated:-1", "host:1", 7, None])
def test_other_names_are_refused(source: object) -> None:
    """The error lists the names there are."""
    with pytest.raises(InvalidRequest, match=r"'(host|cpu)'") as caught:
        device(source)  # type: ignore[arg-type]  # that is the point
    assert caught.value.expected.count("'host'") <= 1
