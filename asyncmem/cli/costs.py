"""`asyncmem costs`: what the driver's calls for memory take on this machine, for `asyncmem replay --costs`."""

from contextlib import closing

import click

from asyncmem.cli.tables import output, progress, show_table, table_of
from asyncmem.devices import device as make_device
from asyncmem.figures import format_duration, format_size
from asyncmem.replay import measure_costs
from asyncmem.text import to_json


@click.command()
@click.option("--device", "name", default="auto", show_default=True, metavar="NAME", help="Measure this device.")
@click.option("--json", "as_json", is_flag=True, help="Print what `replay --costs` reads, and nothing else.")
def costs(name: str, *, as_json: bool) -> None:
    """Measure what the driver's calls for memory take on this machine.

    A replay assumes the calls of an H200, made from C. In a virtual machine, or on another card, they may take several
    times as long, and a pool that moves memory does so less often there. This measures how long they take:

    \b
      asyncmem costs --device cuda:0 --json > costs.json
      asyncmem replay --costs costs.json program.npz

    The names are the CUDA driver's, whatever the device; calls that have no counterpart there are left out. It takes
    about a second, and up to half of the device's free memory meanwhile.
    """  # noqa: D301 -- to click a backspace means that lines are not to be joined
    with closing(make_device(name)) as device, progress(f"measuring the driver calls of {device.name}"):
        found = measure_costs(device)
        label = device.name
    if as_json:
        click.echo(to_json({call: [[nbytes, round(ns)] for nbytes, ns in curve] for call, curve in found.items()}))
        return
    sizes = sorted({nbytes for curve in found.values() for nbytes, _ in curve})
    curves = {call: {nbytes: format_duration(ns / 1e9) for nbytes, ns in curve} for call, curve in found.items()}
    rows = [(call, *(curve.get(nbytes, "") for nbytes in sizes)) for call, curve in curves.items()]
    show_table(table_of((label, *map(format_size, sizes)), rows, left=(label,)), output())
