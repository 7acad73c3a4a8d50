"""`asyncmem doctor` about cards: what can be used and why not, over the fake driver in a child process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncmem.cli.app import commands
from asyncmem.cli.doctor import diagnose
from asyncmem.cli.machine import NvidiaFindings as Findings

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

PROGRAM = """
import json, sys
sys.path.insert(0, {folder!r})
import fake as package
fake = package.FakeDriver({library!r})
{steer}
from asyncmem.cli import machine
print(json.dumps(machine.probe_nvidia()))
"""


def run(*arguments: str) -> str:
    """Run the command in this process, which asks the driver in another."""
    result = CliRunner().invoke(commands, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def findings_of(fake: FakeDriver, steer: str) -> Findings:
    """Return what the probe finds over the fake, in a process of its own, after `steer` has been run there."""
    program = PROGRAM.format(folder=str(Path(__file__).parent), library=str(fake.path), steer=steer)
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert child.returncode == 0, child.stderr
    findings: Findings = json.loads(child.stdout)
    return findings


def test_a_card_is_told_with_all_that_matters(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the child that the command starts: usable, its memory, what "auto" takes and why; nothing is cut."""
    # A variable for the child alone: this process has loaded its driver.
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake.path.parent))
    found = json.loads(run("--json"))
    card = found["devices"][2]
    assert (card["name"], card["available"], card["total_bytes"]) == ("cuda:0", True, 1 << 30)
    assert 0 < card["free_bytes"] <= card["total_bytes"]
    assert card["segments"] == ["paged", "stream_ordered", "direct"]
    assert "VMM" in card["segments_reason"]
    assert (card["over_budget_notices"], card["peers"]) == (True, [])
    assert found["nvidia"]["cuda"] == "13.0"
    assert any('AsyncMemoryPool("cuda:0")' in line for line in found["advice"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal,
    monkeypatch.setenv("TERM", "dumb")  # of one colour
    shown = run()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    for part in (
        "1 GiB of 1 GiB free",
        "segments: paged, stream_ordered, direct",
        '"auto" takes paged: the driver maps memory for this card (VMM)',
        "notices of being over budget: yes",
        "peers: none",
        "for CUDA 13.0",
    ):
        assert part in words


@pytest.mark.parametrize(
    ("steer", "kinds", "reason"),
    [
        ("fake.attribute(0, 102, 0)", ["stream_ordered", "direct"], "but has memory pools"),
        ("fake.attribute(0, 102, 0); fake.attribute(0, 115, 0)", ["direct"], "neither VMM nor memory pools"),
    ],
)
def test_the_choice_of_auto_has_its_reason(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, steer: str, kinds: list[str], reason: str
) -> None:
    """A card without mapping has the driver's pools, and without those plain calls."""
    findings = findings_of(fake, steer)
    monkeypatch.setattr("asyncmem.cli.doctor.find_nvidia", lambda: findings)
    card = diagnose({}).devices[2]
    assert list(card.segments) == kinds
    assert reason in str(card.segments_reason)


def test_several_cards_are_each_told(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them fails, the others can be used; who reaches whom is said."""
    findings = findings_of(fake, "fake.devices(3); fake.unlink(2, 0); fake.fail('cuDevicePrimaryCtxRetain', 2, 101)")
    monkeypatch.setattr("asyncmem.cli.doctor.find_nvidia", lambda: findings)
    diagnosis = diagnose({})
    first, second, third = (one for one in diagnosis.devices if one.name.startswith("cuda"))
    assert (first.available, second.available, third.available) == (True, False, True)
    assert first.peers == ("cuda:1",)
    assert third.peers == ("cuda:0", "cuda:1")
    assert "cuDevicePrimaryCtxRetain failed" in second.detail
    assert any(line.startswith("cuda:1 is not: ") for line in diagnosis.advice)


def test_a_driver_that_is_too_old_is_no_reason_to_hide_the_card(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card is named, with the driver's version and what to install."""
    findings = findings_of(fake, "fake.version(12020)")
    monkeypatch.setattr("asyncmem.cli.doctor.find_nvidia", lambda: findings)
    diagnosis = diagnose({})
    card = diagnosis.devices[2]
    assert not card.available
    assert "Fake GPU" in card.detail
    assert "which is for CUDA 12.2" in card.detail
    assert any("Install an NVIDIA driver for CUDA 12.4 or later" in line for line in diagnosis.advice)


def test_cards_that_lack_cuda_python_are_told(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra, so whoever has a card and not the package hears what to install."""
    findings = findings_of(fake, "fake.devices(2); sys.modules['cuda'] = None")
    monkeypatch.setattr("asyncmem.cli.doctor.find_nvidia", lambda: findings)
    diagnosis = diagnose({})
    assert "cuda-python cannot be imported" in diagnosis.devices[2].detail
    assert "pip install 'asyncmem[cuda]': the driver shows cuda:0 to cuda:1" in diagnosis.advice


def test_a_driver_that_refuses_is_quoted(fake: FakeDriver) -> None:
    """The driver's own name of its error is in the reason."""
    assert findings_of(fake, "fake.fail('cuInit', 1, 100)")["reason"] == (
        "the driver refused: CUDA_ERROR_NO_DEVICE (100)"
    )
