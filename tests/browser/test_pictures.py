"""Pictures in a browser: each part is there, in its place and colour, answers to the mouse, and loads nothing."""

import html
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncmem.insight import Records, pictures

from .chromium import Chromium
from .seen import Seen, close, share
from .staged import HOSTILE, MIB, staged

TAGS = {"weights": "tag0", "activations": "tag1", None: "none"}
MS = 1e-3


def show(browser: Chromium, folder: Path, page: str, width: int = 1300) -> Seen:
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    return Seen(browser, path, width)


def need_silence(browser: Chromium, folder: Path) -> None:
    """No message, no dialog, and no address but the page's own and what it has in itself."""
    assert browser.said == []
    asked = [one for one in browser.asked if not one.startswith(("data:", "blob:", "about:"))]
    assert set(asked) == {(folder / "page.html").as_uri()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(autouse=True)
def light(chromium: Chromium) -> Iterator[None]:
    chromium.prefer("light")
    yield
    chromium.prefer("light")


@pytest.fixture
def seen(chromium: Chromium, folder: Path) -> Seen:
    found = show(chromium, folder, pictures.page(staged(), "staged"))
    need_silence(chromium, folder)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_bands_lie_one_on_the_other(chromium: Chromium, seen: Seen, scheme: str) -> None:
    """Each in its colour from when it was allocated to when it was freed, and nothing above them; in both themes."""
    chromium.prefer(scheme)
    seen.look()
    page = seen.variable("page")
    assert max(page) < 60 if scheme == "dark" else min(page) > 200
    # In the middle of each at 61 ms: weights 0 to 8 MiB, activations to 20, and to 22 what has no tag.
    for tag, height in (("weights", 4), ("activations", 14), (None, 21)):
        assert close(seen.colour(seen.spot("timeline", 61 * MS, height * MIB)), seen.variable(TAGS[tag]))
    for ms, height in ((61, 27), (31, 14), (85, 14), (96, 9), (3, 4)):
        assert close(seen.colour(seen.spot("timeline", ms * MS, height * MIB)), page), ms
    assert close(seen.colour(seen.spot("timeline", 31 * MS, 9 * MIB)), seen.variable("none"))


def test_bands_begin_and_end_to_the_pixel_and_have_no_outline(seen: Seen) -> None:
    """A step where memory came and went, not a slope, and no other colour between the band and what is beside it."""
    page, band = seen.variable("page"), seen.variable("tag1")
    for ms, inside in ((45, 1), (80, -1)):
        spot = seen.spot("timeline", ms * MS, 14 * MIB)
        around = [seen.colour(spot._replace(x=spot.x + by * inside)) for by in (-3, 3)]
        assert close(around[0], page)
        assert close(around[1], band)
        assert share(seen.row(spot._replace(x=spot.x - 8), spot._replace(x=spot.x + 8)), band) > 0.35


def test_a_spike_of_a_moment_is_a_column_of_its_band(chromium: Chromium, folder: Path) -> None:
    """A tenth of a microsecond in a tenth of a second: one pixel wide, as high as it was."""
    records = staged()
    rows = records.rows.copy()
    rows["time_ns"][rows["number"] == 2] = [45_000_000, 45_000_100]
    order = rows["time_ns"].argsort(kind="stable")
    seen = show(chromium, folder, pictures.page(Records(rows[order], records.names, began=0, wall=0.0, ended=10**8)))
    spot = seen.spot("timeline", 45 * MS, 14 * MIB)
    assert share(seen.row(spot._replace(x=spot.x - 3), spot._replace(x=spot.x + 4)), seen.variable("tag1"), 20) > 0.1


def test_reserved_and_limit_are_lines(seen: Seen) -> None:
    """The one along its steps; the other is dashed, or named in the legend where it is far above."""
    for ms, height in ((20, 16), (70, 32), (98, 16)):
        assert share(seen.around(seen.spot("timeline", ms * MS, height * MIB), 1), seen.variable("reserved"), 60) > 0.3
    assert seen.variable("reserved") not in seen.around(seen.spot("timeline", 70 * MS, 27 * MIB))
    assert {"reserved", "32 MiB", "limit", "64 MiB (above)"} <= set(seen.texts())


def test_marks_stand_at_their_times(seen: Seen) -> None:
    """Growth, memory that went back, waits and refusals, each in its row and colour."""
    for ms, row, name in (
        (39.5, "grew", "grew"), (95, "gave back", "gave-back"), (45, "waited", "waited"), (70, "waited", "waited"),
        (70, "refused", "refused"),
    ):  # fmt: skip
        assert share(seen.around(seen.spot("timeline", ms * MS, row), 1), seen.variable(name)) > 0.5, (ms, row)
    for ms, row in ((5, "grew"), (70, "grew"), (40, "gave back"), (25, "waited"), (80, "waited"), (40, "refused")):
        assert share(seen.around(seen.spot("timeline", ms * MS, row), 3), seen.variable("page")) > 0.6, (ms, row)


def test_segments_show_buffers_and_holes(chromium: Chromium, seen: Seen) -> None:
    """In the colours of their tags; at the end, after a click, a segment is gone and one is half empty."""
    hole = seen.variable("segment")
    for row, at, tag in ((0, 4.5, "weights"), (0, 11.5, None), (1, 8.5, "activations")):
        assert close(seen.colour(seen.spot("memory", at * MIB, row)), seen.variable(TAGS[tag]))
    for row, at in ((0, 9.3), (0, 14.4), (1, 1.3), (1, 15.3)):
        assert close(seen.colour(seen.spot("memory", at * MIB, row)), hole)
    chromium.evaluate("document.querySelectorAll('#memory .switch button')[1].click()")
    seen.look()
    assert close(seen.colour(seen.spot("memory", 4.5 * MIB, 0)), seen.variable("tag0"))
    assert close(seen.colour(seen.spot("memory", 12.3 * MIB, 0)), hole)
    assert chromium.evaluate("document.querySelectorAll('#memory .segment').length") == 1


def test_the_peak_leads_to_the_map_of_that_moment(chromium: Chromium, seen: Seen) -> None:
    """It is marked on the timeline, and a click on the mark or on its card shows where buffers lay then."""
    assert "peak 22 MiB" in seen.texts()
    pressed = "document.querySelector('#memory [aria-pressed=true]').textContent"
    for selector in (".peak path", ".card"):
        chromium.evaluate("showMap(1)")
        assert chromium.evaluate(pressed) == "At the end"
        where = (
            f"(box => [box.x + box.width / 2, box.y + 4])(document.querySelector('{selector}').getBoundingClientRect())"
        )
        chromium.click(*chromium.evaluate(where))
        assert chromium.evaluate(pressed) == "At the peak"
        assert chromium.evaluate("location.hash") == "#memory"
        chromium.evaluate("scrollTo(0, 0)")


@pytest.mark.parametrize(
    ("icicle", "whole", "cells"),
    [
        ("peak", 22, {"main": (0, 20), "serve": (20, 22), "forward": (0, 12), "load": (12, 20)}),
        ("leaks", 8, {"main": (0, 8), "load": (0, 8)}),
        ("waits", 40, {"main": (0, 30), "serve": (30, 40), "forward": (0, 30)}),
    ],
)
def test_icicles_have_a_box_for_each_line(
    seen: Seen, icicle: str, whole: int, cells: dict[str, tuple[int, int]]
) -> None:
    """As wide as bytes or seconds, below its caller, in the colour of its tag, with its name."""
    left, right = seen.cell(icicle, "main")[0].x, 0
    width = seen.cell(icicle, "main")[1].x - left
    for name, (start, end) in cells.items():
        first, last = seen.cell(icicle, name)
        scale = width / (cells["main"][1] - cells["main"][0])
        assert abs(first.x - (left + start * scale)) <= 2, name
        assert abs(last.x - (left + end * scale)) <= 3, name
        tag = "none" if icicle == "waits" or name == "serve" else {"load": "tag0"}.get(name, "tag1")
        if icicle == "leaks":
            tag = "tag0"
        assert close(seen.colour(last._replace(x=last.x - 5)), seen.variable(tag)), name
        right = max(right, last.x)
        assert (first.y - seen.cell(icicle, "main")[0].y) == (0 if name in {"main", "serve"} else 24)
    assert right - left == pytest.approx(whole * width / (cells["main"][1] - cells["main"][0]), abs=3)


def test_a_click_zooms_into_a_line_and_out_again(chromium: Chromium, seen: Seen) -> None:
    """Its caller stays above it; the button in the toolbar shows the whole again."""
    first, last = seen.cell("peak", "load")
    whole = last.x - first.x
    chromium.click(first.x + 20, first.y)
    zoomed = seen.cell("peak", "load")
    assert zoomed[1].x - zoomed[0].x > 2 * whole
    assert chromium.evaluate("document.querySelectorAll('svg[data-name=peak] .above').length") == 1
    chromium.evaluate("document.getElementById('reset').click()")
    first, last = seen.cell("peak", "load")
    assert last.x - first.x == whole
    chromium.click(first.x + 20, first.y)
    chromium.click(zoomed[0].x + 20, zoomed[0].y)
    assert seen.cell("peak", "main")[1].x - seen.cell("peak", "main")[0].x > 2 * whole
    chromium.click(seen.cell("peak", "main")[0].x + 20, seen.cell("peak", "main")[0].y)
    assert seen.cell("peak", "load")[1].x - seen.cell("peak", "load")[0].x == whole


def test_search_finds_frames_in_all_icicles(chromium: Chromium, seen: Seen) -> None:
    """By any part of their names; how much they have is said, and the others are pale."""
    look_for = "(text => { const box = document.querySelector('nav input'); box.value = text;"
    look_for += " box.dispatchEvent(new Event('input')); })"
    chromium.evaluate(f"{look_for}('LOAD')")
    assert "36.4% in frames with “load”: 8 MiB" in seen.texts()
    assert "0% in frames with “load”: 0 s" in seen.texts()
    assert chromium.evaluate("[...document.querySelectorAll('.hit')].map(one => one.dataset.frame)") == [
        "/app/model.py:21 (load)",
        "/app/model.py:21 (load)",
    ]
    chromium.evaluate(f"{look_for}('')")
    assert chromium.evaluate("document.querySelectorAll('.hit, .searched').length") == 0


def test_dragging_zooms_into_time(chromium: Chromium, seen: Seen) -> None:
    """The timeline and its marks together; the button in the toolbar shows the whole again."""
    start, end = seen.spot("timeline", 40 * MS, 14 * MIB), seen.spot("timeline", 60 * MS, 14 * MIB)
    chromium.drag(start.x, end.x, start.y)
    seen.look()
    assert chromium.evaluate("views.time.start") == pytest.approx(40 * MS, abs=1 * MS)
    assert chromium.evaluate("views.time.end") == pytest.approx(60 * MS, abs=1 * MS)
    spot = seen.spot("timeline", 45 * MS, 14 * MIB)
    assert close(seen.colour(spot._replace(x=spot.x + 3)), seen.variable("tag1"))
    assert close(seen.colour(spot._replace(x=spot.x - 3)), seen.variable("page"))
    chromium.evaluate("document.getElementById('reset').click()")
    assert chromium.evaluate("[views.time.start, views.time.end]") == [0, 0.1]


def test_the_legend_is_sorted_by_bytes_and_hides_bands(chromium: Chromium, seen: Seen) -> None:
    """The most at the peak comes first, each with its bytes."""
    entries = "[...document.querySelectorAll('.legend li')].map(one => one.textContent)"
    assert chromium.evaluate(entries) == [
        "activations12 MiB", "weights8 MiB", "no tag2 MiB", "reserved32 MiB", "limit64 MiB (above)",
    ]  # fmt: skip
    chromium.evaluate("document.querySelector('.legend button').click()")
    seen.look()
    spot = seen.spot("timeline", 61 * MS, 14 * MIB)
    assert close(seen.colour(spot), seen.variable("page"))
    assert close(seen.colour(seen.spot("timeline", 61 * MS, 9 * MIB)), seen.variable("none"))


def test_the_table_of_leaks_is_sorted_by_what_is_clicked(chromium: Chromium, folder: Path) -> None:
    """With bytes, buffers, ages, tags and lines; a second click turns it round."""
    records = staged()
    rows = records.rows[records.rows["number"] != 2].copy()
    seen = show(chromium, folder, pictures.page(records.with_rows(rows[rows["kind"] != 1])))
    first = "[...document.querySelectorAll('#leaks tbody tr')].map(one => one.cells[0].textContent)"
    assert chromium.evaluate(first) == ["8 MiB", "2 MiB"]
    click = "[...document.querySelectorAll('#leaks th button')].find(one => one.textContent === '{}').click()"
    for column, order in (("bytes", ["2 MiB", "8 MiB"]), ("oldest", ["8 MiB", "2 MiB"]), ("tags", ["2 MiB", "8 MiB"])):
        chromium.evaluate(click.format(column))
        assert chromium.evaluate(first) == order, column
    assert {"95 ms", "weights", "/app/model.py:21 (load)"} <= set(seen.texts())


def test_waits_are_told_by_tag_priority_and_length(seen: Seen) -> None:
    """Two tables, and a bar for each class."""
    assert {"By tag", "By priority", "By how long they took", "< 20 ms", "< 50 ms"} <= set(seen.texts())


def test_time_goes_right_bytes_go_up_and_callers_stand_above(seen: Seen) -> None:
    """As every reader takes it."""
    assert seen.spot("timeline", 80 * MS, 0).x - seen.spot("timeline", 20 * MS, 0).x > 300
    assert seen.spot("timeline", 50 * MS, 0).y - seen.spot("timeline", 50 * MS, 22 * MIB).y > 100
    assert seen.spot("timeline", 0, 0).y < seen.spot("timeline", 0, "grew").y < seen.spot("timeline", 0, "waited").y
    assert seen.spot("memory", 0, 0).y < seen.spot("memory", 0, 1).y


def test_tips_say_what_is_under_the_mouse(seen: Seen) -> None:
    """By name, in units that read well."""
    for spot, words in (
        (seen.spot("memory", 4 * MIB, 0), {"weights", "8 MiB in 1"}),
        (seen.spot("memory", 9.3 * MIB, 0), {"hole"}),
        (seen.cell("peak", "load")[0], {"/app/model.py:21 (load)", "36.4%"}),
        (seen.cell("waits", "serve")[1], {"/app/server.py:3 (serve)", "10 ms", "25%"}),
        (seen.spot("timeline", 62 * MS, 30 * MIB), {"live", "22 MiB", "12 MiB", "8 MiB", "2 MiB"}),
        (seen.spot("timeline", 50 * MS, "waited"), {"1 times", "30 ms", "60 ms"}),
        (seen.spot("timeline", 39.5 * MS, "grew"), {"1 times", "16 MiB"}),
    ):
        seen.point_at(spot._replace(x=spot.x + (3 if spot == seen.cell("peak", "load")[0] else -3)))
        tip = set(seen.tip())
        assert words <= tip, (words, tip)


def test_nothing_to_show_is_a_sentence(chromium: Chromium, folder: Path) -> None:
    """And no empty picture."""
    everything = staged()
    quiet = Records(everything.rows[:3], everything.names, began=0, wall=0.0, ended=0)
    seen = show(chromium, folder, pictures.page(quiet))
    assert "No request waited for memory." in seen.texts()
    nothing = Records(everything.rows[:0], everything.names, began=0, wall=0.0, ended=0)
    seen = show(chromium, folder, pictures.page(nothing))
    sentences = {"Nothing was recorded.", "Nothing was live.", "All that was allocated was freed."}
    assert sentences | {"There were no segments then. Memory by pages never has any."} <= set(seen.texts())
    unknown = Records(everything.rows, everything.names, began=0, wall=0.0, ended=0, end_known=False)
    seen = show(chromium, folder, pictures.page(unknown))
    assert "What was never freed is not known: the end of the records is missing." in seen.texts()
    need_silence(chromium, folder)


def test_names_do_no_harm(chromium: Chromium, folder: Path) -> None:
    """Markup in a tag is shown as it is written: nothing runs, nothing is fetched."""
    seen = show(chromium, folder, pictures.page(staged(HOSTILE), HOSTILE))
    assert chromium.evaluate("document.title") == HOSTILE
    seen.point_at(seen.spot("memory", 8 * MIB, 1))
    assert HOSTILE in seen.tip()
    need_silence(chromium, folder)


@pytest.mark.parametrize("width", [390, 700, 1900])
def test_the_page_fits_other_windows(chromium: Chromium, folder: Path, width: int) -> None:
    """A phone, or narrow or wide: nothing stands out at the side, and data are where the axis says."""
    seen = show(chromium, folder, pictures.page(staged()), width)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert close(seen.colour(seen.spot("timeline", 61 * MS, 14 * MIB)), seen.variable("tag1"))
    assert close(seen.colour(seen.spot("memory", 14.8 * MIB, 0)), seen.variable("segment"))
    need_silence(chromium, folder)


def test_the_theme_can_be_chosen(chromium: Chromium, seen: Seen) -> None:
    """By one button, whatever the system prefers."""
    before = seen.variable("page")
    chromium.evaluate("document.getElementById('theme').click()")
    assert seen.variable("page") != before
    chromium.evaluate("document.getElementById('theme').click()")
    assert seen.variable("page") == before


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
    texts = seen.texts()
    assert {"run.amem", "10 MiB", "All that was allocated was freed."} <= set(texts)
    assert any("program.py" in one for one in texts)
    assert seen.colours[seen.variable("tag0")] > 1000
    need_silence(chromium, folder)


def test_a_notebook_shows_them_in_a_frame(chromium: Chromium, folder: Path) -> None:
    """In a page that knows nothing of the report."""
    output = staged()._repr_mimebundle_()["text/html"]
    seen = show(chromium, folder, f"<!doctype html><title>{html.escape('notebook')}</title><p>Out:</p>{output}")
    assert "Out:" in seen.texts()
    # What is in the frame is drawn in its own time, and cannot be asked.
    seen.wait_for((0, 0x72, 0xB2), 1000)
    assert chromium.said == []
