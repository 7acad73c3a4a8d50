"""`asyncmem plan`: the plan of a recorded step, that a pool then serves by."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from asyncmem import AsyncMemoryPool
from asyncmem.cli import exports
from asyncmem.insight import Recording, read, read_plan
from asyncmem.insight.amem import MAGIC, VERSION, End, Heading, pack

Invoke = Callable[..., Result]

MIB = 1 << 20


def step(pool: AsyncMemoryPool) -> None:
    attended = pool.allocate(96 * MIB, tag="attended")
    pool.allocate(64 * MIB, tag="embedded").free()
    pool.allocate(32 * MIB, tag="logits").free()
    attended.free()


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two pools, of which one has done two steps, the first of them beside what is never freed."""
    path = tmp_path / "two.amem"
    with AsyncMemoryPool("simulated", name="mine") as pool, AsyncMemoryPool("simulated", name="other") as other:
        with Recording(pool, other, file=path):
            kept = pool.allocate(8 * MIB)
            step(pool)
            step(pool)
            other.allocate(5).free()
        kept.free()
    return path


def test_a_step_is_planned_and_served(invoke: Invoke, recorded: Path, tmp_path: Path) -> None:
    """In what is live at most; the file has the plan, by whose names a pool serves the step."""
    second = [one.time for one in read(recorded).in_pool("mine") if one.tag == "attended"][2]
    plan = tmp_path / "plan.json"
    result = invoke("plan", str(recorded), "--pool", "mine", "--since", f"{second}s", "-o", str(plan))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 buffers of 192 MiB in 160 MiB, 0% above the 160 MiB that are live at most\n")
    assert "  one of 64 MiB for 2 buffers: embedded, logits\n" in result.stdout
    found = read_plan(plan)
    assert [(one.key, one.nbytes) for one in found.places] == [
        ("attended", 96 * MIB), ("embedded", 64 * MIB), ("logits", 32 * MIB),
    ]  # fmt: skip
    with AsyncMemoryPool("simulated") as pool, pool.apply_plan(found, strict=True) as memory:
        for one in found.places:
            memory.allocate(key=one.key).free()
        assert memory.use == (3, 0, 0)


def test_figures_are_those_of_the_plan(invoke: Invoke, recorded: Path) -> None:
    """As JSON, of all that was recorded where no time is given."""
    result = invoke("plan", str(recorded), "--pool", "mine", "--json")
    found = json.loads(result.stdout)
    assert (found["pool"], found["buffers"], found["output"]) == ("mine", 7, None)
    assert (found["total"], found["most_live"]) == (392 * MIB, 168 * MIB)
    assert found["most_live"] <= found["peak"] <= found["most_reserved"]
    assert sum(one["saved"] for one in found["shared"]) > 0


def test_it_says_what_takes_so_long(invoke: Invoke, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what to do about it, where there are very many buffers."""
    ask = ("plan", str(recorded), "--pool", "mine")
    assert not invoke(*ask).stderr
    monkeypatch.setattr(exports, "_MANY", 6)
    assert "7 buffers take a while" in invoke(*ask).stderr


def test_which_pool_must_be_said(invoke: Invoke, recorded: Path) -> None:
    """Where there are several; they are named."""
    for arguments in ([], ["--pool", "nobody"]):
        result = invoke("plan", str(recorded), *arguments)
        assert result.exit_code == 2
        assert "mine, other" in result.output
    assert invoke("plan", str(recorded), "--pool", "other").exit_code == 0


def test_a_recording_without_a_pool_has_no_plan(invoke: Invoke, tmp_path: Path) -> None:
    """Which is said, and no traceback shown."""
    heading = Heading(
        version=VERSION, began=0, wall=0.0, frames=1, program=[], process=1, python="3.11.0", asyncmem="0.1.0"
    )
    path = tmp_path / "none.amem"
    path.write_bytes(MAGIC + pack(heading) + pack(End(time=1)))
    result = invoke("plan", str(path))
    assert result.exit_code == 1
    assert "has no pool" in result.output


def test_nothing_is_written_over(invoke: Invoke, recorded: Path, tmp_path: Path) -> None:
    """Unless that is said."""
    plan = tmp_path / "plan.json"
    plan.write_text("precious")
    ask = ("plan", str(recorded), "--pool", "other", "-o", str(plan))
    refused = invoke(*ask)
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert plan.read_text() == "precious"
    assert invoke(*ask, "--force").exit_code == 0
    assert len(read_plan(plan).places) == 1


def test_times_in_which_nothing_happened_have_nothing_to_place(invoke: Invoke, recorded: Path) -> None:
    """And that is no failure; times that are not in the recording are refused."""
    end = f"{read(recorded).duration:.9f}s"
    result = invoke("plan", str(recorded), "--pool", "mine", "--since", end)
    assert result.exit_code == 0
    assert result.stdout.startswith("nothing to place\n")
    for times in (["--since", "1h"], ["--until", "1h"], ["--since", end, "--until", "1us"]):
        refused = invoke("plan", str(recorded), "--pool", "mine", *times)
        assert refused.exit_code == 2
        assert times[-2] in refused.output
