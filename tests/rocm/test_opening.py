"""Finding HIP's runtime and what it shows: whatever is missing, the error names it and says what to do."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncmem.devices import Cuda, Rocm, device, devices, discovery, select_device_for
from asyncmem.devices import rocm as rocm_driver
from asyncmem.devices.rocm import runtime_files
from asyncmem.errors import BackendUnavailable, DeviceError, InvalidRequest
from tests.cuda.fake import FakeDriver

pytestmark = pytest.mark.fake_only


def test_a_device_is_found_by_its_name(fake: FakeDriver) -> None:
    """With or without a number, which has to be one of those that the runtime shows."""
    fake.devices(2)
    for name, full in (("rocm", "rocm:0"), ("rocm:1", "rocm:1")):
        made = device(name)
        assert type(made) is Rocm
        assert (made.name, made.kind, made.dlpack_device) == (full, "rocm", (10, made.index))
        assert not isinstance(made, Cuda)
        made.close()
    with pytest.raises(BackendUnavailable, match="only rocm:0 to rocm:1"):
        Rocm(2)
    with pytest.raises(InvalidRequest, match="index"):
        Rocm(-1)


@pytest.mark.usefixtures("fake")
def test_auto_takes_it_where_cuda_has_none(nvidia: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after CUDA and before OpenCL, in "auto" and where one is chosen; OpenCL does not list it again."""
    made = device("auto")
    assert made.name == "rocm:0"
    made.close()

    class Card:
        vendor_id = 0x1002

    monkeypatch.setattr(discovery, "find_devices", lambda _: [Card()])
    monkeypatch.setattr(discovery, "is_processor", lambda _: False)
    assert [one.name for one in devices()] == ["cuda", "rocm:0", "host"]
    assert select_device_for(1) == select_device_for(1, prefer="rocm") == "rocm:0"
    nvidia.devices(1)
    assert [one.name for one in devices()] == ["cuda:0", "rocm:0", "host"]
    assert select_device_for(1) == "cuda:0"
    assert select_device_for(1, prefer=("rocm:0", "cuda")) == "rocm:0"


def test_it_is_listed_where_somebody_has_asked_for_it(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason why it cannot be used; where hip-python is missing, nobody has."""
    fake.devices(0)
    line = next(one for one in devices() if one.kind == "rocm")
    assert (line.name, line.usable) == ("rocm", False)
    assert "no GPU" in (line.reason or "")
    monkeypatch.setattr(discovery, "find_spec", lambda _: None)
    assert all(one.kind != "rocm" for one in devices())


@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_hidden_devices_are_named_as_the_reason(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Nobody looks for a card that a variable hides."""
    monkeypatch.setenv(variable, "7")
    fake.devices(0)
    with pytest.raises(BackendUnavailable, match=rf"hipInit: the runtime sees no GPU; {variable} is '7'") as caught:
        Rocm()
    assert "host" in caught.value.install


@pytest.mark.parametrize(("code", "error"), [(35, BackendUnavailable), (101, BackendUnavailable), (999, DeviceError)])
def test_a_runtime_that_cannot_start_says_why(fake: FakeDriver, code: int, error: type[Exception]) -> None:
    """What means that nothing can be had is no failure."""
    fake.fail("cuInit", 1, code)
    with pytest.raises(error, match="hipInit"):
        Rocm()


@pytest.mark.usefixtures("fake")
def test_an_old_runtime_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers mean other things."""
    monkeypatch.setenv("FAKE_HIP_VERSION", "50733201")
    with pytest.raises(BackendUnavailable, match=r"HIP 5\.7") as caught:
        Rocm()
    assert "ROCm 6.0" in caught.value.install


def test_without_hip_python_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, so that a look costs next to nothing where nobody wants ROCm."""
    monkeypatch.setattr(rocm_driver, "find_spec", lambda _: None)
    monkeypatch.setattr(rocm_driver, "runtime_files", lambda: pytest.fail("looked for the runtime"))
    with pytest.raises(BackendUnavailable, match="hip-python") as caught:
        Rocm()
    assert "asyncmem[rocm]" in caught.value.install


@pytest.mark.usefixtures("fake")
def test_two_copies_of_the_runtime_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One knows nothing of the other's memory; which of them all use is the user's choice."""
    monkeypatch.setattr(rocm_driver, "loaded_copies", lambda: ("/opt/rocm/lib/one", "/torch/lib/other"))
    with pytest.raises(BackendUnavailable, match="/opt/rocm/lib/one, /torch/lib/other") as caught:
        Rocm()
    assert "ROCM_PATH" in caught.value.install


def test_the_runtime_is_looked_for_where_hip_python_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is loaded already comes first, then the folder that a variable names, then the loader's own."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libamdhip64.so.7").touch()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    monkeypatch.setattr("asyncmem.devices.rocm.loaded_copies", lambda: ("/loaded",))
    monkeypatch.setattr("asyncmem.devices.rocm.find_spec", lambda _: None)
    first, second, *others = runtime_files()
    assert (first, second) == ("/loaded", str(folder / "libamdhip64.so.7"))
    assert others == ["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"]
    monkeypatch.setattr("asyncmem.devices.rocm.find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "rocm_sdk", SimpleNamespace(find_libraries=lambda name: [Path("/sdk", name)]))
    assert list(runtime_files())[:3] == ["/loaded", "/sdk/amdhip64", second]


def test_a_machine_without_the_runtime_says_what_to_install(tmp_path: Path) -> None:
    """The library is named as the loader names it."""
    program = """
import asyncmem.devices.rocm as driver
driver.find_spec = lambda name: object() if name == "hip" else None
from asyncmem.devices import Rocm
from asyncmem.errors import BackendUnavailable
try:
    Rocm()
except BackendUnavailable as error:
    print(error)
"""
    environ = os.environ | {"ROCM_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True, env=environ
    )
    assert "libamdhip64.so" in done.stdout
    assert "ROCM_PATH" in done.stdout
