"""Looks for devices of OpenCL. Run as a process of its own: `python -m asyncmem.cli.opencl` prints one line of JSON."""

import json
import sys
from importlib.util import find_spec
from typing import TypedDict

from asyncmem.cli.probing import ask
from asyncmem.devices import OpenCL
from asyncmem.devices.opencl.driver import find_devices
from asyncmem.errors import AsyncmemError, BackendUnavailable


class Found(TypedDict):
    """One device as its driver names it; `reason` says why it cannot be used."""

    name: str
    what: str
    total_bytes: int
    free_bytes: int | None
    reason: str | None


class Findings(TypedDict):
    """What the probe found; `reason` says why there is nothing."""

    devices: list[Found]
    reason: str | None


def look_for_devices() -> Findings:
    """Ask in a child process, and answer in words whatever becomes of it."""
    if find_spec("pyopencl") is None:
        return {"devices": [], "reason": "pyopencl is not installed: pip install 'asyncmem[opencl]'"}
    answer, reason = ask("asyncmem.cli.opencl")
    if answer is None:
        return {"devices": [], "reason": reason}
    findings: Findings = answer
    return findings


def probe() -> Findings:
    """List the devices of all drivers, and open each of them (blocks)."""
    try:
        found = [
            _look_at(index, f"{one.name.strip()}, {one.platform.name.strip()}", int(one.global_mem_size))
            for index, one in enumerate(find_devices("opencl"))
        ]
    except AsyncmemError as error:
        return {"devices": [], "reason": _words(error)}
    return {"devices": found, "reason": None if found else "the drivers show no device"}


def _look_at(index: int, what: str, total: int) -> Found:
    found: Found = {
        "name": f"opencl:{index}", "what": what, "total_bytes": total, "free_bytes": None, "reason": None,
    }  # fmt: skip
    try:
        device = OpenCL(index)
    except AsyncmemError as error:
        found["reason"] = _words(error)
    else:
        found["free_bytes"] = device.memory().free
        device.close()
    return found


def _words(error: AsyncmemError) -> str:
    return f"{'; '.join(error.tried)}. {error.install}" if isinstance(error, BackendUnavailable) else str(error)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
