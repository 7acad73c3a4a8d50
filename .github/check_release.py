"""See that a tag can be released: `python .github/check_release.py v0.1.0` prints its changes, or fails.

The version is said once, in `asyncmem/__init__.py`; the tag and a dated section of CHANGELOG.md must agree with it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes_of(tag: str) -> str:
    """Return what the changelog says of the version that a tag names.

    Raises:
        SystemExit: The tag is not that of the version in the source, or the changelog has no such section.
    """
    source = (ROOT / "asyncmem" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, and the version in the source {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n"
    section = re.search(heading + r"(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section '## [{version}] - YYYY-MM-DD' with something in it")
    return section[1].strip()


if __name__ == "__main__":
    sys.stdout.write(notes_of(sys.argv[1]) + "\n")
