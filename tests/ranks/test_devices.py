"""Stages over processes on devices whose memory other processes cannot open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.fake import FakeDriver

from .test_ranks import key

PROGRAM = Path(__file__).with_name("copies.py")


def outputs(commands: list[list[str]], folder: Path | None = None) -> list[str]:
    """Run programs at once, over the driver of that folder, and return what they print."""
    environment = os.environ | ({} if folder is None else {"LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_DEVICES": "2"})
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), *command], env=environment, stdout=-1, text=True)
        for command in commands
    ]
    found = [one.communicate(timeout=60)[0] for one in processes]
    assert [one.returncode for one in processes] == [0] * len(processes)
    assert all(one.count(",") >= 9 for one in found)  # ten items came, at least
    return found


@pytest.mark.may_block
def test_it_goes_by_the_host_where_the_device_shares_nothing() -> None:
    """Over the simulated device two processes see what one sees."""
    (together,) = outputs([["simulated"]])
    secret = key()
    assert "".join(outputs([["simulated", secret, "0"], ["simulated", secret, "1"]])) == together


@pytest.mark.may_block
@pytest.mark.fake_only
def test_it_goes_by_the_host_where_the_driver_shares_nothing(fake: FakeDriver) -> None:
    """Over two GPUs of the stand-in, one in each process."""
    folder = Path(fake.path).parent
    (together,) = outputs([["cuda:0"]], folder)
    secret = key()
    assert "".join(outputs([["cuda:0", secret, "0"], ["cuda:1", secret, "1"]], folder)) == together
