"""What only programs without Python can show of the scheduler: what it costs, and what threads do to it."""

import shutil
import subprocess

import pytest

from .growth import COMPILER, build

ARGUMENTS = {"growth": "100000", "threads": "1000"}


@pytest.mark.timeout(300)  # they are compiled first
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_costs_do_not_grow_and_no_free_is_lost(pytestconfig: pytest.Config) -> None:
    """From a thousand requests to a hundred thousand, no operation grows six times as much as a std::map does.

    A free of another thread that comes while a request finds nothing, and begins to wait, serves it all the same.
    """
    assert pytestconfig.cache is not None
    programs = build(pytestconfig.cache.mkdir("core-growth"))
    for program, argument in ARGUMENTS.items():
        ran = subprocess.run([programs / program, argument], check=False, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
