"""Looks for AMD GPUs. Run as a process of its own: `python -m asyncmem.cli.rocm` prints one line of JSON."""

import json
import sys
from collections.abc import Iterator

from asyncmem.cli.listing import Findings, list_devices, look
from asyncmem.devices import Rocm

UNTRIED = "asyncmem has never been run on AMD hardware: please try `tox -e rocm`, and report"
"""What is said of every one of them."""


def look_for_devices() -> Findings:
    """Ask in a child process."""
    lacking = "hip-python is not installed: pip install 'asyncmem[rocm]'"
    return look("asyncmem.cli.rocm", package="hip", lacking=lacking)


def probe() -> Findings:
    """List the GPUs that the HIP runtime shows, and open each of them (blocks)."""
    return list_devices("rocm", _found, Rocm)


def _found() -> Iterator[tuple[str, int]]:
    for index in range(Rocm.interface.count_devices()):
        yield f"AMD GPU; {UNTRIED}", Rocm.total_memory(index)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
