"""The viewer that PyTorch brings along takes asyncmem's snapshots: its texts have our figures, its pages our data."""

import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncmem import AsyncMemoryPool, OutOfMemoryError
from asyncmem.insight import Kind, Recording, read
from asyncmem.insight.exports.torch import write_torch

MIB = 1 << 20


@pytest.fixture(scope="module")
def viewer() -> Path:
    """The program, found without importing PyTorch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "cuda" / "_memory_viz.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording from the middle of a program with two pools, and its snapshot."""
    folder = tmp_path_factory.mktemp("snapshot")
    with (
        AsyncMemoryPool("simulated", name="first", segment_size="2 MiB") as pool,
        AsyncMemoryPool("simulated", name="second", limit="8 MiB") as other,
    ):
        held = [pool.allocate("1 MiB") for _ in range(3)]
        side = pool.device.create_stream()
        with Recording(pool, other, file=folder / "run.amem", frames=3):
            held += [pool.allocate(1000 * n, tag="named here", stream=side) for n in range(1, 40)]
            held[1].free()
            del held[5:30]
            kept = other.allocate("3 MiB")
            with pytest.raises(OutOfMemoryError):
                other.allocate("9 MiB")
        for one in (*held, kept):
            one.free()
    with (folder / "run.pickle").open("wb") as file:
        write_torch(read(folder / "run.amem"), file)
    return folder / "run.pickle"


def shown(viewer: Path, *arguments: object) -> str:
    command = [sys.executable, str(viewer), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stats_adds_up_what_is_there(viewer: Path, written: Path) -> None:
    """Segments, and bytes reserved and allocated in them; the viewer itself checks that they add up."""
    text = shown(viewer, "stats", written)
    found = pickle.loads(written.read_bytes())
    assert f"segments: {len(found['segments'])}\n" in text
    for word, key in (("total_reserved", "total_size"), ("total_allocated", "allocated_size")):
        total = sum(one[key] for one in found["segments"])
        assert f"{word}: {total / MIB:.1f}MiB\n" in text


def test_trace_tells_each_step(viewer: Path, written: Path) -> None:
    """A line for each allocation, both lines of each free, growth and refusals, for each device."""
    text = shown(viewer, "trace", written)
    records = read(written.with_suffix(".amem"))
    devices = re.split(r"Device \d+ -+\n", text)[1:]
    assert len(devices) == 2
    for device, name in zip(devices, ("first", "second"), strict=True):
        mine = records.in_pool(name)
        assert len(re.findall(r"^\w+ = \w+\[", device, re.MULTILINE)) == len(mine.of(Kind.ALLOCATED))
        assert device.count("\ndel ") == device.count("# free completed") == len(mine.of(Kind.FREED))
        assert device.count("raise OutOfMemoryError") == len(mine.of(Kind.OUT_OF_MEMORY))
        assert "MEM[" not in device, "each allocation lies in a segment"
    assert "raise OutOfMemoryError # 9.0MiB requested, 0.0B free" in devices[1]


@pytest.mark.parametrize("plot", ["trace_plot", "segment_plot"])
def test_plots_have_the_snapshot(viewer: Path, written: Path, plot: str) -> None:
    """A page is made, with the whole snapshot in it."""
    page = written.with_name(f"{plot}.html")
    shown(viewer, plot, written, "-o", page)
    text = page.read_text(encoding="utf-8")
    assert "<html>" in text.lower()
    assert len(text) > written.stat().st_size


def test_the_installed_pytorch_names_the_actions_that_are_written(viewer: Path, written: Path) -> None:
    """No entry is of a kind that the viewer does not know."""
    known = set(re.findall(r'e\["action"\] == "(\w+)"', viewer.read_text(encoding="utf-8")))
    found = pickle.loads(written.read_bytes())
    assert {one["action"] for entries in found["device_traces"] for one in entries} <= known
