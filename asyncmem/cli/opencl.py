"""Looks for devices of OpenCL. Run as a process of its own: `python -m asyncmem.cli.opencl` prints one line of JSON."""

import json
import sys
from collections.abc import Iterator

from asyncmem.cli.listing import Findings, list_devices, look
from asyncmem.devices import OpenCL
from asyncmem.devices.opencl.driver import find_devices


def look_for_devices() -> Findings:
    """Ask in a child process."""
    lacking = "pyopencl is not installed: pip install 'asyncmem[opencl]'"
    return look("asyncmem.cli.opencl", package="pyopencl", lacking=lacking)


def probe() -> Findings:
    """List the devices of all drivers, and open each of them (blocks)."""
    return list_devices("opencl", _found, _open)


def _open(index: int) -> OpenCL:
    return OpenCL(index)


def _found() -> Iterator[tuple[str, int]]:
    for one in find_devices("opencl"):
        yield f"{one.name.strip()}, {one.platform.name.strip()}", int(one.global_mem_size)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()))
