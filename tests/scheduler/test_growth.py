"""What an operation of the scheduler costs does not go by the number of requests."""

import shutil
import subprocess

import pytest

from .growth import COMPILER, build

MOST = "100000"


@pytest.mark.timeout(300)  # it is compiled first
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler")
def test_no_operation_goes_by_the_number_of_requests(pytestconfig: pytest.Config) -> None:
    """From a thousand requests to a hundred thousand, none grows six times as much as a std::map does."""
    assert pytestconfig.cache is not None
    program = build(pytestconfig.cache.mkdir("core-growth"))
    ran = subprocess.run([program, MOST], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
