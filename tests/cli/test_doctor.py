"""`asyncmem doctor`: it says what is there, whatever is there."""

import ast
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from click.testing import Result

from asyncmem.cli import machine
from asyncmem.errors import BackendUnavailable
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
    assert options["fence_every"] == ("16", "default")


def test_an_unknown_variable_is_warned_of(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools ignore a variable that means no option, so the exit status is that of a sound environment."""
    monkeypatch.setenv("ASYNCMEM_LIMITT", "1 GiB")
    result = invoke("doctor")
    assert result.exit_code == 0
    (line,) = (line for line in result.output.splitlines() if "ASYNCMEM_LIMITT" in line)
    assert "did you mean 'ASYNCMEM_LIMIT'?" in line
    assert line.endswith("it is ignored")
    found = json.loads(invoke("doctor", "--json").stdout)
    assert (found["healthy"], found["options_error"], len(found["options_warnings"])) == (True, None, 1)


def test_a_wrong_value_is_an_error(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pool opens, so the command exits with 1, and the rest is still shown."""
    monkeypatch.setenv("ASYNCMEM_LIMIT", "much")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "correct the environment: ASYNCMEM_LIMIT: " in result.output
    assert "simulated" in result.output


def test_without_cuda_python_the_driver_itself_is_looked_for() -> None:
    """Where there is none, nothing is to be installed."""
    code = "import sys; sys.modules['cuda'] = None; from asyncmem.cli import machine; print(machine.probe_nvidia())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    findings = ast.literal_eval(done.stdout)
    assert not findings["found"]
    assert "libcuda.so.1" in findings["reason"]
    assert findings["help"] is None


def test_a_driver_that_kills_its_caller_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is asked in a child process: when that dies, its last words are the reason."""
    dead = subprocess.CompletedProcess([], -11, stdout="", stderr="Fatal Python error: Segmentation fault\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: dead)
    assert "Segmentation fault" in str(machine.find_nvidia()["reason"])


def test_a_driver_that_hangs_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not answer costs a bounded time."""

    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", machine.PROBE_SECONDS)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not answer" in str(machine.find_nvidia()["reason"])


@pytest.mark.usefixtures("opencl")
def test_devices_of_opencl_are_listed_with_their_room(invoke: Invoke) -> None:
    """Each is opened; processors are devices, too."""
    found = {one["name"]: one for one in json.loads(invoke("doctor", "--json").stdout)["devices"]}
    assert found["opencl:0"]["available"] is True
    assert 0 < found["opencl:0"]["free_bytes"] <= found["opencl:0"]["total_bytes"]


@pytest.mark.usefixtures("opencl")
def test_a_device_of_opencl_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to do."""

    def refuse(index: int) -> None:
        raise BackendUnavailable(f"opencl:{index}", tried=("no shared memory",), install="Use another")

    monkeypatch.setitem(machine.KINDS, "opencl", machine.KINDS["opencl"]._replace(make=refuse))
    (one, *_) = machine.probe("opencl")
    assert (one.name, one.available, one.free_bytes) == ("opencl:0", False, None)
    assert one.detail.endswith("; not usable: no shared memory. Use another")


def test_without_pyopencl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started then."""
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    assert "asyncmem[opencl]" in machine.find_devices("opencl")[0].detail
