"""What the pages tell a reader to run, run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.programs import PAGES, ROOT, Block, blocks
from tests.metal.session import REAL
from tests.processor import build, open_processor

NAME = re.compile(r"`(test_\w+)`")
TEST = re.compile(r"^ *(?:async )?def (?P<name>test_\w+)", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#]+)(#[^)]*)?\)")


# A program may block its loop only where it makes the pool's worker a part of that loop, or starts a server of pages,
# which reads its own files.
BLOCKING = re.compile("SteppedPool|add_page")
PROGRAMS = [
    pytest.param(block, id=str(block), marks=[pytest.mark.may_block] if BLOCKING.search(block.code) else [])
    for block in blocks()
]


@pytest.mark.parametrize("block", PROGRAMS)
def test_a_program_on_a_page_runs(request: pytest.FixtureRequest, block: Block) -> None:
    """Every Python block of README and docs is a program of its own that ends without an error."""
    # Empty lines before it let a traceback name the page's own line.
    program = compile("\n" * (block.line - 1) + block.code, block.page, "exec", dont_inherit=True)
    if block.needs == "ray":
        pytest.importorskip("ray", reason="Ray is not installed")  # it is 400 MB, and starts in seconds
    if block.needs == "opencl":
        device = open_processor()
        if ".build()" in block.code:
            build(device, "__kernel void nothing() {}")
        device.close()
    if block.needs == "metal" and not REAL:
        request.getfixturevalue("machine")
        if "newLibrary" in block.code:
            pytest.skip("the stand-in for Metal runs no kernels")
    exec(program, {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    """A page's relative links name files that exist."""
    targets = [found["target"] for found in LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_tests_that_pages_name_are_there() -> None:
    """A rule that names the test that holds it names one that exists."""
    there = {
        found["name"]
        for path in (ROOT / "tests").rglob("*.py")
        for found in TEST.finditer(path.read_text(encoding="utf-8"))
    }
    named = {name for page in PAGES for name in NAME.findall(page.read_text(encoding="utf-8"))}
    assert named
    assert named <= there, named - there


def test_the_readme_is_short() -> None:
    """README stays within 120 lines: the rest has pages of its own."""
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("script", sorted((ROOT / "docs" / "pictures").glob("*.py")), ids=lambda path: path.stem)
def test_a_picture_is_what_its_script_draws(script: Path) -> None:
    """From a run in virtual time, so it is the same each time; no picture has words that would need translation."""
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == script.with_suffix(".svg").read_text(encoding="utf-8")
    assert "<text" not in done.stdout
