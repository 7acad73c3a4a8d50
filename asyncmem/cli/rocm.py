"""Looks for AMD GPUs. Run as a process of its own: `python -m asyncmem.cli.rocm` prints one line of JSON."""

import json
import sys
from importlib.util import find_spec
from typing import TypedDict

from asyncmem.cli.probing import ask
from asyncmem.devices import Rocm
from asyncmem.errors import AsyncmemError, BackendUnavailable

UNTRIED = "asyncmem has never been run on AMD hardware: please run its tests there (docs/how-to/use-rocm.md) and report"
"""What somebody who has such a GPU should know."""


class Found(TypedDict):
    """One GPU; `reason` says why it cannot be used."""

    name: str
    total_bytes: int | None
    free_bytes: int | None
    segments: list[str]
    reason: str | None


class Findings(TypedDict):
    """What the probe found; `reason` says why there is nothing."""

    devices: list[Found]
    reason: str | None


def look_for_devices() -> Findings:
    """Ask in a child process, and answer in words whatever becomes of it."""
    if find_spec("hip") is None:
        return {"devices": [], "reason": "hip-python is not installed: pip install 'asyncmem[rocm]'"}
    answer, reason = ask("asyncmem.cli.rocm")
    if answer is None:
        return {"devices": [], "reason": reason}
    findings: Findings = answer
    return findings


def probe() -> Findings:
    """List the GPUs that the HIP runtime shows, and open each of them (blocks)."""
    try:
        found = [_look_at(index) for index in range(Rocm.interface.count_devices())]
    except AsyncmemError as error:
        return {"devices": [], "reason": _words(error)}
    return {"devices": found, "reason": None if found else "the runtime shows no GPU"}


def _look_at(index: int) -> Found:
    found: Found = {
        "name": f"rocm:{index}", "total_bytes": None, "free_bytes": None, "segments": [], "reason": None,
    }  # fmt: skip
    try:
        device = Rocm(index)
    except AsyncmemError as error:
        found["reason"] = _words(error)
    else:
        memory = device.memory()
        found["total_bytes"], found["free_bytes"] = memory.total, memory.free
        found["segments"] = list(device.segment_kinds)
        device.close()
    return found


def _words(error: AsyncmemError) -> str:
    return f"{'; '.join(error.tried)}. {error.install}" if isinstance(error, BackendUnavailable) else str(error)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
