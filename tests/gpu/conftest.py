"""A GPU to test on, and pools on it. `tox -e gpu` runs these tests, which then have minutes and the card to themselves.

Those whose kernels the fake driver knows run over it too, where no GPU is asked for.
"""

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncmem import AsyncMemoryPool
from tests.conftest import close_pools

if TYPE_CHECKING:
    from .card import Card, PoolMaker

HERE = str(Path(__file__).parent)
WANTED = os.environ.get("ASYNCMEM_TEST_CUDA") == "real"
FOR_THE_FAKE_TOO = tuple(f"test_{name}.py" for name in ("graphs", "moves", "order", "pages", "parallel", "soak"))

# Nothing can be collected where there is no cuda-python, as on macOS.
collect_ignore_glob = [] if importlib.util.find_spec("cuda") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs a real GPU unless one was asked for; minutes are allowed then."""
    left_out = pytest.mark.skip(reason="needs a GPU: tox -e gpu")
    for item in items:
        if str(item.path).startswith(HERE):
            if WANTED:
                item.add_marker(pytest.mark.timeout(300))
            elif item.path.name not in FOR_THE_FAKE_TOO:
                item.add_marker(left_out)


@pytest.fixture
def card(request: pytest.FixtureRequest, driver: Any) -> Iterator["Card"]:
    """The card, idle at the end, whatever the test did; the fake one has seen no work without order then."""
    from .card import Card

    card: Card = Card() if driver else request.getfixturevalue("the_card")
    card.enter()
    yield card
    card.clean_up()
    if driver is None:
        return
    card.close()
    assert driver.violations() == []


@pytest.fixture(params=["stream_ordered", "paged"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each way to get memory that has a cache to be wrong."""
    return str(request.param)


@pytest.fixture
def make_pool(request: pytest.FixtureRequest, card: "Card", kind: str) -> Iterator["PoolMaker"]:
    """Make pools on the card; at the end each is whole, has nothing live, and is closed."""
    pools: list[AsyncMemoryPool] = []

    def make(limit: int, **options: Any) -> AsyncMemoryPool:
        pool = AsyncMemoryPool(card.device, limit=limit, **{"segments": kind, "segment_size": limit, **options})
        pools.append(pool)
        return pool

    yield make
    card.clean_up()
    live = [pool.stats().allocated_bytes for pool in pools]
    for pool in pools:
        pool.check()
    close_pools(request, pools)
    assert not any(live)


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch, made to give the same bits in every run; skipped where it is not installed."""
    # Read by cuBLAS once: without it a product may take its workspace, and its order of sums, from what is free.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs to read, not ours
        module = pytest.importorskip("torch")
    module.use_deterministic_algorithms(mode=True)
    return module


@pytest.fixture(scope="session")
def cupy() -> Any:
    """CuPy; skipped where it is not installed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("cupy")
