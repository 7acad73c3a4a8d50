"""`asyncmem doctor` about ROCm: what can be used or why not, and that no such card has been tried."""

import json

import pytest
from click.testing import CliRunner

from asyncmem.cli import machine
from asyncmem.cli.app import commands
from tests.cuda.fake import FakeDriver

pytestmark = pytest.mark.fake_only


def test_a_card_is_told_with_what_it_has(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the child that the command starts; and that somebody who has one is the first."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake.path.parent))
    result = CliRunner().invoke(commands, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    card = next(one for one in found["devices"] if one["name"] == "rocm:0")
    assert (card["available"], card["total_bytes"]) == (True, 1 << 30)
    assert 0 < card["free_bytes"] <= card["total_bytes"]
    assert "never been run on AMD hardware" in card["detail"]


def test_a_card_that_cannot_be_used_says_why(fake: FakeDriver) -> None:
    """In the words of the error."""
    fake.fail("cuMemGetInfo", 1, 719)
    (one,) = machine.probe("rocm")
    assert (one.name, one.free_bytes) == ("rocm:0", None)
    assert "hipErrorLaunchFail" in one.detail
    fake.devices(0)
    assert "no GPU" in machine.probe("rocm")[0].detail


def test_without_hip_python_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child is started for that."""
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    assert "asyncmem[rocm]" in machine.find_devices("rocm")[0].detail
