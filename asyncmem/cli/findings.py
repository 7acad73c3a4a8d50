"""What `asyncmem doctor` finds out, as plain records; nothing here prints."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from asyncmem.cli import metal, opencl, rocm
from asyncmem.cli.listing import Findings as Listing
from asyncmem.cli.machine import Machine, look_around
from asyncmem.cli.nvidia import Card, Findings, look_for_driver
from asyncmem.devices import Host
from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.options import OPTIONS, PoolOptions

_COUNTS = ("max_waiting", "fence_every")
"""Options that are whole numbers and no sizes, besides numbers of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """One device: whether a pool can be opened on it here, and what is known about it."""

    name: str
    available: bool
    detail: str
    total_bytes: int | None = None
    free_bytes: int | None = None
    segments: tuple[str, ...] = ()
    """The kinds that a GPU has, the one that "auto" takes first."""
    segments_reason: str | None = None
    """Why "auto" takes that one."""
    over_budget_notices: bool | None = None
    """Whether the driver tells when a process has more of a GPU's memory than it should."""
    peers: tuple[str, ...] | None = None
    """The GPUs that can be given access to this one's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionLine:
    """One option in force."""

    name: str
    value: str
    origin: str
    """"default", or the environment variable that set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that the command reports."""

    machine: Machine
    devices: tuple[DeviceLine, ...]
    nvidia: Findings
    options: tuple[OptionLine, ...]
    options_error: str | None
    """What is wrong with the environment's options, if anything is; every pool would refuse them."""
    advice: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether a pool opens here with the options in force."""
        return self.options_error is None and self.machine.core is not None


def diagnose(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Look at the machine, its devices and the environment (blocks; asks the driver in a child process)."""
    machine, nvidia = look_around(), look_for_driver()
    options, options_error = _options(environ)
    return Diagnosis(
        machine=machine,
        devices=tuple(_devices(nvidia)),
        nvidia=nvidia,
        options=options,
        options_error=options_error,
        advice=tuple(_advice(machine, nvidia, options_error)),
    )


def _devices(nvidia: Findings) -> Iterator[DeviceLine]:
    memory = Host().memory()
    amounts = f"{format_size(memory.free)} of {format_size(memory.total)} free"
    yield DeviceLine(name="host", available=True, detail=amounts, total_bytes=memory.total, free_bytes=memory.free)
    yield DeviceLine(name="simulated", available=True, detail="always there; has no real memory unless asked")
    if not nvidia["found"]:
        why = nvidia["reason"] or "the driver lists no card"
        yield DeviceLine(name="cuda", available=False, detail=f"no usable NVIDIA driver: {why}")
    for index, card in enumerate(nvidia["cards"]):
        yield _gpu(f"cuda:{index}", card)
    yield from _listed("rocm", rocm.look_for_devices())
    yield from _listed("metal", metal.look_for_devices())
    yield from _listed("opencl", opencl.look_for_devices())


def _listed(kind: str, listing: Listing) -> Iterator[DeviceLine]:
    if not listing["devices"]:
        yield DeviceLine(name=kind, available=False, detail=listing["reason"] or "")
    for one in listing["devices"]:
        what, total, free = one["what"], one["total_bytes"], one["free_bytes"]
        if free is None:
            state = f"{format_size(total)}; not usable: {one['reason']}"
        else:
            state = f"{format_size(free)} of {format_size(total)} free"
        yield DeviceLine(
            name=one["name"], available=free is not None, detail=f"{what}, {state}", total_bytes=total, free_bytes=free
        )


def _gpu(name: str, card: Card) -> DeviceLine:
    total, use = card["total_bytes"], card["use"]
    what = f"{card['name']}, compute capability {card['compute_capability']}"
    if not use["usable"] or use["free_bytes"] is None:
        detail = f"{what}, {format_size(total)}; not usable: {use['reason']}"
        return DeviceLine(name=name, available=False, detail=detail, total_bytes=total)
    return DeviceLine(
        name=name,
        available=True,
        detail=f"{what}, {format_size(use['free_bytes'])} of {format_size(total)} free",
        total_bytes=total,
        free_bytes=use["free_bytes"],
        segments=tuple(use["segments"]),
        segments_reason=_reason(card),
        over_budget_notices=use["over_budget_notices"],
        peers=tuple(f"cuda:{peer}" for peer in card["peers"]),
    )


def _reason(card: Card) -> str:
    if card["virtual_memory"]:
        return "the driver maps memory for this card (VMM)"
    if card["memory_pools"]:
        return "the driver maps no memory for this card (no VMM), but has memory pools"
    return "the driver has neither VMM nor memory pools for this card"


def _options(environ: Mapping[str, str]) -> tuple[tuple[OptionLine, ...], str | None]:
    try:
        options, error = PoolOptions.from_environment(environ), None
    except InvalidRequest as refused:
        options, error = PoolOptions(), str(refused)
    lines = (
        OptionLine(name=name, value=_shown(name, getattr(options, name)), origin=options.origin(name))
        for name in OPTIONS
    )
    return tuple(lines), error


def _shown(name: str, value: object) -> str:
    """Print an option's value with its unit."""
    match value:
        case None | ():
            return "none"
        case bool():
            return "on" if value else "off"
        case int():
            # Counts are the only whole numbers that are no sizes.
            return str(value) if name.endswith("_blocks") or name in _COUNTS else format_size(value)
        case float():
            return _shown_float(name, value)
    return str(value)


def _shown_float(name: str, value: float) -> str:
    if name in ("timeout", "stall_after"):
        return format_duration(value)
    return f"{value:g} times the limit" if name == "bypass" else format_share(value)


def _advice(machine: Machine, nvidia: Findings, options_error: str | None) -> Iterator[str]:
    if options_error is not None:
        yield f"correct the environment: {options_error}"
    if machine.core is None:
        yield f"reinstall asyncmem: its compiled core does not load ({machine.core_error})"
    if machine.packages["uvloop"] is None:
        yield "pip install uvloop: asyncmem.run then uses it, and hand-overs take about half the time"
    for index, card in enumerate(nvidia["cards"]):
        if card["use"]["usable"]:
            yield f'cuda:{index} is ready: asyncmem.AsyncMemoryPool("cuda:{index}")'
        else:
            yield f"cuda:{index} is not: {card['use']['help'] or card['use']['reason']}"
    if nvidia["found"]:
        return
    if machine.packages["cuda-bindings"] is None:
        yield "pip install cuda-python: without it no NVIDIA driver can be looked for"
    else:
        yield 'no GPU is needed to develop and test: use the devices "host" and "simulated"'
