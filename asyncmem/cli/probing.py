"""Asks drivers in a process of its own, because a broken one can end or hang whoever asks it."""

import json
import subprocess
import sys
from typing import Any

PROBE_SECONDS = 60.0
"""How long a driver may take to answer. The first call after boot can take several seconds, each context one."""


def ask(module: str) -> tuple[Any, str | None]:
    """Run a module that prints one line of JSON, and answer what it says, or None and why nothing."""
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter with our own module
            [sys.executable, "-m", module], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, f"the driver did not answer within {PROBE_SECONDS:g} s"
    if child.returncode != 0:
        last = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        return None, f"the process that asked the driver ended early: {last[0]}"
    return json.loads(child.stdout), None
