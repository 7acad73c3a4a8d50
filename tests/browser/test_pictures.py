"""Pictures in a browser: each part is there, in its place and colour, and the page wants nothing from anybody."""

import html
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncmem.insight import Records, pictures, read
from asyncmem.insight.pictures import Band
from asyncmem.insight.pictures.drawn import colours
from asyncmem.insight.pictures.drawn.colours import TagColours

from .chromium import Chromium
from .seen import Colour, Seen, close, rgb, share
from .staged import HOSTILE, MIB, staged

WHITE = (255, 255, 255)
BAND = 0.85  # how opaque a band is


def show(browser: Chromium, folder: Path, page: str, width: int = 1300) -> Seen:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    return Seen(browser, path, width)


def need_silence(browser: Chromium, folder: Path) -> None:
    """No message, no dialog, and no address but the page's own and what it has in itself."""
    assert browser.said == []
    asked = [one for one in browser.asked if not one.startswith(("data:", "blob:", "about:"))]
    assert set(asked) == {(folder / "page.html").as_uri()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def seen(chromium: Chromium, folder: Path) -> Seen:
    found = show(chromium, folder, pictures.page(staged(), "staged"))
    need_silence(chromium, folder)
    return found


def tag_colour(tag: str | None) -> str:
    return TagColours(pictures.live_by_tag(staged()).bands).of(tag)


def band(tag: str | None) -> Colour:
    return rgb(tag_colour(tag), BAND)


def test_bands_lie_one_on_the_other(seen: Seen) -> None:
    """Each in its colour from when it was allocated to when it was freed, and nothing above them."""
    # In the middle of each at 61 ms: weights 0 to 8 MiB, activations to 20, and to 22 what has no tag.
    for tag, height in (("weights", 4), ("activations", 14), (None, 21)):
        assert close(seen.colour(seen.spot("timeline", 61, height * MIB)), band(tag))
    assert close(seen.colour(seen.spot("timeline", 61, 27 * MIB)), WHITE)
    # The same height at other times.
    assert close(seen.colour(seen.spot("timeline", 31, 14 * MIB)), WHITE)
    assert close(seen.colour(seen.spot("timeline", 31, 9 * MIB)), band(None))
    assert close(seen.colour(seen.spot("timeline", 85, 14 * MIB)), WHITE)
    assert close(seen.colour(seen.spot("timeline", 95, 9 * MIB)), WHITE)
    assert close(seen.colour(seen.spot("timeline", 3, 4 * MIB)), WHITE)
    assert len({band(tag) for tag in ("weights", "activations", None)}) == 3


def test_bands_begin_and_end_to_the_pixel(seen: Seen) -> None:
    """A step where memory came and went, not a slope."""
    for ms, inside, outside in ((45, 1, -1), (80, -1, 1)):
        spot = seen.spot("timeline", ms, 14 * MIB)
        assert close(seen.colour(spot._replace(x=spot.x + 3 * inside)), band("activations"))
        assert close(seen.colour(spot._replace(x=spot.x + 3 * outside)), WHITE)


def test_reserved_and_limit_are_lines(seen: Seen) -> None:
    """The one along its steps, the other dashed all over the time."""
    reserved, limit = rgb(colours.RESERVED), rgb(colours.LIMIT)
    for ms, height in ((20, 16), (70, 32), (98, 16)):
        assert share(seen.around(seen.spot("timeline", ms, height * MIB), 1), reserved, 60) > 0.3
    assert reserved not in seen.around(seen.spot("timeline", 20, 32 * MIB))
    assert reserved not in seen.around(seen.spot("timeline", 70, 24 * MIB))
    start, end = seen.spot("timeline", 1, 64 * MIB), seen.spot("timeline", 99, 64 * MIB)
    rows = [share(seen.row(start._replace(y=start.y + by), end._replace(y=end.y + by)), limit, 40) for by in (-1, 0, 1)]
    assert 0.3 < max(rows) < 0.9


def test_marks_stand_at_their_times(seen: Seen) -> None:
    """A triangle for growth and one for memory that went back, bars for waits, a cross for a refusal."""
    marks = (
        (40, "grew", colours.GREW), (95, "gave back", colours.TRIMMED), (45, "waited", colours.WAITED),
        (70, "waited", colours.WAITED), (70, "out of memory", colours.REFUSED),
    )  # fmt: skip
    for ms, row, colour in marks:
        assert share(seen.around(seen.spot("marks", ms, row), 2), rgb(colour)) > 0.5, (ms, row)
    empty = ((0, "grew"), (70, "grew"), (40, "gave back"), (25, "waited"), (62, "waited"), (80, "waited"))
    for ms, row in (*empty, (40, "out of memory")):
        assert share(seen.around(seen.spot("marks", ms, row), 2), WHITE) > 0.6, (ms, row)
    for ms, edge in ((30, 1), (60, -1)):
        spot = seen.spot("marks", ms, "waited")
        assert close(seen.colour(spot._replace(x=spot.x + 3 * edge)), rgb(colours.WAITED))
        assert close(seen.colour(spot._replace(x=spot.x - 4 * edge)), WHITE)


def test_both_axes_of_time_are_one(seen: Seen) -> None:
    """A mark stands below what it is about."""
    for ms in (0, 50, 100):
        assert abs(seen.spot("timeline", ms, 0).x - seen.spot("marks", ms, "grew").x) <= 1


def test_segments_show_buffers_and_holes(seen: Seen) -> None:
    """In the colours of their tags; at the end a segment is gone, and one is half empty."""
    hole = rgb(colours.SEGMENT)
    at_peak = [(0, 4, "weights"), (0, 11, None), (1, 8, "activations")]
    for row, at, tag in at_peak:
        assert close(seen.colour(seen.spot("peak-segments", at * MIB, row)), rgb(tag_colour(tag)))
    for row, at in ((0, 9), (0, 14), (1, 1), (1, 15)):
        assert close(seen.colour(seen.spot("peak-segments", at * MIB, row)), hole)
    assert close(seen.colour(seen.spot("end-segments", 4 * MIB, 0)), rgb(tag_colour("weights")))
    assert close(seen.colour(seen.spot("end-segments", 12 * MIB, 0)), hole)
    assert seen.colours[rgb(tag_colour("activations"))] > 1000


@pytest.mark.parametrize(
    ("figure", "cells"),
    [
        ("peak", {"main": (0, 20, 0), "serve": (20, 22, 0), "forward": (0, 12, 1), "load": (12, 20, 1)}),
        ("leaks", {"main": (0, 8, 0), "load": (0, 8, 1)}),
        ("waits", {"main": (0, 30, 0), "serve": (30, 40, 0), "forward": (0, 30, 1)}),
    ],
)
def test_icicles_have_a_box_for_each_line(seen: Seen, figure: str, cells: dict[str, tuple[int, int, int]]) -> None:
    """As wide as bytes or milliseconds, below its caller, with its name; nothing below what called nothing."""
    unit = 1 if figure == "waits" else MIB
    sites = {site.function: site for site in staged().names.places if site is not None}
    for name, (left, right, depth) in cells.items():
        colour = rgb(colours.of_function(sites[name]))
        ends = seen.spot(figure, left * unit, depth + 0.5), seen.spot(figure, right * unit, depth + 0.5)
        assert close(seen.colour(ends[1]._replace(x=ends[1].x - 5)), colour), name
        assert close(seen.colour(ends[0]._replace(x=ends[0].x + 2)), colour), name
        words = seen.row(ends[0], ends[0]._replace(x=ends[0].x + 40))
        assert share(words, rgb(colours.TEXT), 120) > 0.03, name
    if "serve" in cells:
        left, right, depth = cells["serve"]
        assert close(seen.colour(seen.spot(figure, (left + right + 1) / 2 * unit, depth + 1.5)), WHITE)


def test_time_goes_right_bytes_go_up_and_callers_stand_above(seen: Seen) -> None:
    """As every reader takes it."""
    assert seen.spot("timeline", 80, 0).x - seen.spot("timeline", 20, 0).x > 300
    assert seen.spot("timeline", 50, 0).y - seen.spot("timeline", 50, 32 * MIB).y > 100
    assert seen.spot("timeline", 50, 0).y < seen.spot("marks", 50, "grew").y < seen.spot("marks", 50, "waited").y
    assert seen.spot("peak-segments", 0, 0).y < seen.spot("peak-segments", 0, 1).y
    for figure in ("peak", "leaks", "waits"):
        assert seen.spot(figure, 1, 0.5).y < seen.spot(figure, 1, 1.5).y


def test_tips_say_what_is_under_the_mouse(seen: Seen) -> None:
    """By name, in units that read well."""
    for spot, words in (
        (seen.spot("peak-segments", 4 * MIB, 0), {"weights", "8 MiB in 1"}),
        (seen.spot("peak", 16 * MIB, 1.5), {"/app/model.py:21 (load)", "8 MiB, 36.4%"}),
        (seen.spot("waits", 35, 0.5), {"/app/server.py:3 (serve)", "10 ms, 25%"}),
        (seen.spot("timeline", 62, 30 * MIB), {"22 MiB", "12 MiB", "8 MiB", "2 MiB"}),
        (seen.spot("marks", 50, "waited"), {"30 ms", "60 ms"}),
        (seen.spot("marks", 40, "grew"), {"1 times, 16 MiB"}),
    ):
        assert not words <= set(seen.texts())
        seen.point_at(spot)
        assert words <= set(seen.texts()), words


def test_nothing_to_show_is_a_sentence(chromium: Chromium, folder: Path) -> None:
    """And no empty picture."""
    everything = staged()
    quiet = Records(everything.rows[:3], everything.names, began=0, wall=0.0, ended=0)
    seen = show(chromium, folder, pictures.page(quiet))
    assert "Nobody waited." in seen.texts()
    nothing = Records(everything.rows[:0], everything.names, began=0, wall=0.0, ended=0)
    seen = show(chromium, folder, pictures.page(nothing))
    sentences = {"Nothing was recorded.", "Nothing was live.", "All that was allocated was freed.", "Nobody waited."}
    assert sentences <= set(seen.texts())
    assert chromium.evaluate("document.querySelectorAll('canvas').length") == 0
    need_silence(chromium, folder)


def test_names_do_no_harm(chromium: Chromium, folder: Path) -> None:
    """Markup and formulas in a tag are shown as they are written: nothing runs, nothing is fetched."""
    seen = show(chromium, folder, pictures.page(staged(HOSTILE), HOSTILE))
    assert chromium.evaluate("document.title") == HOSTILE
    seen.point_at(seen.spot("peak-segments", 8 * MIB, 1))
    assert HOSTILE in seen.texts()
    seen.point_at(seen.spot("timeline", 62, 30 * MIB))
    need_silence(chromium, folder)


@pytest.mark.parametrize("width", [700, 1900])
def test_the_page_fits_other_windows(chromium: Chromium, folder: Path, width: int) -> None:
    """Narrow or wide, nothing stands out at the side, and data are where the axis says."""
    seen = show(chromium, folder, pictures.page(staged()), width)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert close(seen.colour(seen.spot("timeline", 61, 14 * MIB)), band("activations"))
    assert close(seen.colour(seen.spot("peak-segments", 14.8 * MIB, 0)), rgb(colours.SEGMENT))
    need_silence(chromium, folder)


PROGRAM = """
import asyncmem

with asyncmem.AsyncMemoryPool("simulated", name="mine") as pool, asyncmem.tag("scores"):
    held = [pool.allocate("1 MiB") for _ in range(10)]
    held.clear()
"""


def test_two_commands_lead_from_a_program_to_its_picture(chromium: Chromium, folder: Path) -> None:
    """`asyncmem run` and `asyncmem report`, as a new user would type them."""
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    for command in ("run program.py -o run.amem", "report run.amem -o page.html --force"):
        subprocess.run([sys.executable, "-m", "asyncmem", *command.split()], cwd=folder, check=True, timeout=120)
    seen = Seen(chromium, folder / "page.html")
    assert "run.amem" in seen.texts()
    assert {"10 MiB in 10 buffers live.", "All that was allocated was freed."} <= set(seen.texts())
    (block,) = {block for block in pictures.memory_map(read(folder / "run.amem")).blocks if block.left == 0}
    colour = rgb(TagColours((Band("scores", "scores", np.zeros(1, np.int64)),)).of("scores"))
    assert close(seen.colour(seen.spot("peak-segments", block.right / 2, block.row)), colour)
    need_silence(chromium, folder)


def test_a_notebook_shows_them_in_a_frame(chromium: Chromium, folder: Path) -> None:
    """In a page that knows nothing of Bokeh."""
    output = staged()._repr_mimebundle_()["text/html"]
    seen = show(chromium, folder, f"<!doctype html><title>{html.escape('notebook')}</title><p>Out:</p>{output}")
    assert "Out:" in seen.texts()
    # What is in the frame is drawn in its own time, and cannot be asked.
    seen.wait_for(band("weights"), 1000)
    assert chromium.said == []
