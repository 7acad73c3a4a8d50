"""The programs on the pages. Run as a script, it checks their types as an editor does: basedpyright, strict."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python(?P<needs> opencl| metal| ray|)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SETTINGS = {
    "typeCheckingMode": "strict",
    "pythonVersion": "3.11",
    "extraPaths": [str(ROOT)],
    "reportMissingModuleSource": False,  # what a page uses need not be installed
}


PARTLY_TYPED = re.compile(r"^(from distributed|import ray)\b", re.MULTILINE)
"""Libraries whose own types are incomplete: an editor's strict rules complain of them, whoever uses them."""


class Block(NamedTuple):
    """One program on a page."""

    page: Path
    line: int
    code: str
    needs: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    """Find the programs of all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            yield Block(page, text.count("\n", 0, found.start("code")) + 1, found["code"], found["needs"].strip())


def check_types() -> int:
    """Write each program into a file of its own, named after its page and line; return what the checker returns."""
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks():
            page = "_".join(block.page.relative_to(ROOT).with_suffix("").parts)
            code = f"{block.code}# pyright: basic\n" if PARTLY_TYPED.search(block.code) else block.code
            code += "# pyright: reportMissingImports=false\n" if block.needs == "ray" else ""
            Path(folder, f"{page}_{block.line}.py").write_text(code, encoding="utf-8")
        project = Path(folder, "pyrightconfig.json")
        project.write_text(json.dumps(SETTINGS), encoding="utf-8")
        command = [sys.executable, "-m", "basedpyright", "--project", str(project), "--pythonpath", sys.executable]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(check_types())
