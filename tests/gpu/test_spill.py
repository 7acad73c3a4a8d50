"""A pipeline that keeps more than its card may have comes to the same results."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

from .card import Card

EXAMPLE = Path(__file__).parents[2] / "examples" / "spill.py"


def test_a_pipeline_that_needs_three_times_its_limit_completes(card: Card) -> None:
    """The example compares with plain numpy, and with a pool that has room for all."""
    asyncio.run(runpy.run_path(str(EXAMPLE))["main"](card.device))
