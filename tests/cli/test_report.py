"""`asyncmem report`: one page, where it is told to be, that is never written over by chance."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from asyncmem import AsyncMemoryPool
from asyncmem.insight import Recording, pictures, read

Invoke = Callable[..., Result]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "mine.amem"
    with AsyncMemoryPool("simulated", name="mine") as pool, Recording(pool, file=path):
        pool.allocate("1 MiB", tag="kept").free()
    return path


def body(page: str) -> str:
    """A page without what Bokeh draws anew each time: its own code, and the numbers of its objects."""
    return page[page.index("<h1>") : page.index('<section id="time">')]


def test_the_page_goes_beside_the_recording_or_where_it_is_told_to(invoke: Invoke, recorded: Path) -> None:
    """And its name is said; the page is that of the function."""
    result = invoke("report", str(recorded))
    assert result.exit_code == 0, result.output
    path = recorded.with_suffix(".html")
    assert result.stdout.startswith(f"{path} written, 1.")
    page = path.read_text(encoding="utf-8")
    assert body(page) == body(pictures.page(read(recorded), "mine.amem"))
    assert page.count("<section") == 6
    other = recorded.with_name("other")
    assert invoke("report", str(recorded), "-o", str(other)).exit_code == 0
    assert body(other.read_text(encoding="utf-8")) == body(page)


def test_a_file_that_exists_is_kept(invoke: Invoke, recorded: Path) -> None:
    """Unless it is said that it need not be."""
    path = recorded.with_suffix(".html")
    path.write_bytes(b"precious")
    refused = invoke("report", str(recorded))
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert path.read_bytes() == b"precious"
    assert invoke("report", str(recorded), "--force").exit_code == 0
    assert path.read_bytes().startswith(b"<!doctype html>")


def test_where_nothing_can_be_written_is_named(invoke: Invoke, recorded: Path, tmp_path: Path) -> None:
    """Without a traceback; a recording that cannot be read leaves no page."""
    nowhere = tmp_path / "nowhere" / "page.html"
    result = invoke("report", str(recorded), "-o", str(nowhere))
    assert result.exit_code == 1
    assert str(nowhere) in result.output
    assert "Traceback" not in result.output
    wrong = tmp_path / "wrong.amem"
    wrong.write_bytes(b"something else")
    assert invoke("report", str(wrong)).exit_code == 2
    assert not wrong.with_suffix(".html").exists()


def test_json_says_what_was_written(invoke: Invoke, recorded: Path) -> None:
    """Where, how much, and what is missing in the records."""
    path = recorded.with_suffix(".html")
    result = invoke("report", str(recorded), "--json")
    assert json.loads(result.stdout) == {
        "note": "", "lost": 0, "output": str(path), "nbytes": path.stat().st_size,
    }  # fmt: skip


def test_a_person_is_told_what_to_install(invoke: Invoke, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Bokeh is missing, before anything is read."""
    monkeypatch.setattr("asyncmem.insight.needs.find_spec", lambda _: None)
    result = invoke("report", str(recorded))
    assert result.exit_code == 1
    assert "pip install 'asyncmem[pictures]'" in result.output
