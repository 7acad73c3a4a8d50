"""What this process runs on: interpreter, packages, event loop, compiled core. Facts only; nothing is started."""

import importlib
import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "asyncmem",
    "numpy",
    "anyio",
    "uvloop",
    "cuda-python",
    "cuda-bindings",
    "hip-python",
    "pyobjc-framework-Metal",
    "pyopencl",
    "trio",
    "click",
    "rich",
)
"""The distributions whose versions matter to somebody who reads a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One process's surroundings, as `doctor` and `bench` print them."""

    python: str
    implementation: str
    executable: str
    platform: str
    processors: int
    packages: dict[str, str | None]
    """Version of each distribution of `PACKAGES`, or None where it is not installed."""
    loop: str
    """What `asyncmem.run` uses here: "uvloop" or "asyncio"."""
    core: str | None
    """File of the compiled core, or None where it could not be loaded."""
    core_error: str | None
    """Why it could not."""


def look_around() -> Machine:
    """Gather the facts."""
    core, core_error = _compiled_core()
    return Machine(
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        executable=sys.executable,
        platform=platform.platform(),
        processors=os.cpu_count() or 1,
        packages={name: installed_version(name) for name in PACKAGES},
        loop="uvloop" if installed_version("uvloop") else "asyncio",
        core=core,
        core_error=core_error,
    )


def installed_version(distribution: str) -> str | None:
    """Answer the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _compiled_core() -> tuple[str | None, str | None]:
    try:
        module = importlib.import_module("asyncmem.core._core")
    except ImportError as error:
        return None, str(error)
    return str(module.__file__), None
