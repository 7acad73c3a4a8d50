"""The part of `asyncmem bench` that measures one device, and other libraries' allocators beside asyncmem on it."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from asyncmem.cli.benchmarks.device.asked import judge
from asyncmem.cli.benchmarks.device.child import Task
from asyncmem.cli.benchmarks.device.run import FULL, QUICK, chosen, run
from asyncmem.cli.benchmarks.device.show import document, show
from asyncmem.cli.benchmarks.peers.family import OURS
from asyncmem.cli.machine import PACKAGES, installed_version, look_around
from asyncmem.cli.nvidia import look_for_driver
from asyncmem.devices import device as find_device

LIBRARIES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "rmm-cu13", "rmm-cu12", "cuda-core")
"""The distributions of the peers, whose versions belong to the figures."""


def compare(
    names: Sequence[str],
    device: str,
    *,
    peers: bool,
    as_json: bool,
    quick: bool,
    uvloop: bool,
    traces: Sequence[str] = (),
) -> bool:
    """Measure rows on a device, print what was found, and answer whether everything that was asked for is met.

    Raises:
        BackendUnavailable: The device cannot be used here.
        InvalidRequest: There is no such device.
    """
    if peers and not device.startswith("cuda"):
        raise click.UsageError(f"the peers have no {device!r}: give --device cuda:0, or leave --peers out")
    find_device(device).close()
    effort = QUICK if quick else FULL
    task = Task(
        family=OURS,
        device=device,
        rows=tuple(names),
        repeats=effort.repeats,
        repeat_ns=effort.repeat_ns,
        share=effort.share,
        uvloop=uvloop,
        traces=tuple(traces),
    )
    with _progress(quiet=as_json) as report:
        found = run(task, chosen(device, names, peers=peers), report)
    entries = judge(found.measured)
    if as_json:
        click.echo(json.dumps(document(entries, found) | _surroundings(device, quick=quick, uvloop=uvloop), indent=2))
    else:
        console = Console()
        show(entries, found, names, console)
        console.print(", ".join(f"{name} {there}" for name, there in _versions().items()))
    return not found.failed and all(one.ok is not False for one in entries)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"))
    # Drawn between the processes only: a thread that redraws would take time from them.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", visible=not quiet)
        yield lambda name: progress.update(task, description=f"measuring {name}", refresh=not quiet)


def _surroundings(device: str, *, quick: bool, uvloop: bool) -> dict[str, object]:
    machine = asdict(look_around())
    machine["packages"] |= {name: installed_version(name) for name in LIBRARIES}
    return {
        "machine": machine,
        "nvidia": look_for_driver() if device.startswith("cuda") else None,
        "method": {"device": device, "quick": quick, "loop": "uvloop" if uvloop else "asyncio"},
    }


def _versions() -> dict[str, str]:
    there = {name: installed_version(name) for name in ("asyncmem", *LIBRARIES, *PACKAGES)}
    return {name: version for name, version in there.items() if version is not None}
