"""Replays through a real pool: each in one of its own, and how they are shown."""

from contextlib import closing
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from asyncmem import AsyncMemoryPool
from asyncmem.cli.replays.table import of_time, show_failures
from asyncmem.cli.tables import print_whole
from asyncmem.devices import Device, Simulated
from asyncmem.devices import device as make_device
from asyncmem.figures import format_size
from asyncmem.replay import LiveReplay, Trace, pool_options, replay_on


@dataclass(frozen=True)
class LiveEntry:
    """One line of the table.

    Attributes:
        file: What was replayed.
        policy: How memory was had, as it was written.
        replay: What became of it.
    """

    file: str
    policy: str
    replay: LiveReplay


def replayed(
    device: str, file: str, trace: Trace, policy: str, *, limit: int | None, lag: float, pace: float | None
) -> LiveEntry:
    """Replay a program in a pool of its own."""
    options = pool_options(policy)
    if limit is not None:
        options = options.replace(limit=limit)
    with closing(_opened(device, late=lag > 0)) as opened, AsyncMemoryPool(opened, options=options) as pool:
        return LiveEntry(file, policy, replay_on(pool, trace, lag=lag, pace=pace))


def _opened(name: str, *, late: bool) -> Device:
    found = make_device(name)
    if late and isinstance(found, Simulated):
        # A pool's worker goes by real time, from which a virtual clock runs away.
        return Simulated(clock="wall", index=int(found.name.partition(":")[2]))
    return found


def as_json(entry: LiveEntry) -> dict[str, object]:
    """Answer the figures of one replay by their names."""
    one = entry.replay
    return {
        "file": entry.file,
        "device": one.device,
        "policy": entry.policy,
        "limit": one.limit,
        "completed": one.completed,
        "peak_requested": one.peak_requested,
        "peak_active": one.peak_active,
        "peak_reserved": one.peak_reserved,
        "reserved_over_requested": one.reserved_over_requested,
        "driver_calls": one.driver_calls,
        "waits": one.waits,
        "wait_ms": one.wait_seconds * 1e3,
        "recorded_ms": one.duration * 1e3,
        "ns_per_op": one.ns_per_op,
    }


def show(entries: list[LiveEntry], console: Console) -> None:
    """Print the table, and below it what did not complete."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("program", overflow="fold", min_width=12)
    table.add_column("device", no_wrap=True)
    table.add_column("policy", overflow="fold", min_width=7)
    for heading in ("requested", "reserved", "ratio", "driver calls", "waits", "waited", "an operation"):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(*_cells(entry))
    print_whole(table, console)
    show_failures([entry.replay for entry in entries], console)


def _cells(entry: LiveEntry) -> tuple[str, ...]:
    one = entry.replay
    return (
        one.name,
        one.device,
        entry.policy,
        format_size(one.peak_requested),
        format_size(one.peak_reserved),
        f"{one.reserved_over_requested:.4f}" if one.completed else "[red]fails[/]",
        f"{one.driver_calls:,}",
        f"{one.waits:,}",
        of_time(one.wait_seconds, one),
        f"{one.ns_per_op:,.0f} ns",
    )
