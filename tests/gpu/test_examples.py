"""The examples that take a device run on a GPU too, and find the same there as without a pool."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest

from .card import Card

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.may_block,  # CuPy reads the kernels that it has compiled from a file
]


@pytest.fixture
def cupy(driver: object) -> Any:
    """CuPy, whose kernels need a GPU."""
    if driver:
        pytest.skip("a library's kernels need a GPU")
    return pytest.importorskip("cupy")


def example(name: str) -> dict[str, Any]:
    """Load an example without running it."""
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def test_a_text_in_pages_is_the_same_as_in_one_array(card: Card, cupy: Any) -> None:
    """Serving a language model from too few pages, with priorities and time limits."""
    asyncio.run(example("kv_cache_serving")["main"](card.device, cupy))


def test_images_through_a_pipeline_are_the_same_as_one_by_one(card: Card, cupy: Any) -> None:
    """Three stages, each on a stream of the card."""
    found = example("async_data_pipeline")
    asyncio.run(found["main"](card.device, found["OnGpu"](cupy)))
