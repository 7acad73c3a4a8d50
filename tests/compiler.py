"""The C++ compiler with which some tests build what they need; wheels are tested where there is none."""

import os
import shutil

import pytest

COMPILER = os.environ.get("CXX", "g++")


def find_compiler() -> str:
    """Return its name, or skip the test."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"there is no C++ compiler: {COMPILER} is not found")
    return COMPILER
