"""What the bare scheduler is told is enough to make it decide the same again."""

import json
from pathlib import Path

import pytest

from asyncmem.replay import Journal

from .world import World

EACH = 20


def journal_of(seed: int, folder: Path) -> Journal:
    """Play a storm, and write its journal to a file."""
    world = World(seed, journal=True).run()
    path = folder / f"{seed}.jsonl"
    heading = {"journal": 1, "asyncmem": "0", "pool": str(seed), "device": "none"}
    path.write_bytes(json.dumps(heading).encode() + b"\n" + b"".join(iter(world.heap.read_journal, b"")))
    return Journal(path)


@pytest.mark.parametrize("first", range(0, 3 * EACH, EACH))
def test_a_storm_that_is_replayed_has_the_same_effects(first: int, tmp_path: Path) -> None:
    """Of growth, failing devices, budgets, leases, pages, deadlocks and closing alike, in the same order."""
    for seed in range(first, first + EACH):
        assert journal_of(seed, tmp_path).replay() is None


def test_another_rule_is_noticed_where_it_first_decides_otherwise(tmp_path: Path) -> None:
    """Strict order instead of passing: the difference names the call, what came of it then, and what comes now."""
    found = [journal_of(seed, tmp_path).replay(bypass=0) for seed in range(EACH)]
    differences = [one for one in found if one is not None]
    assert differences
    for one in differences:
        assert one.expected != one.got
        assert f"row {one.row}" in str(one)
    assert any("granted" in " ".join(one.expected) for one in differences)


def test_without_a_journal_nothing_is_written() -> None:
    """A heap writes where it was made with one."""
    assert World(0).run().heap.read_journal() == b""
