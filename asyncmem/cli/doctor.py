"""`asyncmem doctor`: the devices of this machine, the options in force, and what to install."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from asyncmem.cli.machine import (
    KINDS,
    Card,
    DeviceLine,
    NvidiaFindings,
    describe_machine,
    device_line,
    find_devices,
    find_nvidia,
)
from asyncmem.cli.parameters import json_option
from asyncmem.cli.tables import Cell, output, progress, show_table, table_of
from asyncmem.devices import Host
from asyncmem.environment import unknown_variables
from asyncmem.errors import AsyncmemWarning, InvalidRequest
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.options import OPTIONS, PoolOptions
from asyncmem.text import printable, to_json


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """List the devices here, or why there are none, the versions in use, and the options in force.

    Looks for NVIDIA drivers, ROCm, Metal and OpenCL, and opens each device, in child processes, so that a broken driver
    cannot end this command. Exits with 1 if no pool can be opened here, because the environment holds a wrong option. A
    variable that means no option is only warned of, as pools ignore it.
    """
    with progress("asking the drivers"):
        diagnosis = diagnose()
    if as_json:
        click.echo(to_json(asdict(diagnosis) | {"healthy": diagnosis.healthy}, indent=2))
    else:
        show_diagnosis(diagnosis, output())
    if not diagnosis.healthy:
        raise click.exceptions.Exit(1)


_WORDS = ("name", "value", "detail")
_COUNTS = ("max_waiting", "fence_every")
"""Options that are counts and no sizes, besides numbers of blocks; other whole numbers are sizes."""


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

    machine: dict[str, Any]
    devices: tuple[DeviceLine, ...]
    nvidia: NvidiaFindings
    options: tuple[OptionLine, ...]
    options_error: str | None
    """What is wrong with the environment's options, if anything is; every pool would refuse them."""
    options_warnings: tuple[str, ...]
    """The variables that pools ignore, because they name no option."""
    advice: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether a pool opens here with the options in force."""
        return self.options_error is None


def diagnose(environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Look at the machine, its devices and the environment (blocks; asks the drivers in child processes)."""
    machine, nvidia = describe_machine(), find_nvidia()
    options, options_error = _options(environ)
    ignored = tuple(f"{error}; it is ignored" for _, error in unknown_variables(environ, OPTIONS))
    return Diagnosis(
        machine=machine,
        devices=tuple(_devices(nvidia)),
        nvidia=nvidia,
        options=options,
        options_error=options_error,
        options_warnings=ignored,
        advice=tuple(_advice(machine["packages"], nvidia, [*filter(None, [options_error]), *ignored])),
    )


def _devices(nvidia: NvidiaFindings) -> Iterator[DeviceLine]:
    memory = Host().memory()
    amounts = f"{format_size(memory.free)} of {format_size(memory.total)} free"
    yield DeviceLine(name="host", available=True, detail=amounts, total_bytes=memory.total, free_bytes=memory.free)
    yield DeviceLine(name="simulated", available=True, detail="always there; has no real memory unless asked")
    if not nvidia["found"]:
        why = nvidia["reason"] or "the driver lists no card"
        yield DeviceLine(name="cuda", available=False, detail=f"no usable NVIDIA driver: {why}")
    for index, card in enumerate(nvidia["cards"]):
        yield _gpu(f"cuda:{index}", card)
    for kind in KINDS:
        yield from find_devices(kind)


def _gpu(name: str, card: Card) -> DeviceLine:
    use, what = card["use"], f"{card['name']}, compute capability {card['compute_capability']}"
    line = device_line(name, what, card["total_bytes"], use["free_bytes"], use["reason"])
    if not line.available:
        return line
    return replace(
        line,
        segments=use["segments"],
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
    error = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AsyncmemWarning)  # what to do says it too
            options = PoolOptions.from_environment(environ)
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
        case int() if not name.endswith("_blocks") and name not in _COUNTS:
            return format_size(value)
        case float() if name in ("timeout", "stall_after"):
            return format_duration(value)
        case float():
            return f"{value:g} times the limit" if name == "bypass" else format_share(value)
    return str(value)


def _advice(packages: dict[str, str | None], nvidia: NvidiaFindings, wrong: Sequence[str]) -> Iterator[str]:
    for one in wrong:
        yield f"correct the environment: {one}"
    if packages["uvloop"] is None:
        yield "pip install uvloop: asyncmem.run then uses it, and hand-overs take about half the time"
    for index, card in enumerate(nvidia["cards"]):
        if card["use"]["usable"]:
            yield f'cuda:{index} is ready: asyncmem.AsyncMemoryPool("cuda:{index}")'
        else:
            yield f"cuda:{index} is not: {card['use']['help'] or card['use']['reason']}"
    if nvidia["found"]:
        return
    yield nvidia["help"] or 'no GPU is needed to develop and test: use the devices "host" and "simulated"'


# -- printed -----------------------------------------------------------------------------------------------------------


def show_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print it in four parts; what to do comes last."""
    parts = {"Devices": _device_rows, "This process": _machine_rows, "Options in force": _option_rows}
    for title, rows in parts.items():
        console.print(Text(title, style="bold"))
        table = table_of(_WORDS, list(rows(diagnosis)), left=_WORDS, header=False)
        table.padding, table.pad_edge = (0, 2, 0, 2), True
        show_table(table, console)
        console.print()
    console.print(Text("What to do", style="bold"))
    for line in diagnosis.advice:
        console.print(Text(f"  {printable(line)}"))


def _device_rows(diagnosis: Diagnosis) -> Iterator[Sequence[Cell]]:
    for device in diagnosis.devices:
        mark = Text("ready", style="green") if device.available else Text("no", style="yellow")
        yield device.name, mark, device.detail
        for line in _about(device):
            yield "", "", line


def _about(device: DeviceLine) -> Iterator[str]:
    """Return the other findings about a GPU that can be used."""
    if not device.segments:
        return
    yield f"segments: {', '.join(device.segments)}"
    yield f'"auto" takes {device.segments[0]}: {device.segments_reason}'
    yield f"notices of being over budget: {'yes' if device.over_budget_notices else 'no, this driver gives none'}"
    yield f"peers: {', '.join(device.peers or ()) or 'none'}"


def _machine_rows(diagnosis: Diagnosis) -> Iterator[Sequence[Cell]]:
    nvidia = diagnosis.nvidia
    yield "python", "{implementation} {python}, {executable}".format_map(diagnosis.machine)
    yield "platform", "{platform}, {processors} processors".format_map(diagnosis.machine)
    yield "core", diagnosis.machine["core"]
    yield "event loop", f"asyncmem.run uses {diagnosis.machine['loop']}"
    if nvidia["cuda"]:
        yield "NVIDIA driver", f"{nvidia['driver'] or 'version unknown'}, for CUDA {nvidia['cuda']}"
    for name, version in diagnosis.machine["packages"].items():
        yield name, version or "not installed"


def _option_rows(diagnosis: Diagnosis) -> Iterator[Sequence[Cell]]:
    for option in diagnosis.options:
        yield option.name, option.value, option.origin
