"""`asyncmem replay`: recordings in, figures out."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from asyncmem.replay import Op, Trace, fit, read

Invoke = Callable[..., Result]

TRACES = Path(__file__).parents[1] / "traces"
GNN, STREAMS = str(TRACES / "gnn_sampled.npz"), str(TRACES / "four_streams.npz")
MIB = 1 << 20

NUMBERS = {
    "peak_requested",
    "peak_active",
    "peak_reserved",
    "driver_calls",
    "waits",
    "largest_hole",
}
REALS = {"reserved_over_requested", "driver_ms", "wait_ms", "recorded_ms", "ns_per_op", "fragmentation"}


def figures(invoke: Invoke, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run the command for its JSON."""
    result = invoke("replay", *arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def test_the_table_has_a_line_a_program(invoke: Invoke) -> None:
    """Each with its name and its ratio."""
    result = invoke("replay", GNN, STREAMS, "--lag", "20ms")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == ["program", "gnn_sampled", "four_streams"]
    assert "1.03" in lines[1]


def test_json_is_one_array_of_flat_figures(invoke: Invoke) -> None:
    """An object a file, with all that the table says and more, in the order of the files."""
    found = figures(invoke, GNN, STREAMS)
    assert [one["file"] for one in found] == [GNN, STREAMS]
    for one in found:
        assert all(isinstance(one[name], int) for name in NUMBERS)
        assert all(isinstance(one[name], float) for name in REALS)
        assert set(one) - NUMBERS - REALS == {
            "file",
            "policy",
            "limit",
            "completed",
            "driver_calls_by_name",
            "stranded_by_stream",
        }
        assert sum(one["driver_calls_by_name"].values()) == one["driver_calls"]
        assert one["peak_reserved"] / one["peak_requested"] == one["reserved_over_requested"]
    assert len(found[1]["stranded_by_stream"]) == read(STREAMS).streams


def test_policies_are_compared(invoke: Invoke) -> None:
    """Each has its figures, under the text that was given."""
    found = figures(invoke, GNN, "--policy", "virtual", "--policy", "stream_ordered,segment_size=256MiB")
    assert [one["policy"] for one in found] == ["virtual", "stream_ordered,segment_size=256MiB"]
    assert found[0]["peak_reserved"] < found[1]["peak_reserved"]


def test_a_limit_may_be_relative(invoke: Invoke) -> None:
    """A multiple of what each program needs, or a size."""
    (one,) = figures(invoke, GNN, "--limit", "1.02x", "--lag", "20ms")
    assert one["limit"] == int(one["peak_requested"] * 1.02)
    assert one["peak_reserved"] <= one["limit"]
    assert one["wait_ms"] > 0
    (one,) = figures(invoke, GNN, "--limit", "40GiB")
    assert one["limit"] == 40 << 30


def test_what_does_not_fit_is_said(invoke: Invoke) -> None:
    """It exits with 1, and says which row asked for how much."""
    result = invoke("replay", GNN, "--limit", "1 GiB")
    assert result.exit_code == 1
    assert "out of memory under 1 GiB: row " in result.output
    (one,) = figures(invoke, GNN, "--limit", "1 GiB", code=1)
    assert one["completed"] is False


def test_the_smallest_limit_is_found(invoke: Invoke) -> None:
    """As a multiple of what was requested."""
    (one,) = figures(invoke, GNN, "--fit")
    assert one["fit_over_requested"] == fit(read(GNN)) / one["peak_requested"]
    assert "1.00" in invoke("replay", GNN, "--fit").output


def test_patience_is_passed_on(invoke: Invoke) -> None:
    """As a share or as a time, for all policies at once."""
    (one,) = figures(invoke, GNN, "--lag", "20ms", "--patience", "2%")
    assert 0 < one["wait_ms"] <= 0.02 * one["recorded_ms"]
    (one,) = figures(invoke, GNN, "--lag", "20ms", "--patience", "1s")
    assert one["waits"] > 0


def test_costs_and_pace_are_passed_on(invoke: Invoke, tmp_path: Path) -> None:
    """Another driver's costs, and another program's speed."""
    costs = tmp_path / "costs.json"
    costs.write_text('{"cuMemCreate": [[0, 1000000]]}')
    (one,) = figures(invoke, GNN, "--costs", str(costs), "--pace", "2")
    assert one["driver_ms"] >= one["driver_calls_by_name"]["cuMemCreate"]
    assert one["recorded_ms"] == pytest.approx(2000 * read(GNN).duration)


def test_a_plot_is_written(invoke: Invoke, tmp_path: Path) -> None:
    """One page for all that was replayed."""
    path = tmp_path / "out.html"
    result = invoke("replay", GNN, STREAMS, "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_text(encoding="utf-8").count("<svg") == 2


def test_a_device_of_several_is_chosen(invoke: Invoke, tmp_path: Path) -> None:
    """A snapshot of two devices needs to be told which."""
    entry = {"action": "alloc", "addr": 1 << 30, "size": 512, "stream": 0, "time_us": 1, "frames": []}
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry], [entry, entry | {"addr": 1 << 31}]]}))
    assert invoke("replay", str(path)).exit_code == 2
    (one,) = figures(invoke, str(path), "--of", "1")
    assert one["peak_requested"] == 1024


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "paged"],
        ["--policy", "virtual,timeout=3"],
        ["--limit", "much"],
        ["--limit", "x"],
        ["--limit", "0x"],
        ["--limit", "nanx"],
        ["--lag", "soon"],
        ["--patience", "much"],
        ["--pace", "-1"],
        ["--costs", GNN],
        ["--of", "3"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_a_usage_error(invoke: Invoke, arguments: list[str]) -> None:
    """It exits with 2, with a sentence and without a traceback."""
    result = invoke("replay", GNN, *arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04.", b"{", b"hello", b"\x80\x04cos\nsystem\n."])
def test_a_broken_file_is_named(invoke: Invoke, tmp_path: Path, content: bytes) -> None:
    """Whatever is in it, it is refused by name, and nothing of it is run."""
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    result = invoke("replay", str(path))
    assert result.exit_code == 2
    assert "broken.npz" in result.output
    assert "Traceback" not in result.output


def test_no_file_is_a_usage_error(invoke: Invoke) -> None:
    """Something must be replayed."""
    assert invoke("replay").exit_code == 2
    assert invoke("replay", "nowhere.npz").exit_code == 2


def test_an_empty_recording_has_figures(invoke: Invoke, tmp_path: Path) -> None:
    """Nothing was needed, and nothing was reserved."""
    path = tmp_path / "empty.npz"
    empty = np.array([], np.int64)
    Trace(empty, empty, empty, empty, empty).save(path)
    (one,) = figures(invoke, str(path), "--fit")
    assert (one["peak_reserved"], one["reserved_over_requested"], one["fit_over_requested"]) == (0, 1.0, 1.0)
    assert invoke("replay", str(path)).exit_code == 0


def test_huge_requests_do_not_hurt(invoke: Invoke, tmp_path: Path) -> None:
    """A hundred TiB are as good a number as any, and more than there are addresses for do not fit."""
    path = tmp_path / "huge.npz"
    rows = np.array([(Op.ALLOCATE, 0, 0, 100 << 40, 0)])
    Trace(*rows.T).save(path)
    (one,) = figures(invoke, str(path))
    assert one["peak_reserved"] == 100 << 40
