"""What the pages tell a reader to run on a GPU, runs there."""

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .card import Card

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python gpu\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LIBRARY = re.compile(r"^(?:import|from) (?P<name>torch|cupy|numba|cuda\.core|rmm|jax)\b", re.MULTILINE)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.may_block,  # CuPy reads the kernels that it has compiled from a file
]


def blocks() -> Iterator[Any]:
    """Find the programs for a GPU on all pages, each with the page's name and its line there."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("code")) + 1
            yield pytest.param(page, line, found["code"], id=f"{page.relative_to(ROOT)}:{line}")


@pytest.mark.parametrize(("page", "line", "code"), list(blocks()))
def test_a_program_on_a_page_runs_on_a_gpu(
    card: Card, driver: object, request: pytest.FixtureRequest, page: Path, line: int, code: str
) -> None:
    """Every block for a GPU is a program of its own that ends without an error, where its library is installed."""
    library = LIBRARY.search(code)
    if library and driver:
        pytest.skip("a library's kernels need a GPU")
    if library and library["name"] in {"torch", "cupy"}:
        request.getfixturevalue(library["name"])
    elif library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs to read, not ours
            pytest.importorskip(library["name"], reason=f"{library['name']} is not installed")
    if ".install(" in code or "import jax" in code:  # what it does to a library lasts until the process ends
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=200, env=environment)
        return
    # Empty lines before it let a traceback name the page's own line.
    exec(compile("\n" * (line - 1) + code, page, "exec", dont_inherit=True), {"__name__": "__main__"})
    card.synchronize()
