"""The page: each picture has the columns of its records by value, and the page loads nothing."""

import asyncio
import html
import json
import os
import platform
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, OutOfMemoryError, PoolTimeout, profile_memory, tag
from asyncmem.core import Kind
from asyncmem.insight import Recording, Records, pictures, reports
from asyncmem.insight.reports.segments import memory_map
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.reports.timeline import live_by_tag, marks
from asyncmem.text import printable

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


def data_of(page: str) -> dict[str, Any]:
    """What the page gives to its script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def data(page: str) -> dict[str, Any]:
    return data_of(page)


def test_the_timeline_has_its_columns_by_value(records: Records, data: dict[str, Any]) -> None:
    """Live and reserved bytes, the limit, and a band for each tag, each in a colour of its own."""
    want, found = live_by_tag(records), data["timeline"]
    assert found["times"] == want.times.tolist()
    assert found["live"] == want.live.tolist()
    assert found["reserved"] == want.reserved.tolist()
    assert found["reservedTimes"] == want.reserved_times.tolist()
    assert (found["limit"], found["peak"]) == (32 * MIB, records.peak().time)
    assert [(one["name"], one["bytes"]) for one in found["bands"]] == [
        (printable(band.name), band.nbytes.tolist()) for band in want.bands
    ]
    assert {one["name"] for one in found["bands"]} == {"weights", "no tag", HOSTILE}
    assert len({one["colour"] for one in found["bands"]}) == 3


def test_marks_have_their_columns_by_value(records: Records, data: dict[str, Any]) -> None:
    """Growth, trims, waits, refusals."""
    kinds = {
        "grew": records.grown(), "gave back": records.of(Kind.TRIMMED), "waited": records.of(Kind.WAITED),
        "refused": records.of(Kind.OUT_OF_MEMORY),
    }  # fmt: skip
    assert [one["name"] for one in data["marks"]] == list(kinds)
    for found, some in zip(data["marks"], kinds.values(), strict=True):
        assert found["starts"]
        assert {name: found[name] for name in found if name != "name"} == {
            name: column.tolist() for name, column in marks(some)._asdict().items()
        }


def test_colours_mean_the_same_in_all_pictures(data: dict[str, Any]) -> None:
    """Those of tags in the timeline, the map, the table of leaks and the waits."""
    colours = {one["name"]: one["colour"] for one in data["timeline"]["bands"]}
    blocks = [one for shown in data["maps"] for one in shown["blocks"]]
    assert blocks
    assert all(colours[name] == colour for *_, name, colour in blocks)
    tags = [tag for row in data["leaks"]["rows"] for tag in row[3]]
    assert tags
    assert all(colours[name] == colour for name, colour in tags)
    assert all(colours[name] == colour for colour, name, *_ in data["waits"]["tags"])


def test_the_maps_have_their_blocks_by_value(records: Records, data: dict[str, Any]) -> None:
    """At the peak and at the end: a row for each segment, a block for each buffer."""
    for found, time, count in zip(data["maps"], (None, records.duration), (10, 5), strict=True):
        want = memory_map(records, time)
        assert [row[2:] for row in found["rows"]] == [
            [one.nbytes, one.since, one.live, one.largest_hole] for one in want.rows
        ]
        assert [one[:5] for one in found["blocks"]] == [
            [one.row, one.left, one.right, one.nbytes, one.buffers] for one in want.blocks
        ]
        assert len(found["blocks"]) == count
        assert "the largest hole" in found["said"]


def test_header_and_cards_say_what_was_recorded(records: Records, data: dict[str, Any]) -> None:
    """Command, date, host, versions, pools with their limit; peak, limit, waited, leaked."""
    facts = dict(data["facts"])
    assert facts.keys() == {"Command", "Date", "Duration", "Host", "Versions", "Pool"}
    assert sys.executable in facts["Command"]
    assert facts["Host"] == f"{platform.node()}, process {os.getpid()}"
    assert facts["Versions"] == f"asyncmem {asyncmem.__version__}, Python {platform.python_version()}"
    assert facts["Pool"].startswith("mine on simulated:0, limit 32 MiB")
    cards = {one["name"]: one for one in data["cards"]}
    assert list(cards) == ["Peak", "Limit", "Waited", "Leaked"]
    assert cards["Peak"]["value"] == "16 MiB"
    assert cards["Peak"]["text"].startswith("50% of the limit, after ")
    assert cards["Limit"]["value"] == "32 MiB"
    assert "2 requests refused" in cards["Limit"]["text"] or "1 request refused" in cards["Limit"]["text"]
    leaks = reports.leaks(records)
    assert cards["Leaked"]["text"] == f"{leaks.buffers} buffers never freed"
    assert cards["Leaked"]["bad"]


def test_buffers_that_outlive_their_pool_are_named(tmp_path: Path) -> None:
    """In the report of leaks, its card and its table; those that were live when it closed and were freed are not."""
    with Recording(file=tmp_path / "run.amem") as recording, Recording() as ring, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with AsyncMemoryPool("simulated", name="closed") as pool:
            kept, late = pool.allocate("1 MiB"), pool.allocate("2 MiB")
        late.free()
        with AsyncMemoryPool("simulated", name="open") as other:
            held = other.allocate("3 MiB")
            found = [one.records() for one in (recording, ring)]
            held.free()
        kept.free()
    for records in found:
        (closed,) = records.of(Kind.CLOSED)
        assert (closed.pool, closed.nbytes) == ("closed", 3 * MIB)
        leaks = reports.leaks(records)
        assert {one.pools: (one.nbytes, one.outlived) for one in leaks.lines} == {
            ("closed",): (MIB, 1),
            ("open",): (3 * MIB, 0),
        }
        assert leaks.outlived == 1
        assert "1 buffer outlived the pool" in pictures.page(records)


def test_waits_have_tags_priorities_and_a_distribution() -> None:
    """Each wait counts once in each; priorities may be negative."""

    async def work() -> Records:
        async with AsyncMemoryPool("simulated", limit="16 MiB") as pool:
            held = await pool.allocate_async("16 MiB")
            with Recording(pool) as recording:
                for priority in (-3, 0, 7, 7):
                    with pytest.raises(PoolTimeout):
                        await pool.allocate_async("10 MiB", tag=f"tag {priority}", priority=priority, timeout=0.003)
            held.free()
            return recording.records()

    records = asyncio.run(work())
    assert [one.priority for one in records.of(Kind.WAITED)] == [-3, 0, 7, 7]
    assert {one.address for one in records.of(Kind.WAITED)} == {0}
    found = reports.waits(records)
    assert [(one.name, one.waits, one.given_up) for one in found.priorities] == [("7", 2, 2), ("0", 1, 1), ("-3", 1, 1)]
    assert {one.name: one.waits for one in found.tags} == {"tag 7": 2, "tag 0": 1, "tag -3": 1}
    assert sum(one.waits for one in found.classes) == 4
    below = [one.below for one in found.classes]
    assert below == sorted(below)
    assert all(one.below > 0.003 for one in found.classes)


def test_the_page_has_the_summary_of_a_terminal(records: Records, page: str) -> None:
    """Below the pictures, as text."""
    assert f"<pre>{html.escape(summarize(records))}</pre>" in page
    assert f"<title>{html.escape(printable(HOSTILE))}</title>" in page


def test_names_stay_names_and_nothing_is_fetched(page: str) -> None:
    """Markup in a tag is text; the page has no address that a browser would load."""
    assert "<script>alert" not in page
    assert "<img" not in page
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)
    assert tags
    assert not [one for one in tags if "src=" in one or "href=" in one]
    assert "@import" not in page
    assert "url(" not in page
    assert len(page) < MIB // 4


def test_a_notebook_shows_the_page_in_a_frame(records: Records) -> None:
    """Records and profiles; the summary is there where only text is shown."""
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
            assert max(data_of(html.unescape(inner[1]))["timeline"]["live"]) == those.peak().nbytes
