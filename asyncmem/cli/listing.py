"""Lists devices whose drivers other packages bring, for the probes that run as processes of their own."""

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TypedDict

from asyncmem.cli.probing import ask
from asyncmem.devices import Device
from asyncmem.errors import AsyncmemError, BackendUnavailable


class Found(TypedDict):
    """One device as its driver names it; `reason` says why it cannot be used."""

    name: str
    what: str
    total_bytes: int
    free_bytes: int | None
    reason: str | None


class Findings(TypedDict):
    """What a probe found; `reason` says why there is nothing."""

    devices: list[Found]
    reason: str | None


def look(module: str, *, package: str, lacking: str) -> Findings:
    """Ask a probe in a child process, and answer in words whatever becomes of it; `lacking` where a package is not."""
    if find_spec(package) is None:
        return {"devices": [], "reason": lacking}
    answer, reason = ask(module)
    if answer is None:
        return {"devices": [], "reason": reason}
    findings: Findings = answer
    return findings


def list_devices(kind: str, found: Callable[[], Iterable[tuple[str, int]]], make: Callable[[int], Device]) -> Findings:
    """Open each device, of which `found` answers what it is and its bytes (blocks)."""
    try:
        devices = [_look_at(f"{kind}:{at}", at, what, total, make) for at, (what, total) in enumerate(found())]
    except AsyncmemError as error:
        return {"devices": [], "reason": _words(error)}
    return {"devices": devices, "reason": None if devices else "the drivers show no device"}


def _look_at(name: str, index: int, what: str, total: int, make: Callable[[int], Device]) -> Found:
    found: Found = {"name": name, "what": what, "total_bytes": total, "free_bytes": None, "reason": None}
    try:
        device = make(index)
    except AsyncmemError as error:
        found["reason"] = _words(error)
    else:
        found["free_bytes"] = device.memory().free
        device.close()
    return found


def _words(error: AsyncmemError) -> str:
    return f"{'; '.join(error.tried)}. {error.install}" if isinstance(error, BackendUnavailable) else str(error)
