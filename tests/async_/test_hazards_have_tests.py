"""Each known hazard has at least one test that is marked with its number."""

import re
from pathlib import Path

from .hazards import HAZARDS


def test_every_hazard_is_guarded() -> None:
    """No entry of the list is without a test, and no test names an entry that is not there."""
    marks = re.compile(r"mark\.hazard\(([^)]*)\)")
    here = Path(__file__).parent
    named = {
        number
        for path in here.glob("test_*.py")
        for found in marks.findall(path.read_text(encoding="utf-8"))
        for number in re.findall(r"H\d+", found)
    }
    assert named == set(HAZARDS)
