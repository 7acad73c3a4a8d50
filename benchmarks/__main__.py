"""`python -m benchmarks`: asyncmem and other libraries' allocators at the same work on one GPU."""

from typing import Unpack

import click

from asyncmem import AsyncmemError
from asyncmem.cli.benchmarks.device.report import RunOptions, measure, run_options
from benchmarks.comparison import SUITE


@click.command(epilog=f"Rows: {', '.join(SUITE.rows)}.")
@click.argument("rows", nargs=-1, metavar="[ROW]...", type=click.Choice(list(SUITE.rows)))
@click.option("--device", metavar="DEVICE", default="cuda:0", show_default=True, help="The GPU to measure on.")
@run_options
def main(rows: tuple[str, ...], device: str, check: bool, **options: Unpack[RunOptions]) -> None:
    """Compare asyncmem with the allocators of torch, CuPy, RMM, cuda.core and the driver.

    Each family of allocators runs in a process of its own, one after another; under five minutes for all rows. A
    library that is not installed is skipped by name. docs/benchmarks.md says what each ROW measures.
    """
    try:
        met = measure(SUITE, rows, device, **options)
    except AsyncmemError as error:
        raise click.ClickException(str(error)) from error
    if check and not met:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
