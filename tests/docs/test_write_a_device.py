"""The device that the page builds keeps the contract, a broken one does not, and pools know it by its name."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-device.md").read_text(encoding="utf-8")


def files() -> dict[str, str]:
    """The files that the page shows, put together from their pieces."""
    found: dict[str, str] = {}
    for name, code in re.findall(r"^```py\n# ([\w.]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        found[name] = f"{found[name]}\n\n{code}" if name in found else code
    return found


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=alone, capture_output=True, text=True, check=False, timeout=100
    )


def contract(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the contract's tests as an author does, with no plugin."""
    return run(folder, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *options, "test_toy.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page shows, in files."""
    for name, code in files().items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_the_device_keeps_the_contract(folder: Path) -> None:
    """All of it."""
    done = contract(folder)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert passed
    assert int(passed[1]) >= 45


@pytest.mark.parametrize(
    ("right", "wrong", "broken"),
    [
        ("self._callbacks.remove(callback)", "pass", "test_forgetting_drops_the_callback_and_what_it_holds"),
        ("queue.record() for queue in self._queues", "self.default_stream.record()", "test_record_all_covers_every"),
        ("memset(address, value, nbytes)", "memset(address, value, nbytes + 1)", "test_fill_sets_exactly_its_range"),
    ],
)
def test_a_device_that_breaks_a_promise_is_caught(folder: Path, right: str, wrong: str, broken: str) -> None:
    """By the test that is named for it."""
    code = (folder / "toy.py").read_text(encoding="utf-8")
    assert code.count(right) == 1
    (folder / "toy.py").write_text(code.replace(right, wrong), encoding="utf-8")
    done = contract(folder, "-k", broken)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"^FAILED test_toy\.py::TestToy::{broken}", done.stdout, re.MULTILINE), done.stdout


def test_a_pool_finds_it_by_the_entry_point(folder: Path) -> None:
    """As the page's lines for its pyproject.toml say."""
    project = next(tomllib.loads(text) for text in re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    offers = project["project"]["entry-points"]["asyncmem.devices"]
    info = folder / "toy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in offers.items())
    (info / "entry_points.txt").write_text(f"[asyncmem.devices]\n{lines}\n")
    code = "import sys; sys.path.insert(0, '.'); import runpy; runpy.run_path('use_toy.py', run_name='__main__')"
    done = run(folder, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "toy:0" in done.stdout
