"""This machine's processor as a device of OpenCL, through PoCL from a wheel."""

import platform
import sys
from importlib.util import find_spec

import pytest

from asyncmem.devices import OpenCL
from asyncmem.errors import BackendUnavailable

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
