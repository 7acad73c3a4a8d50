"""A plan comes out of a file as it went in, and what is no plan is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncmem import InvalidRequest
from asyncmem.insight import LifetimeAnalyzer, PlannedPlace, read_plan, write_plan
from asyncmem.pool import ReusePlan

PLAN = ReusePlan((PlannedPlace('ä "b"\n', 1000, 0, 3, 0), PlannedPlace(None, 512, 1, 2, 1024)), 512)


@pytest.mark.parametrize("plan", [PLAN, ReusePlan(()), LifetimeAnalyzer().compute_reuse_plan(align=4096)])
def test_plan_is_read_as_it_was_written(plan: ReusePlan, tmp_path: Path) -> None:
    """With all its names, also where it has no places; what was in the file before is gone."""
    file = tmp_path / "plan.json"
    file.write_text("before" * 1000)
    write_plan(plan, file)
    assert read_plan(file) == plan


def spoiled(change: Callable[[dict[str, Any]], object]) -> bytes:
    found = {"version": 1, "align": PLAN.align, "places": [place._asdict() for place in PLAN.places]}
    change(found)
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        spoiled(lambda plan: plan.update(version=2)),
        spoiled(lambda plan: plan.update(places={})),
        spoiled(lambda plan: plan.update(align=None)),
        spoiled(lambda plan: plan["places"].append([])),
        spoiled(lambda plan: plan["places"][0].update(offset=None)),
        spoiled(lambda plan: plan["places"][0].update(offset=True)),
        spoiled(lambda plan: plan["places"][0].update(nbytes=1 << 70)),
        spoiled(lambda plan: plan["places"][0].update(key=5)),
        spoiled(lambda plan: plan["places"][0].pop("key")),
        spoiled(lambda plan: plan["places"][1].update(offset=512)),
    ],
)
def test_what_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    """Other files, later versions, numbers that are none or too large, and places in each other's way."""
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(InvalidRequest):
        read_plan(file)
