"""Install the oldest versions of what the package needs over the newest: `tox -e lowest` runs the tests with them.

The bounds are those of pyproject.toml, for the package itself and for the extras that the tests use.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

EXTRAS = ("cli", "cuda", "dask", "insight", "prometheus")
# Numba asks for the runtime of the CUDA that cuda-python is for.
BESIDE = ("nvidia-cuda-runtime-cu12; sys_platform == 'linux' and platform_machine == 'x86_64'",)


def oldest() -> list[str]:
    """Return a requirement of exactly the oldest version for each package, with its condition."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    return sorted({re.sub(r">=([\w.]+)[^;]*", r"==\1", one) for one in needed})


if __name__ == "__main__":
    print(*oldest(), sep="\n")
    subprocess.run([sys.executable, "-m", "pip", "install", *oldest(), *BESIDE], check=True)
