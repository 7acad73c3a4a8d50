"""How advice is shown: what was tried and what it did, and lines to paste."""

from rich.console import Console
from rich.table import Table

from asyncmem.cli.replays.table import Entry, of_time
from asyncmem.cli.replays.table import as_json as figures
from asyncmem.cli.tables import print_whole
from asyncmem.figures import format_size
from asyncmem.replay import Advice, Replay, Suggestion


def as_json(file: str, advice: Advice) -> dict[str, object]:
    """Answer what was tried with its figures, all that helps together, and the lines to paste."""

    def told(one: Replay) -> dict[str, object]:
        return figures(Entry(file, one, None))

    return {
        "file": file,
        "before": told(advice.before),
        "suggestions": [
            {
                "arguments": dict(one.arguments),
                "advised": one.helps,
                "against": one.against,
                "before": told(one.before),
                "after": told(one.after),
            }
            for one in advice.suggestions
        ],
        "after": told(advice.after),
        "arguments": advice.arguments(),
        "code": advice.code(),
    }


def show(advice: Advice, console: Console) -> None:
    """Print what was tried in a table, and below it the lines to paste."""
    before, after = advice.before, advice.after
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column(f"{before.name}: {format_size(before.peak_requested)} requested", no_wrap=True)
    table.add_column("advised", overflow="fold", min_width=12)
    for heading in ("reserved", "ratio", "driver calls", "their time", "waits", "waited"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(f"as it is, {before.policy}", "", *_figures(before))
    for one in advice.suggestions:
        table.add_row(f"  {one}", _verdict(one), *_figures(one.after))
    table.add_row("all that is advised", "", *_figures(after))
    print_whole(table, console)
    console.print()
    console.print(advice.code(), markup=False, soft_wrap=True, end="")


def _verdict(one: Suggestion) -> str:
    return "yes" if one.helps else f"no: {one.against}"


def _figures(one: Replay) -> tuple[str, ...]:
    return (
        format_size(one.peak_reserved),
        f"{one.reserved_over_requested:.4f}" if one.completed else "[red]fails[/]",
        f"{sum(one.driver_calls.values()):,}",
        of_time(one.driver_seconds, one),
        f"{one.waits:,}",
        of_time(one.wait_seconds, one),
    )
