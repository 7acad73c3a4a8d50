"""Tables are whole on a screen of any width."""

import io

import pytest
from rich.console import Console

from asyncmem.cli.tables import output, show_table, table_of


def printed(width: int) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, highlight=False, markup=False, force_terminal=True, color_system=None
    )
    row = ("28.50 GiB", 1_234_567, "160 MiB", "/home/somebody/work/train.py:5 (step)", "█" * 30)
    headings = ("bytes", "allocations", "at the peak", "line", "map")
    show_table(table_of(headings, [row], left=["line"], whole=["map"]), console)
    assert console.width == width
    found = console.file
    assert isinstance(found, io.StringIO)
    return found.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 60, 90, 110, 200])
def test_no_figure_is_cut_and_no_column_is_missing(width: int) -> None:
    """Names are folded, down to twelve letters; below that a line is longer than the screen."""
    heading, *rows = printed(width)
    assert heading.split()[-2:] == ["line", "map"]
    whole = " ".join(rows)
    for figure in ("28.50 GiB", "1,234,567", "160 MiB", "█" * 30):
        assert figure in whole
    assert "…" not in whole + heading
    assert max(map(len, rows)) <= max(width, 9 + 11 + 11 + 12 + 30 + 5 * 2)
    letters = "".join(row[9 + 11 + 11 + 6 :].replace("█", "").strip() for row in rows).replace(" ", "")
    assert letters == "/home/somebody/work/train.py:5(step)"


def test_nothing_is_cut_where_there_is_no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or another program gets whole lines, whatever `COLUMNS` says."""
    monkeypatch.setenv("COLUMNS", "40")
    assert output().width >= 10_000
