"""`python -m benchmarks`: asyncmem and other allocators at the same work on one GPU."""

from typing import Unpack

import click

from asyncmem import AsyncmemError
from asyncmem.cli.bench import RunOptions, run_options
from benchmarks import alone, comparison
from benchmarks.report import measure

_MORE = [name for name in comparison.SUITE.rows if name not in alone.SUITE.rows]


@click.command(epilog=f"Rows: {', '.join(alone.SUITE.rows)}; with --peers also {', '.join(_MORE)}.")
@click.argument("rows", nargs=-1, metavar="[ROW]...", type=click.Choice(list(comparison.SUITE.rows)))
@click.option("--device", metavar="DEVICE", default="cuda:0", show_default=True, help="The device to measure on.")
@click.option("--peers", is_flag=True, help="Also torch, CuPy, RMM and cuda.core; absent ones are named.")
@run_options
def main(rows: tuple[str, ...], device: str, peers: bool, check: bool, **options: Unpack[RunOptions]) -> None:
    """Compare asyncmem with the driver's own allocator, and with those of torch, CuPy, RMM and cuda.core.

    Each family of allocators runs in a process of its own, one after another; under five minutes for all rows. A
    library that is not installed is skipped by name. docs/benchmarks.md says what each ROW measures.
    """
    try:
        met = measure(rows, device, peers=peers, **options)
    except AsyncmemError as error:
        raise click.ClickException(str(error)) from error
    if check and not met:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
