"""Costs of driver calls come from a file, and a file that is wrong is refused by name."""

import json
from pathlib import Path

import pytest

from asyncmem import InvalidRequest
from asyncmem.replay import Model, Policy, read_costs, replay
from asyncmem.replay.model import H200

from .programs import MIB, Program


def write(folder: Path, text: str) -> Path:
    """Make a file of costs."""
    path = folder / "costs.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_replaces_what_it_names(tmp_path: Path) -> None:
    """The calls that it names cost what it says, all others what they cost on an H200."""
    costs = read_costs(write(tmp_path, json.dumps({"cuMemMap": [[0, 5], [1024, 7.5]]})))
    assert costs["cuMemMap"] == ((0, 5.0), (1024, 7.5))
    assert {**costs, "cuMemMap": H200["cuMemMap"]} == dict(H200)


@pytest.mark.parametrize(
    ("mib", "us"), [(1, 10.0), (2, 10.0), (4, 20.0), (6, 50.0), (8, 80.0), (16, 200.0)], ids=lambda one: f"{one}"
)
def test_costs_lie_on_straight_lines(mib: int, us: float) -> None:
    """Below the first point as there, between points on a line, and beyond the last on that line's continuation."""
    curve = ((2 * MIB, 10_000.0), (4 * MIB, 20_000.0), (8 * MIB, 80_000.0))
    one = replay(Program().take("a", mib * MIB).trace(), Policy("direct"), Model(costs={"cuMemAlloc": curve}))
    assert one.driver_seconds * 1e6 == pytest.approx(us)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"cuMemMapp": [[0, 1]]}',
        '{"cuMemMap": []}',
        '{"cuMemMap": 5}',
        '{"cuMemMap": "5"}',
        '{"cuMemMap": [[0, 1], [0, 2]]}',
        '{"cuMemMap": [[2, 1], [1, 2]]}',
        '{"cuMemMap": [[0, -1]]}',
        '{"cuMemMap": [[0, NaN]]}',
        '{"cuMemMap": [[0, Infinity]]}',
        '{"cuMemMap": [[0, true]]}',
        '{"cuMemMap": [[0.5, 1]]}',
        '{"cuMemMap": [[-1, 1]]}',
        '{"cuMemMap": [[1e400, 1]]}',
        '{"cuMemMap": [[0, 1, 2]]}',
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    """Whatever is in it, the answer is a sentence about costs."""
    with pytest.raises(InvalidRequest, match=r"^costs"):
        read_costs(write(tmp_path, text))
