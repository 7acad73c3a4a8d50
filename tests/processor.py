"""This machine's processor as a device of OpenCL, through PoCL from a wheel."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from asyncmem.devices import OpenCL
from asyncmem.errors import BackendUnavailable

if TYPE_CHECKING:
    import pyopencl as cl

# Where there is a wheel of the driver, a test that finds none has found a mistake.
HAS_WHEEL = (sys.platform, platform.machine()) == ("linux", "x86_64")


def open_processor() -> OpenCL:
    """Open it, or skip the test."""
    if find_spec("pyopencl") is None:
        pytest.skip("pyopencl is not installed")
    try:
        return OpenCL()
    except BackendUnavailable as error:
        if HAS_WHEEL:
            raise
        pytest.skip(f"there is no OpenCL for this processor: {error}")


def build(device: OpenCL, source: str) -> cl.Program:
    """Compile kernels, or skip the test: the compiler in PoCL 3.0 fails on a processor that came after it.

    It links a kernel by `ld` at its first launch, and ends the process where there is none.
    """
    if shutil.which("ld") is None:
        pytest.skip("PoCL links kernels by ld, which is not found")
    try:
        return device.driver.cl.Program(device.context, source).build()
    except device.driver.cl.RuntimeError as error:
        if "unknown target CPU" not in str(error):
            raise
        pytest.skip("the compiler of this OpenCL driver does not know this processor")
