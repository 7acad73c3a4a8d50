"""What pipelines have done so far, stage by stage, as tables, also while they run; and what is in a channel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.text import printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStats:
    """The figures of a channel at one moment. Sizes are bytes; `channel.quota.stats()` has all of its memory."""

    items: int
    """Items that wait to be received."""
    max_items: int | None
    """The most that may wait; None leaves it to the bytes."""
    senders: int
    """Ends of producers that are open."""
    receivers: int
    """Ends of consumers that are open."""
    waiting_to_send: int
    """Tasks that wait because `max_items` wait to be received."""
    waiting_to_receive: int
    """Tasks that wait for an item."""
    waiting_for_memory: int
    """Requests for an item's memory that wait."""
    held_bytes: int
    """What items hold: those in the channel, those still made, and those received and not freed."""
    peak_bytes: int
    """The most that was held."""
    limit_bytes: int
    """The quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage's figures. Shares are of the time of all its workers while the pipeline ran; they add up to 1."""

    name: str
    """The stage's name."""
    workers: int
    """How many items it works on at once."""
    items: int
    """Items finished."""
    items_per_s: float
    """Items finished a second."""
    busy: float
    """The share of time inside the stage's function, without the waits for memory."""
    waiting_for_memory: float
    """The share of time inside the stage's function in which it waited for memory."""
    waiting_for_input: float
    """The share of time outside in which there was no item yet, or it was not this one's turn."""
    held_back: float
    """The share of time outside in which later stages, or the consumer, had all items that may be in flight or that the
    source has."""
    peak_bytes: int
    """The most bytes that its items held, here and in the stages behind; while one is worked on, all of its credit."""
    kept_bytes: int
    """The bytes that are kept free for it, whatever others need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """The figures of a pipeline so far; printed, a table."""

    stages: tuple[StageReport, ...]
    """The stages in order."""
    items: int
    """Items that came out."""
    seconds: float
    """How long it ran."""
    limit_bytes: int
    """What all stages may hold together."""
    peak_bytes: int
    """What they had of the pool at the most; what is kept for stages with credit counts whole."""
    lost: tuple[str, ...] = ()
    """The workers of a cluster that were lost, each with the reason, in their order."""

    @property
    def items_per_s(self) -> float:
        """Items that came out a second."""
        return self.items / self.seconds if self.seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """The stage that is busiest: the one to make faster, or to give more workers."""
        return max(self.stages, key=lambda stage: stage.busy).name

    @property
    def advice(self) -> str | None:
        """What to write where stages wait for memory that is kept free for others which take none; else None."""
        waits = max(stage.waiting_for_memory for stage in self.stages)
        if waits <= 1 - FULL or max(stage.busy for stage in self.stages) >= FULL:
            return None
        unused = [stage for stage in self.stages if stage.items and stage.kept_bytes and not stage.peak_bytes]
        kept = ", ".join(f"{format_size(stage.kept_bytes)} for {printable(stage.name)}" for stage in unused)
        return f"kept free and never used: {kept}; @stage(credit=0) leaves it to the others" if unused else None

    def __str__(self) -> str:
        """Lay the figures out as a table."""
        return self._lay_out(_HEAD)

    def _lay_out(self, *heads: Sequence[str], gap: str = "  ") -> str:
        rows = (_cells(stage, mark=stage.name == self.bottleneck) for stage in self.stages)
        notes = [*filter(None, [self.advice]), *(f"lost: {printable(one)}" for one in self.lost)]
        return "\n".join([self._headline(), *table([*heads, *rows], gap=gap), *notes])

    def _headline(self) -> str:
        peak = f"peak {format_size(self.peak_bytes)} of {format_size(self.limit_bytes)}"
        done = f"{format_count(self.items, 'item')} in {format_duration(self.seconds)}"
        return f"{done}, {self.items_per_s:,.3g} a second, {peak}"


FULL = 0.95
"""The share of its time from which on a stage counts as busy all of the time: more memory would not help then."""

_UPPER = ("stage", "workers", "items", "items/s", "busy", "waits for", "waits for", "held", "peak", "kept")
_LOWER = ("", "", "", "", "", "memory", "input", "back", "", "free")
_HEAD = tuple(f"{upper} {lower}".strip() for upper, lower in zip(_UPPER, _LOWER, strict=True))


def _cells(stage: StageReport, *, mark: bool) -> tuple[str, ...]:
    return (
        f"{printable(stage.name)}{' *' if mark else ''}",
        str(stage.workers),
        f"{stage.items:,}",
        f"{stage.items_per_s:,.3g}",
        format_share(stage.busy),
        format_share(stage.waiting_for_memory),
        format_share(stage.waiting_for_input),
        format_share(stage.held_back),
        format_size(stage.peak_bytes),
        format_size(stage.kept_bytes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelStageReport:
    """One stage's figures."""

    name: str
    """The stage's name."""
    device: str
    """Where it ran."""
    forward_s: float
    """Seconds that a forward took, on the average."""
    backward_s: float
    """Seconds that a backward took, on the average."""
    busy: float
    """The share of the run's time in which it worked."""
    live: int
    """The most micro-batches that the schedule lets it keep."""
    peak_bytes: int
    """The most bytes that were used of what it had, summed over its parts."""
    bound_bytes: int
    """What it had: all that it may hold, by the schedule and by what it states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelReport:
    """What a run of `PipelineParallel` came to; printed, a table."""

    schedule: str
    """The schedule's name."""
    micro_batches: int
    """How many micro-batches went through."""
    stages: tuple[ParallelStageReport, ...]
    """The stages in order."""
    seconds: float
    """From the first step's beginning to the last one's end."""
    bubble: float
    """The share of all stages' time in which they were idle."""
    least_bubble: float
    """The same if only the schedule had held them up, with steps as long as they were on the average."""
    transfer_s: float
    """Seconds of copying between stages, in sum."""
    overlap: float
    """The share of those seconds in which nothing waited for them."""

    def __str__(self) -> str:
        """Lay the figures out as a table."""
        return "\n".join([self._headline(), *table([_PARALLEL_HEAD, *map(_parallel_cells, self.stages)], left=2)])

    def _headline(self) -> str:
        done = f"{self.schedule}: {format_count(self.micro_batches, 'micro-batch', 'micro-batches')}"
        bubble = f"bubble {format_share(self.bubble)}, at least {format_share(self.least_bubble)}"
        copies = f"{format_share(self.overlap)} of {format_duration(self.transfer_s)} of copies overlapped"
        return f"{done} in {format_duration(self.seconds)}, {bubble}, {copies}"


_PARALLEL_HEAD = ("stage", "device", "forward", "backward", "busy", "keeps", "peak", "bound")


def _parallel_cells(stage: ParallelStageReport) -> tuple[str, ...]:
    return (
        printable(stage.name),
        printable(stage.device),
        format_duration(stage.forward_s),
        format_duration(stage.backward_s),
        format_share(stage.busy),
        str(stage.live),
        format_size(stage.peak_bytes),
        format_size(stage.bound_bytes),
    )


def table(rows: Sequence[Sequence[str]], *, left: int = 1, gap: str = "  ") -> list[str]:
    """Return the lines of a table; so many of its columns, from the first, are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return [
        gap.join(align(cell, width) for align, cell, width in zip(aligns, row, widths, strict=True)) for row in rows
    ]


_REFRESH = 0.25  # seconds between two looks


async def show(report: Callable[[], PipelineReport], console: "Console | None" = None) -> None:
    """Show a report until cancelled, in 80 columns: redrawn on a terminal, once at the end elsewhere. Needs `rich`.

    Args:
        report: Returns the figures so far.
        console: Where to show it; None for standard error.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = console or Console(stderr=True)
    end = "" if console.is_terminal else "\n"

    def look() -> Text:
        return Text(report()._lay_out(_UPPER, _LOWER, gap=" ") + end)

    # No refreshing thread: it would compete with the pipeline.
    with Live(console=console, auto_refresh=False, get_renderable=look) as live:
        while True:
            await anyio.sleep(_REFRESH)
            live.refresh()
