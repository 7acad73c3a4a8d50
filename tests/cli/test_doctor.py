"""`asyncmem doctor`: it says what is there, whatever is there."""

import json
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import Result

from asyncmem.cli import nvidia
from asyncmem.cli.findings import NO_CUDA_DEVICE, diagnose
from asyncmem.options import OPTIONS

Invoke = Callable[..., Result]


def test_the_findings_have_a_schema(invoke: Invoke) -> None:
    """`--json` prints one document with these keys, which only ever grow."""
    result = invoke("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["healthy"] is True
    assert {"machine", "devices", "nvidia", "options", "options_error", "advice"} <= set(found)
    assert {"python", "platform", "packages", "loop", "core", "processors"} <= set(found["machine"])
    assert found["machine"]["core"]
    assert found["machine"]["packages"]["numpy"]
    host, simulated, *_ = found["devices"]
    assert (host["name"], host["available"]) == ("host", True)
    assert 0 < host["free_bytes"] <= host["total_bytes"]
    assert (simulated["name"], simulated["available"]) == ("simulated", True)
    assert [option["name"] for option in found["options"]] == list(OPTIONS)
    assert found["advice"]


def test_a_person_gets_the_same_in_words(invoke: Invoke) -> None:
    """Without `--json` the findings are tables, and what to do stands last."""
    result = invoke("doctor")
    assert result.exit_code == 0, result.output
    for word in ("Devices", "host", "simulated", "python", "Options in force", "segment_size", "What to do"):
        assert word in result.stdout


def test_an_option_says_which_variable_set_it(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that the environment sets names its variable, and others are at their default."""
    monkeypatch.setenv("ASYNCMEM_LIMIT", "1 GiB")
    monkeypatch.setenv("ASYNCMEM_CONF", "pregrow:16MiB")
    found = json.loads(invoke("doctor", "--json").stdout)
    options = {option["name"]: (option["value"], option["origin"]) for option in found["options"]}
    assert options["limit"] == ("1 GiB", "ASYNCMEM_LIMIT")
    assert options["pregrow"] == ("16 MiB", "ASYNCMEM_CONF")
    assert options["timeout"] == ("none", "default")
    assert options["fraction"] == ("90%", "default")
    assert options["defragment"] == ("on", "default")
    assert options["stall_after"] == ("10 s", "default")
    assert options["shared_cache_blocks"] == ("1024", "default")


def test_a_wrong_variable_is_reported_and_not_fatal(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that every pool would refuse makes the command exit with 1, and the rest is still shown."""
    monkeypatch.setenv("ASYNCMEM_LIMITT", "1 GiB")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "ASYNCMEM_LIMITT" in result.output
    assert "did you mean" in result.output
    assert "simulated" in result.output


def driver_with(cards: int, *, init: int = 0) -> ModuleType:
    """Make a stand-in for `cuda.bindings.driver` that answers for so many cards."""
    module = ModuleType("driver")

    class Code(int):
        name = "CUDA_SUCCESS"

    class Refused(int):
        name = "CUDA_ERROR_NO_DEVICE"

    module.__dict__.update(
        cuInit=lambda _: (Refused(init) if init else Code(0),),
        cuDriverGetVersion=lambda: (Code(0), 13000),
        cuDeviceGetCount=lambda: (Code(0), cards),
        cuDeviceGet=lambda index: (Code(0), index),
        cuDeviceGetName=lambda *_: (Code(0), b"Card\0\0   "),
        cuDeviceGetAttribute=lambda attribute, _: (Code(0), attribute),
        cuDeviceTotalMem=lambda _: (Code(0), 8 << 30),
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=9, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=0
        ),
    )
    return module


def with_bindings(monkeypatch: pytest.MonkeyPatch, driver: ModuleType | None) -> None:
    """Let the probe find this driver, or none."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


def test_cards_are_listed_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with cards has them named, and is told honestly that this version cannot use them yet."""
    with_bindings(monkeypatch, driver_with(2))
    findings = nvidia.probe()
    assert findings["found"]
    assert findings["cuda"] == "13.0"
    assert findings["cards"][1] == {"name": "Card", "total_bytes": 8 << 30, "compute_capability": "9.0"}
    monkeypatch.setattr("asyncmem.cli.findings.look_for_driver", lambda: findings)
    diagnosis = diagnose({})
    assert [device.name for device in diagnosis.devices[2:]] == ["cuda:0", "cuda:1"]
    assert all(NO_CUDA_DEVICE in device.detail for device in diagnosis.devices[2:])
    assert any(NO_CUDA_DEVICE in line for line in diagnosis.advice)


def test_a_driver_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own name of its error is in the reason."""
    with_bindings(monkeypatch, driver_with(0, init=100))
    assert nvidia.probe()["reason"] == "the driver refused: CUDA_ERROR_NO_DEVICE (100)"


def test_without_cuda_python_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is a reason, and no error."""
    with_bindings(monkeypatch, None)
    findings = nvidia.probe()
    assert not findings["found"]
    assert "cuda-python" in str(findings["reason"])


def test_a_driver_that_kills_its_caller_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked in a child process: when that dies, its last words are the reason."""
    dead = subprocess.CompletedProcess([], -11, stdout="", stderr="Fatal Python error: Segmentation fault\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    assert "Segmentation fault" in str(nvidia.look_for_driver()["reason"])


def test_a_driver_that_hangs_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not answer costs a bounded time."""

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", nvidia.PROBE_SECONDS)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not answer" in str(nvidia.look_for_driver()["reason"])
