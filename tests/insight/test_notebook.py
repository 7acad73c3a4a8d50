"""What a notebook shows, run by a kernel of Jupyter's."""

import html
import json
import re
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import asyncmem
from asyncmem.insight import reports

pytestmark = pytest.mark.may_block  # the client waits for the kernel

CELLS = [
    """%load_ext asyncmem
import asyncmem
pool = asyncmem.AsyncMemoryPool("host", name="cells", limit="64 MiB")
pool""",
    """%%asyncmem
import asyncio
text = '''two
lines'''
async with pool.allocate_async("8 MiB", tag="weights"):
    await asyncio.sleep(0)
    !true
text""",
    "%%asyncmem --frames 4\npool.allocate('1 MiB', tag='before the error').free()\n1 / 0",
    "%%asyncmem --lines\npool.allocate('1 MiB').free()",
    """%reload_ext asyncmem
with asyncmem.profile_memory(pool) as profile:
    pool.allocate('512 KiB', tag='profiled').free()
profile""",
    "pool",
    """from asyncmem.insight import reports
for report in (reports.summary, reports.stats, reports.table, reports.waits, reports.leaks, reports.tree,
               reports.timeline, reports.segments):
    display(report(profile.records()))""",
]


@pytest.fixture(scope="module")
def outputs() -> list[list[Any]]:
    """What each cell shows."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=60).execute()
    return [cell.outputs for cell in notebook.cells]


def drawn(output: Any) -> dict[str, Any]:
    """The figures of a page in a frame."""
    inner = re.fullmatch(r'<iframe srcdoc="([^"]*)"[^<]*></iframe>', output["data"]["text/html"])
    assert inner
    found = re.search(r'id="data">(.*?)</script>', html.unescape(inner[1]), re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_cell_is_recorded_and_shown_below_its_result(outputs: list[list[Any]]) -> None:
    """`%%asyncmem` leaves a cell what it is: it may await, use magics and have a result; then come the pictures."""
    *_, result, shown = outputs[1]
    assert result["data"]["text/plain"] == r"'two\nlines'"
    assert max(drawn(shown)["timeline"]["live"]) == 8 << 20
    assert [band["name"] for band in drawn(shown)["timeline"]["bands"]] == ["weights"]
    assert "8 MiB" in shown["data"]["text/plain"]


def test_a_cell_that_fails_is_shown_all_the_same(outputs: list[list[Any]]) -> None:
    """The recording ends with the cell, however that ends; the next one begins anew."""
    failed, shown = outputs[2]
    assert failed["ename"] == "ZeroDivisionError"
    assert [band["name"] for band in drawn(shown)["timeline"]["bands"]] == ["before the error"]


def test_an_argument_that_is_none_is_refused_by_name(outputs: list[list[Any]]) -> None:
    """A wrong argument ends the cell before it has done anything, and records nothing."""
    (refused,) = outputs[3]
    assert "--lines" in "".join(refused.get("traceback", [refused.get("text", "")]))


def test_pools_and_profiles_are_shown(outputs: list[list[Any]]) -> None:
    """A pool is shown by its figures, a profile by its pictures."""
    assert "cells" in outputs[0][-1]["data"]["text/html"]
    assert [band["name"] for band in drawn(outputs[4][-1])["timeline"]["bands"]] == ["profiled"]
    assert "64 MiB" in outputs[5][-1]["data"]["text/html"]


def test_reports_are_shown_as_pictures(outputs: list[list[Any]]) -> None:
    """Each report has bars for its lines, or a drawing made of text; its line of text is there without them."""
    shown = [output["data"] for output in outputs[6]]
    assert all(data["text/plain"] for data in shown)
    summary, stats, table, waits, leaks, tree, timeline, segments = (data["text/html"] for data in shown)
    for picture in (summary, stats, table, tree):
        assert "width: 100.0%" in picture
        assert "512 KiB" in picture
    assert "0 waits" in waits
    assert "0 B in 0 buffers never freed" in leaks
    assert "\u2581" in timeline  # an eighth of a line: little of the limit
    assert re.search(r" in 1 segment after .*\n\u2588*\u2591?\u00b7+  \d+ MiB of cells", segments)


def test_a_report_shows_names_and_not_markup() -> None:
    """What a name has of HTML or of control characters is shown as such."""
    with asyncmem.AsyncMemoryPool("host", limit="64 MiB") as pool, asyncmem.profile_memory(pool) as profile:
        for number in range(40):
            pool.allocate(4096, tag=f"<b>{number}\x1b[31m").free()
    found = reports.table(profile.records(), by="tag")._repr_html_()
    assert "&lt;b&gt;" in found
    assert not re.search(r"<b>|\x1b", found)
    assert "and 10 more" in found
