"""`asyncmem segments`: what was had from the device, and where its holes were."""

import click
from rich.console import Console

from asyncmem.cli.reports.telling import at_option, file_argument, json_option, load, tell
from asyncmem.cli.tables import add, columns, print_whole
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.insight import reports
from asyncmem.insight.reports import Segment, Segments

_CELLS = 48


@click.command()
@file_argument
@at_option
@json_option
def segments(file: str, time: float | None, *, as_json: bool) -> None:
    """Show the segments of the pools when the most was live, and what lay in them.

    In each map a full block is held, a light one in part, and a point is a hole. Memory by pages has no segments.
    """
    records = load(file)
    tell(records, reports.segments(records, time), _show, as_json=as_json)


def _show(found: Segments, console: Console) -> None:
    if not found.segments:
        console.print(f"No segments are in the records after {format_duration(found.time)}.")
        return
    table = columns("pool", "address", "size", "since", "held", "largest hole", "map", left=["pool", "map"])
    table.columns[-1].no_wrap = True  # a map is of one piece
    for one in found.segments:
        add(
            table,
            one.pool,
            f"{one.address:#x}",
            format_size(one.nbytes),
            format_duration(one.since),
            format_share(one.live / one.nbytes),
            format_size(one.largest_hole),
            _map(one),
        )
    print_whole(table, console)


def _map(segment: Segment) -> str:
    held = [0.0] * _CELLS
    for piece in segment.pieces:
        first, last = (at * _CELLS / segment.nbytes for at in (piece.offset, piece.offset + piece.nbytes))
        for cell in range(int(first), min(int(last) + 1, _CELLS)):
            held[cell] += max(min(last, cell + 1) - max(first, cell), 0.0)
    return "".join("█" if share > 0.99 else "░" if share else "·" for share in held)
