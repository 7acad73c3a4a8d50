"""Which copy of HIP's runtime is the one: wheels of torch and of ROCm bring their own, beside the system's."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME: Final = "libamdhip64.so"
_VERSIONS: Final = ("", ".7", ".6")
"""What follows the name: the plain one is there for those who build, the others wherever programs run."""


def loaded_copies() -> tuple[str, ...]:
    """Return the files of the runtime that are loaded in this process, by whomever."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    files = (line.split(maxsplit=5)[-1] for line in lines if _NAME in line)
    return tuple(dict.fromkeys(files))


def places() -> Iterator[str]:
    """Yield where the runtime may be, best first: what is loaded, then where hip-python looks for it."""
    yield from loaded_copies()
    if find_spec("rocm_sdk") is not None:
        yield from map(str, import_module("rocm_sdk").find_libraries("amdhip64"))
    root = os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or "/opt/rocm"
    for version in _VERSIONS:
        file = Path(root, "lib", _NAME + version)
        if file.exists():
            yield str(file)
    yield from (_NAME + version for version in _VERSIONS)
