"""`asyncmem doctor`: what asyncmem finds on this machine, what it would use, and what to install."""

import json
from collections.abc import Iterator
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asyncmem.cli.findings import DeviceLine, Diagnosis, diagnose


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON on standard output.")
def doctor(as_json: bool) -> None:
    """Say which devices are here or why not, the versions in play, and the options in force.

    Looks for NVIDIA drivers, ROCm, Metal and OpenCL, and opens each device, in child processes, so that a broken driver
    cannot take this command with it. Exits with 1 when no pool could be opened here: the compiled core does not load,
    or the environment holds a wrong option.
    """
    diagnosis = diagnose()
    if as_json:
        click.echo(json.dumps(asdict(diagnosis) | {"healthy": diagnosis.healthy}, indent=2))
    else:
        _print(diagnosis, Console(highlight=False))
    if not diagnosis.healthy:
        raise click.exceptions.Exit(1)


def _print(diagnosis: Diagnosis, console: Console) -> None:
    for title, table in (
        ("Devices", _devices(diagnosis)),
        ("This process", _machine(diagnosis)),
        ("Options in force", _options(diagnosis)),
    ):
        console.print(f"[bold]{title}[/]")
        console.print(table)
        console.print()
    console.print("[bold]What to do[/]")
    for line in diagnosis.advice:
        console.print(f"  {escape(line)}")


def _devices(diagnosis: Diagnosis) -> Table:
    table = _grid(3)
    for device in diagnosis.devices:
        mark = "[green]ready[/]" if device.available else "[yellow]no[/]"
        table.add_row(device.name, mark, escape(device.detail))
        for line in _about(device):
            table.add_row("", "", escape(line))
    return table


def _about(device: DeviceLine) -> Iterator[str]:
    """Say the rest of what was found out about a GPU that can be used."""
    if not device.segments:
        return
    yield f"segments: {', '.join(device.segments)}"
    yield f'"auto" takes {device.segments[0]}: {device.segments_reason}'
    yield f"notices of being over budget: {'yes' if device.over_budget_notices else 'no, this driver gives none'}"
    yield f"peers: {', '.join(device.peers or ()) or 'none'}"


def _machine(diagnosis: Diagnosis) -> Table:
    machine, nvidia, table = diagnosis.machine, diagnosis.nvidia, _grid(2)
    table.add_row("python", f"{machine.implementation} {machine.python}, {escape(machine.executable)}")
    table.add_row("platform", f"{machine.platform}, {machine.processors} processors")
    table.add_row("core", escape(machine.core or f"not loaded: {machine.core_error}"))
    table.add_row("event loop", f"asyncmem.run uses {machine.loop}")
    if nvidia["cuda"]:
        table.add_row("NVIDIA driver", f"{nvidia['driver'] or 'version unknown'}, for CUDA {nvidia['cuda']}")
    for name, version in machine.packages.items():
        table.add_row(name, version or "not installed")
    return table


def _options(diagnosis: Diagnosis) -> Table:
    table = _grid(3)
    for option in diagnosis.options:
        table.add_row(option.name, escape(option.value), option.origin)
    return table


def _grid(columns: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    for _ in range(columns):
        # A path that is cut short is of no use to anybody.
        table.add_column(overflow="fold")
    return table
