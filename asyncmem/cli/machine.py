"""The environment of this process, and the devices whose drivers are asked in a process of its own.

A broken driver can end or hang its caller. `python -m asyncmem.cli.machine KIND` prints what it finds as JSON.
"""

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NamedTuple, TypedDict

import asyncmem.core._core
from asyncmem.devices import Cuda, Device, Metal, OpenCL, Rocm
from asyncmem.devices.base import names_of
from asyncmem.devices.metal.driver import find_devices as find_metal
from asyncmem.devices.opencl.driver import find_devices as find_opencl
from asyncmem.errors import AsyncmemError, BackendUnavailable, DeviceError
from asyncmem.figures import format_size
from asyncmem.text import to_json

PACKAGES: Final = (
    "asyncmem", "numpy", "anyio", "uvloop", "cuda-python", "cuda-bindings", "hip-python", "pyobjc-framework-Metal",
    "pyopencl", "trio", "click", "rich",
)  # fmt: skip
"""The distributions whose versions belong to every report."""


def describe_machine() -> dict[str, Any]:
    """Return the environment of this process, as `doctor` and `bench` print it.

    `packages` has the version of each distribution of `PACKAGES`, None if it is not installed; `loop` is what
    `asyncmem.run` uses here; `core` is the file of the compiled core.
    """
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "processors": os.cpu_count() or 1,
        "packages": {name: installed_version(name) for name in PACKAGES},
        "loop": "uvloop" if installed_version("uvloop") else "asyncio",
        "core": str(asyncmem.core._core.__file__),
    }


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


# -- devices of ROCm, Metal and OpenCL ---------------------------------------------------------------------------------

PROBE_SECONDS: Final = 60.0
"""How long a driver may take to answer. The first call after boot can take several seconds, each context one."""

_NO_AMD: Final = "asyncmem has never been run on AMD hardware: please try `tox -e rocm`, and report"
_NO_METAL: Final = "this device has never run on hardware: please try `tox -e metal`, and report"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """One device: whether a pool can be opened on it here, and what is known about it."""

    name: str
    available: bool
    detail: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    segments: Sequence[str] = ()
    """The kinds that a GPU has, the one that "auto" takes first."""
    segments_reason: str | None = None
    """Why "auto" takes that one."""
    over_budget_notices: bool | None = None
    """Whether the driver gives notice when a process has more of a GPU's memory than its budget."""
    peers: Sequence[str] | None = None
    """The GPUs that can be given access to this one's memory."""


def device_line(name: str, what: str, total: int, free: int | None, reason: str | None) -> DeviceLine:
    """Describe a device: one that cannot be used has no free bytes, and a reason."""
    room = format_size(total)
    state = f"{room}; not usable: {reason}" if free is None else f"{format_size(free)} of {room} free"
    return DeviceLine(
        name=name, available=free is not None, detail=f"{what}, {state}", total_bytes=total, free_bytes=free
    )


class Kind(NamedTuple):
    """A kind of devices whose driver comes with another package."""

    package: str
    """The module that has to be importable,"""
    lacking: str
    """and what to say if it is not."""
    find: Callable[[], Iterable[tuple[str, int]]]
    """Returns what each device is, and its bytes (blocks)."""
    make: Callable[[int], Device]


def _find_rocm() -> Iterator[tuple[str, int]]:
    for index in range(Rocm.interface.count_devices()):
        yield f"AMD GPU; {_NO_AMD}", Rocm.total_memory(index)


def _find_metal() -> Iterator[tuple[str, int]]:
    for one in find_metal("metal"):
        yield f"{one.name()}; {_NO_METAL}", int(one.recommendedMaxWorkingSetSize())


def _find_opencl() -> Iterator[tuple[str, int]]:
    for one in find_opencl("opencl"):
        yield f"{one.name.strip()}, {one.platform.name.strip()}", int(one.global_mem_size)


KINDS: Final = {
    "rocm": Kind("hip", "hip-python is not installed: pip install 'asyncmem[rocm]'", _find_rocm, Rocm),
    "metal": Kind("Metal", f"needs macOS and pip install 'asyncmem[metal]'; {_NO_METAL}", _find_metal, Metal),
    "opencl": Kind("pyopencl", "pyopencl is not installed: pip install 'asyncmem[opencl]'", _find_opencl, OpenCL),
}


def find_devices(kind: str) -> list[DeviceLine]:
    """Run `probe` in a child process, and return a line that has the reason where there is no device."""
    if find_spec(KINDS[kind].package) is None:
        return [DeviceLine(name=kind, available=False, detail=KINDS[kind].lacking)]
    answer, reason = ask(kind)
    return [DeviceLine(**one) for one in answer or [{"name": kind, "available": False, "detail": reason}]]


def ask(kind: str) -> tuple[Any, str | None]:
    """Return what a driver's process says, or None and the reason."""
    command = [sys.executable, "-m", "asyncmem.cli.machine", kind]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)  # noqa: S603 - our own
    except subprocess.TimeoutExpired:
        return None, f"the driver did not answer within {PROBE_SECONDS:g} s"
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return None, f"the process that asked the driver ended early: {last[0]}"
    return json.loads(child.stdout), None


def probe(kind: str) -> list[DeviceLine]:
    """List the devices of a kind, and open each of them (blocks)."""
    try:
        found = [_look_at(kind, index, *one) for index, one in enumerate(KINDS[kind].find())]
        reason = "the drivers show no device"
    except AsyncmemError as error:
        found, reason = [], _sentence(error)
    return found or [DeviceLine(name=kind, available=False, detail=reason)]


def _look_at(kind: str, index: int, what: str, total: int) -> DeviceLine:
    name = f"{kind}:{index}"
    try:
        with closing(KINDS[kind].make(index)) as device:
            return device_line(name, what, total, device.memory().free, None)
    except AsyncmemError as error:
        return device_line(name, what, total, None, _sentence(error))


def _words(error: AsyncmemError) -> tuple[str, str]:
    """Divide an error's sentence into what happened and what to do."""
    if isinstance(error, BackendUnavailable):
        return "; ".join(error.tried), error.install
    advice = error.advice if isinstance(error, DeviceError) else ""
    return str(error).removesuffix(advice).removesuffix(". "), advice


def _sentence(error: AsyncmemError) -> str:
    return ". ".join(filter(None, _words(error)))


# -- NVIDIA's cards ----------------------------------------------------------------------------------------------------

_DRIVER = "cuda.bindings.driver"
_CAPABILITY = "COMPUTE_CAPABILITY"


class Use(TypedDict):
    """What asyncmem can do with a card; `reason` and `help` say why nothing, and what to do."""

    usable: bool
    reason: str | None
    help: str | None
    free_bytes: int | None
    segments: list[str]
    """The kinds that there are; "auto" takes the first."""
    over_budget_notices: bool
    """Whether the driver gives notice when this process has more memory than its budget."""


class Card(TypedDict):
    """One GPU as its driver names it."""

    name: str
    total_bytes: int
    compute_capability: str
    virtual_memory: bool
    memory_pools: bool
    peers: list[int]
    """The cards that can reach this one's memory."""
    use: Use


class NvidiaFindings(TypedDict):
    """What the probe found; `reason` says why there is nothing, `help` what to install for cards that are there."""

    found: bool
    driver: str | None
    cuda: str | None
    cards: list[Card]
    reason: str | None
    help: str | None


def find_nvidia() -> NvidiaFindings:
    """Run `probe_nvidia` in a child process, and return a reason whatever becomes of it."""
    answer, reason = ask("cuda")
    findings: NvidiaFindings = answer or _nothing(reason or "no answer")
    return findings


def _nothing(reason: str, advice: str | None = None) -> NvidiaFindings:
    """Return that there is no usable driver, and why."""
    return {"found": False, "driver": None, "cuda": None, "cards": [], "reason": reason, "help": advice}


def probe_nvidia() -> NvidiaFindings:
    """Load the driver through cuda-python, initialise it, list its cards, and open each of them (blocks)."""
    try:
        driver = importlib.import_module(_DRIVER)
    except ImportError as error:
        return _without_package(f"cuda-python cannot be imported: {error}")
    try:
        checked(driver.cuInit(0))
        number = checked(driver.cuDriverGetVersion())
        cards = [_card(driver, index) for index in range(checked(driver.cuDeviceGetCount()))]
    except RuntimeError as error:
        # cuda-python raises one of its own if no libcuda is installed; `checked` raises for a driver's refusal.
        return _nothing(str(error))
    cuda = f"{number // 1000}.{number % 1000 // 10}"
    version = _driver_version()
    return {"found": bool(cards), "driver": version, "cuda": cuda, "cards": cards, "reason": None, "help": None}


def _without_package(reason: str) -> NvidiaFindings:
    """Ask the driver itself whether there are cards that cuda-python would be needed for."""
    try:
        cards = names_of("cuda", Cuda.interface.count_devices())
    except (BackendUnavailable, DeviceError) as error:
        return _nothing(_words(error)[0])
    return _nothing(reason, f"pip install 'asyncmem[cuda]': the driver shows {cards}")


def _card(driver: ModuleType, index: int) -> Card:
    device = checked(driver.cuDeviceGet(index))
    name: bytes = checked(driver.cuDeviceGetName(256, device))
    others = [other for other in range(checked(driver.cuDeviceGetCount())) if other != index]

    def has(attribute: str) -> int:
        known = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(checked(driver.cuDeviceGetAttribute(known, device)))

    return {
        # The driver fills the rest of the field with zeros, and cuda-python what lies beyond with blanks.
        "name": name.partition(b"\0")[0].decode(errors="replace"),
        "total_bytes": int(checked(driver.cuDeviceTotalMem(device))),
        "compute_capability": f"{has(f'{_CAPABILITY}_MAJOR')}.{has(f'{_CAPABILITY}_MINOR')}",
        "virtual_memory": bool(has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
        "memory_pools": bool(has("MEMORY_POOLS_SUPPORTED")),
        "peers": [
            other
            for other in others
            if checked(driver.cuDeviceCanAccessPeer(checked(driver.cuDeviceGet(other)), device))
        ],
        "use": _try_to_use(index),
    }


def _try_to_use(index: int) -> Use:
    use: Use = {
        "usable": False, "reason": None, "help": None, "free_bytes": None, "segments": [], "over_budget_notices": False,
    }  # fmt: skip
    try:
        device = Cuda(index)
    except AsyncmemError as error:
        use["reason"], use["help"] = _words(error)
        return use
    use |= {"usable": True, "free_bytes": device.memory().free, "over_budget_notices": device.gives_notices}
    use["segments"] = [*(["paged"] if device.page else []), *device.segment_kinds]
    device.close()
    return use


def _driver_version() -> str | None:
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
    except ImportError:  # cuda-python 12 has no NVML: the display driver's version stays unknown
        return None
    try:
        nvml.init_v2()
        return str(nvml.system_get_driver_version())
    except (RuntimeError, nvml.NvmlError):
        return None


def checked(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - cuda-python says no types
    """Return the value of an answer of cuda-python's, (code, values...); raise a code that is not success."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"the driver refused: {code.name} ({int(code)})")
    return values[0] if values else None


if __name__ == "__main__":
    name = sys.argv[1]
    sys.stdout.write(to_json(probe_nvidia() if name == "cuda" else [asdict(one) for one in probe(name)]))
