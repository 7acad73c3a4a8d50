"""Nothing is lost whichever actor of a scenario is cancelled, at whichever step, in whichever way and order."""

import pytest

from tests.sweeps import Kind, sweep, sweep_on_trio

from .scenarios import SCENARIOS

pytestmark = pytest.mark.hazard("H1", "H3", "H4")


@pytest.mark.parametrize("name", SCENARIOS)
def test_cancelling_anybody_at_any_step_loses_nothing(name: str) -> None:
    """In order of arrival, each kind of cancellation strikes each actor at each of its steps."""
    assert sweep(SCENARIOS[name]).strikes > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_other_orders_lose_nothing_either(name: str) -> None:
    """Seeded orders of the ready handles are struck at every fifth step."""
    assert sweep(SCENARIOS[name], seeds=(1, 2, 3), stride=5).strikes > 20


@pytest.mark.parametrize("name", ["mixed_sizes", "batches_among_singles"])
def test_cancelling_two_at_once_loses_nothing(name: str) -> None:
    """Every pair of actors is cancelled at the same step."""
    assert sweep(SCENARIOS[name], kinds=[Kind.TASK], together=2, stride=2).strikes > 20


@pytest.mark.parametrize("name", SCENARIOS)
def test_trio_loses_nothing(name: str) -> None:
    """The same scenarios, struck by scope, by deadline and by the request's own cancel(), on trio."""
    assert sweep_on_trio(SCENARIOS[name], seeds=(0, 1), stride=2).strikes > 10


@pytest.mark.parametrize("name", SCENARIOS)
def test_pages_lose_nothing_either(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scenarios where memory comes by pages, on asyncio and on trio."""
    monkeypatch.setenv("ASYNCMEM_SEGMENTS", "paged")
    assert sweep(SCENARIOS[name], seeds=(3,), stride=6).strikes > 10
    assert sweep_on_trio(SCENARIOS[name], stride=7).strikes > 2
