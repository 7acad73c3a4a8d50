"""Looks for an NVIDIA driver. Run as a process of its own: `python -m asyncmem.cli.nvidia` prints one line of JSON."""

import importlib
import json
import sys
from types import ModuleType
from typing import Any, TypedDict

from asyncmem.cli.probing import ask
from asyncmem.devices import Cuda
from asyncmem.errors import AsyncmemError, BackendUnavailable, DeviceError

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
    """Whether the driver tells when this process has more memory than it should."""


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


class Findings(TypedDict):
    """What the probe found; `reason` says why there is nothing."""

    found: bool
    driver: str | None
    cuda: str | None
    cards: list[Card]
    reason: str | None


def look_for_driver() -> Findings:
    """Ask in a child process, and answer in words whatever becomes of it."""
    answer, reason = ask("asyncmem.cli.nvidia")
    if answer is None:
        return nothing(reason or "it said nothing")
    findings: Findings = answer
    return findings


def nothing(reason: str) -> Findings:
    """Say that there is no usable driver, and why."""
    return {"found": False, "driver": None, "cuda": None, "cards": [], "reason": reason}


def probe() -> Findings:
    """Load the driver through cuda-python, initialise it, list its cards, and open each of them (blocks)."""
    try:
        driver = importlib.import_module(_DRIVER)
    except ImportError as error:
        return nothing(f"cuda-python cannot be imported: {error}")
    try:
        _checked(driver.cuInit(0))
        number = _checked(driver.cuDriverGetVersion())
        cards = [_card(driver, index) for index in range(_checked(driver.cuDeviceGetCount()))]
    except RuntimeError as error:
        # cuda-python raises one of its own where no libcuda is installed; `_checked` raises for a driver's refusal.
        return nothing(str(error))
    cuda = f"{number // 1000}.{number % 1000 // 10}"
    return {"found": bool(cards), "driver": _driver_version(), "cuda": cuda, "cards": cards, "reason": None}


def _card(driver: ModuleType, index: int) -> Card:
    device = _checked(driver.cuDeviceGet(index))
    name: bytes = _checked(driver.cuDeviceGetName(256, device))
    others = [other for other in range(_checked(driver.cuDeviceGetCount())) if other != index]

    def has(attribute: str) -> int:
        known = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return int(_checked(driver.cuDeviceGetAttribute(known, device)))

    return {
        # The driver fills the rest of the field with zeros, and cuda-python what lies beyond with blanks.
        "name": name.partition(b"\0")[0].decode(errors="replace"),
        "total_bytes": int(_checked(driver.cuDeviceTotalMem(device))),
        "compute_capability": f"{has(f'{_CAPABILITY}_MAJOR')}.{has(f'{_CAPABILITY}_MINOR')}",
        "virtual_memory": bool(has("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
        "memory_pools": bool(has("MEMORY_POOLS_SUPPORTED")),
        "peers": [
            other
            for other in others
            if _checked(driver.cuDeviceCanAccessPeer(_checked(driver.cuDeviceGet(other)), device))
        ],
        "use": _try_to_use(index),
    }


def _try_to_use(index: int) -> Use:
    try:
        device = Cuda(index)
    except AsyncmemError as error:
        reason, help_ = _words(error)
        return {
            "usable": False,
            "reason": reason,
            "help": help_,
            "free_bytes": None,
            "segments": [],
            "over_budget_notices": False,
        }
    free, kinds, notices = device.memory().free, list(device.segment_kinds), device.gives_notices
    kinds += ["paged"] * (device.page > 0)
    device.close()
    return {
        "usable": True,
        "reason": None,
        "help": None,
        "free_bytes": free,
        "segments": kinds,
        "over_budget_notices": notices,
    }


def _words(error: AsyncmemError) -> tuple[str, str]:
    """Take an error's sentence apart into what happened and what to do."""
    if isinstance(error, BackendUnavailable):
        return "; ".join(error.tried), error.install
    advice = error.advice if isinstance(error, DeviceError) else ""
    return str(error).removesuffix(advice).removesuffix(". "), advice


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


def _checked(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - cuda-python says no types
    """Take one answer of cuda-python's, which is (code, values...), and raise a code that is not success."""
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"the driver refused: {code.name} ({int(code)})")
    return values[0] if values else None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
