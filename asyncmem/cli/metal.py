"""Looks for devices of Metal. Run as a process of its own: `python -m asyncmem.cli.metal` prints one line of JSON."""

import json
import sys
from collections.abc import Iterator

from asyncmem.cli.listing import Findings, list_devices, look
from asyncmem.devices import Metal
from asyncmem.devices.metal.driver import find_devices

UNTRIED = "this device has never run on hardware: please try `tox -e metal`, and report"
"""What is said of every one of them."""


def look_for_devices() -> Findings:
    """Ask in a child process."""
    lacking = f"needs macOS and pip install 'asyncmem[metal]'; {UNTRIED}"
    return look("asyncmem.cli.metal", package="Metal", lacking=lacking)


def probe() -> Findings:
    """List the GPUs of this Mac, and open each of them (blocks)."""
    return list_devices("metal", _found, Metal)


def _found() -> Iterator[tuple[str, int]]:
    for one in find_devices("metal"):
        yield f"{one.name()}; {UNTRIED}", int(one.recommendedMaxWorkingSetSize())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
