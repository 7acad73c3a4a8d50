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


def test_the_page_goes_beside_the_recording_or_where_it_is_told_to(invoke: Invoke, recorded: Path) -> None:
    """And its name is said; the page is that of the function."""
    result = invoke("report", str(recorded))
    assert result.exit_code == 0, result.output
    path = recorded.with_suffix(".html")
    assert result.stdout.startswith(f"{path} written, ")
    page = path.read_text(encoding="utf-8")
    assert page == pictures.page(read(recorded), "mine.amem")
    other = recorded.with_name("other")
    assert invoke("report", str(recorded), "-o", str(other)).exit_code == 0
    assert other.read_text(encoding="utf-8") == page


def test_a_file_that_exists_is_kept(invoke: Invoke, recorded: Path) -> None:
    """Unless it is said that it need not be."""
    path = recorded.with_suffix(".html")
    path.write_bytes(b"precious")
    refused = invoke("report", str(recorded))
    assert refused.exit_code == 2
    assert "exists: --force overwrites it, -o names another" in refused.output
    assert "Invalid value" not in refused.output, "-o was not given"
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
    """Where, how much, what is missing in the records, and the figures that the page draws."""
    path = recorded.with_suffix(".html")
    found = json.loads(invoke("report", str(recorded), "--json").stdout)
    about = {name: found.pop(name) for name in ("note", "lost", "output", "nbytes")}
    assert about == {"note": "", "lost": 0, "output": str(path), "nbytes": path.stat().st_size}
    assert set(found) == {"summary", "timeline", "segments", "tree", "waits", "leaks"}
    assert found["summary"]["peak"] == found["tree"]["nbytes"] == 1 << 20


def test_a_dash_is_standard_output(invoke: Invoke, recorded: Path) -> None:
    """For every command that writes a file; then nothing else is on it, and no file is made."""
    before = set(recorded.parent.iterdir())
    page = invoke("report", str(recorded), "-o", "-")
    assert page.stdout.startswith("<!doctype html>")
    assert page.stdout.rstrip().endswith("</html>")
    assert json.loads(invoke("export", str(recorded), "--to", "json", "-o", "-").stdout)
    assert json.loads(invoke("plan", str(recorded), "-o", "-").stdout)["places"]
    drawn = invoke("replay", str(recorded), "--plot", "-")
    assert drawn.stdout.count("<svg") == 1
    assert drawn.stdout.startswith("<!doctype html>")
    for twice in (["report", "-o", "-"], ["plan", "-o", "-"], ["replay", "--plot", "-"]):
        refused = invoke(*twice, str(recorded), "--json")
        assert refused.exit_code == 2
        assert "both write to standard output" in refused.output
    assert set(recorded.parent.iterdir()) == before


def test_a_recording_is_not_overwritten_by_what_is_made_of_it(invoke: Invoke, recorded: Path) -> None:
    """Even where overwriting is allowed."""
    content = recorded.read_bytes()
    for command in (["report"], ["plan"], ["export", "--to", "csv"]):
        refused = invoke(*command, str(recorded), "-o", str(recorded), "--force")
        assert refused.exit_code == 2
        assert "choose another name" in refused.output
    assert recorded.read_bytes() == content
