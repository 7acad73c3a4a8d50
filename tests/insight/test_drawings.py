"""The page: each picture has the columns of its records by value, and the page asks nobody for anything."""

import asyncio
import html
import json
import re
from typing import Any

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.models import PlainText

from asyncmem import AsyncMemoryPool, OutOfMemoryError, PoolTimeout, profile_memory, tag
from asyncmem.core import Kind
from asyncmem.figures import format_share
from asyncmem.insight import Recording, Records, pictures
from asyncmem.insight.pictures import Block, MemoryMap, Row
from asyncmem.insight.pictures.drawn.colours import TagColours
from asyncmem.insight.pictures.drawn.memory_map import draw_memory_map
from asyncmem.insight.summary import summarize

from .support import MIB

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"\\ $$x^2$$ @{time} \N{SNOWMAN}"


async def everything() -> Records:
    """Tags, growth, waits, a refusal, a trim, holes, a leak."""
    async with AsyncMemoryPool("simulated", name="mine", limit="32 MiB", segment_size="4 MiB") as pool:
        with Recording(pool, frames=4) as recording:
            weights = await pool.allocate_async("6 MiB", tag="weights")
            with tag(HOSTILE):
                held = [await pool.allocate_async("1 MiB") for _ in range(8)]
            untagged = await pool.allocate_async("2 MiB")
            with pytest.raises(PoolTimeout):
                await pool.allocate_async("24 MiB", timeout=0.005)
            with pytest.raises(OutOfMemoryError):
                await pool.allocate_async("40 MiB")
            held = held[::2]
            weights.free()
            await pool.trim()
        untagged.free()
        held.clear()
    return recording.records()


@pytest.fixture(scope="module")
def records() -> Records:
    return asyncio.run(everything())


@pytest.fixture(scope="module")
def page(records: Records) -> str:
    return pictures.page(records, HOSTILE)


def document_of(page: str) -> Document:
    """What the page gives to the browser's half of Bokeh."""
    found = re.search(r"const docs_json = '(.*?)';", page)
    assert found
    (document,) = json.loads(html.unescape(found[1].replace("\\\\", "\\"))).values()
    return Document.from_json(document)


def columns(document: Document, picture: str, name: str) -> dict[str, Any]:
    """The columns of what is drawn under a name."""
    figure = document.select_one({"name": picture})
    assert figure is not None
    data: dict[str, Any] = figure.select_one({"name": name}).data_source.data
    return {key: np.asarray(column).tolist() for key, column in data.items()}


@pytest.fixture(scope="module")
def document(page: str) -> Document:
    return document_of(page)


def test_the_timeline_is_drawn_by_value(records: Records, document: Document) -> None:
    """Bands one on the other, the line of what was live above, in milliseconds for so short a time."""
    want = pictures.live_by_tag(records)
    found = columns(document, "timeline", "band0")
    assert found["time"] == pytest.approx((want.times * 1e3).tolist())
    assert found["live"] == want.live.tolist()
    below = np.zeros(len(want.times), np.int64)
    for at, band in enumerate(want.bands):
        assert found[f"below{at}"] == below.tolist()
        below = below + band.nbytes
        assert found[f"above{at}"] == below.tolist()
        assert found[f"band{at}"] == band.nbytes.tolist()
    assert found["live"] == found[f"above{len(want.bands) - 1}"]
    reserved = columns(document, "timeline", "reserved")
    assert reserved["reserved"] == want.reserved.tolist()
    assert columns(document, "timeline", "limit")["y"] == [32 * MIB] * 2
    figure = document.select_one({"name": "timeline"})
    assert figure is not None
    labels = [item.label["value"] for item in figure.legend[0].items]
    assert labels[0] == "limit 32 MiB"
    assert labels[1:3] == ["reserved", "live"]
    assert {"weights", "no tag", f"{HOSTILE[:21]}…{HOSTILE[-10:]}"} == set(labels[3:])


def test_bands_have_colours_of_their_own(records: Records, document: Document) -> None:
    """The same in the map of segments."""
    bands = pictures.live_by_tag(records).bands
    figure = document.select_one({"name": "timeline"})
    assert figure is not None
    of_bands = {band.tag: figure.select_one({"name": f"band{at}"}).glyph.fill_color for at, band in enumerate(bands)}
    assert len(set(of_bands.values())) == len(of_bands) == 3
    found = columns(document, "peak-segments", "blocks")
    for name, colour in zip(found["tag"], found["colour"], strict=True):
        assert of_bands[None if name == "no tag" else name] == colour


def test_lines_far_above_are_named_and_not_drawn_into_the_picture() -> None:
    """What was live stays readable below a limit of a thousand times as much."""

    async def work() -> Records:
        async with AsyncMemoryPool("simulated", limit="4 GiB", segment_size="64 MiB") as pool:
            with Recording(pool) as recording:
                await pool.allocate_async("1 MiB")
            return recording.records()

    figure = document_of(pictures.page(asyncio.run(work()))).select_one({"name": "timeline"})
    assert figure is not None
    assert figure.y_range.end < 2 * MIB
    labels = [item.label["value"] for item in figure.legend[0].items]
    assert labels[:2] == ["limit 4 GiB (above)", "reserved (above)"]


def test_marks_are_drawn_by_value(records: Records, document: Document) -> None:
    """In four rows of one time: growth, trims, waits, refusals."""
    want = pictures.marks(records)
    for name, moments in (("grew", want.grew), ("gave back", want.trimmed), ("out of memory", want.out_of_memory)):
        found = columns(document, "marks", name)
        assert found["time"] == pytest.approx((moments.times * 1e3).tolist())
        assert found["nbytes"] == moments.nbytes.tolist()
        assert found["row"] == [name] * len(found["time"])
        assert found["time"]
    found = columns(document, "marks", "waited")
    assert found["start"] == pytest.approx((want.waits.starts * 1e3).tolist())
    assert found["end"] == pytest.approx((want.waits.ends * 1e3).tolist())
    assert sum(found["count"]) == len(records.of(Kind.WAITED))
    upper, lower = (document.select_one({"name": name}) for name in ("timeline", "marks"))
    assert upper is not None
    assert lower is not None
    assert upper.x_range is lower.x_range


@pytest.mark.parametrize("moment", ["peak", "end"])
def test_the_map_is_drawn_by_value(records: Records, document: Document, moment: str) -> None:
    """A row for each segment, a block for each buffer."""
    want = pictures.memory_map(records, None if moment == "peak" else records.duration)
    found = columns(document, f"{moment}-segments", "segments")
    assert found["size"] == [one.nbytes for one in want.rows]
    assert found["hole"] == [one.largest_hole for one in want.rows]
    found = columns(document, f"{moment}-segments", "blocks")
    for name in ("row", "left", "right", "nbytes", "buffers"):
        assert found[name] == [getattr(one, name) for one in want.blocks]
    assert len(found["left"]) == (10 if moment == "peak" else 5)
    figure = document.select_one({"name": f"{moment}-segments"})
    assert figure is not None
    # No formulas, whatever a pool is called.
    labels = figure.yaxis[0].major_label_overrides
    assert [labels[at].text for at in range(len(want.rows))] == [f"mine {one.nbytes >> 20} MiB" for one in want.rows]
    assert {type(label) for label in labels.values()} == {PlainText}


def test_what_is_held_in_part_is_pale() -> None:
    """By how much of it is held, down to what can just be seen; of several tags that of most is named."""
    row = Row(pool="mine", address=0, nbytes=1000, since=0.0, live=115, largest_hole=400)
    blocks = (Block(0, 0, 100, "a", 1, 1, 100), Block(0, 100, 200, None, 4, 9, 40), Block(0, 600, 700, "b", 2, 2, 5))
    drawn = draw_memory_map(
        "map", MemoryMap(time=0.0, rows=(row,), blocks=blocks, left_out=0, left_out_bytes=0), TagColours(())
    )
    data = drawn.select_one({"name": "blocks"}).data_source.data
    assert data["opacity"].tolist() == [1.0, 0.4, 0.25]
    assert data["tag"] == ["a", "no tag and 3 others", "b and 1 other"]


@pytest.mark.parametrize("name", ["peak", "leaks", "waits"])
def test_icicles_are_drawn_by_value(records: Records, document: Document, name: str) -> None:
    """Boxes as wide as bytes, or as milliseconds waited; each with its line, and a label where it has room."""
    draw = {"peak": pictures.at_the_peak, "leaks": pictures.leaked, "waits": pictures.waited}[name]
    want = draw(records)
    factor = 1e3 if name == "waits" else 1
    found = columns(document, name, "cells")
    assert found["left"] == pytest.approx([one.left * factor for one in want.cells])
    assert found["right"] == pytest.approx([one.right * factor for one in want.cells])
    assert found["top"] == [one.depth for one in want.cells]
    assert found["line"] == [one.name for one in want.cells]
    widest = max(range(len(want.cells)), key=lambda at: want.cells[at].right - want.cells[at].left)
    site = want.cells[widest].site
    assert site is not None
    assert found["label"][widest].startswith(site.function[:10])
    assert found["share"][widest] == format_share((want.cells[widest].right - want.cells[widest].left) / want.total)


def test_the_page_says_what_pictures_come_to(records: Records, page: str) -> None:
    """Above all of it the summary that a terminal has, and a sentence above each."""
    assert f"<pre>{html.escape(summarize(records))}</pre>" in page
    assert f"<title>{html.escape(HOSTILE)}</title>" in page
    assert "16 MiB live at the peak, after" in page
    assert "the largest hole" in page
    assert "7 MiB in 5 buffers never freed." in page or "6 MiB in 5 buffers never freed." in page


def test_names_stay_names_and_nothing_is_fetched(page: str) -> None:
    """Markup in a tag is text; the page has no address that a browser would load."""
    assert "<script>alert" not in page
    assert "<img" not in page
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)
    assert tags
    assert not [one for one in tags if "src=" in one or "href=" in one]
    assert "@import" not in page
    assert len(page) < 3 * MIB


def test_what_is_not_there_is_said() -> None:
    """Instead of an empty picture."""
    with AsyncMemoryPool("simulated", segments="paged") as pool, Recording(pool) as recording:
        pool.allocate(1000).free()
    page = pictures.page(recording.records())
    assert page.count("There were none then. Memory by pages never has any.") == 2
    assert "All that was allocated was freed." in page
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        pass
    page = pictures.page(recording.records())
    for sentence in ("Nothing was recorded.", "Nobody waited.", "Nothing was live."):
        assert sentence in page
    assert len(page) < 10_000


def test_a_notebook_shows_the_page_in_a_frame(records: Records) -> None:
    """Records and profiles; the summary is there for who shows no pictures."""
    with AsyncMemoryPool("simulated") as pool:
        profile = profile_memory(pool)
        assert profile._repr_mimebundle_() == {"text/plain": repr(profile)}
        with profile:
            pool.allocate(1000).free()
        for shown, those in ((records, records), (profile, profile.records())):
            found = shown._repr_mimebundle_(include=None, exclude=None)
            assert found["text/plain"] == summarize(those)
            inner = re.fullmatch(r'<iframe srcdoc="([^"]*)"[^<]*></iframe>', found["text/html"])
            assert inner
            live = columns(document_of(html.unescape(inner[1])), "timeline", "live")["live"]
            assert max(live) == those.peak().nbytes


def test_without_bokeh_a_notebook_has_text_and_a_page_says_what_to_install(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the extra."""
    monkeypatch.setattr("asyncmem.insight.needs.find_spec", lambda _: None)
    assert records._repr_mimebundle_() == {"text/plain": summarize(records)}
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'asyncmem[pictures]'")):
        pictures.page(records)
