"""Numbers computed over a pool equal those computed over plain driver memory, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest

from asyncmem import AsyncMemoryPool

from .card import Card
from .programs import CupyProgram, Outcome, Program, TorchProgram

STEPS = 200
LIMIT = 2 << 30
SEEDS = range(4)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

Run = Callable[[str], list[Outcome]]


@pytest.fixture(params=["torch", "cupy"])
def program(request: pytest.FixtureRequest) -> tuple[type[Program], Any]:
    """A kind of program, and the library it is for."""
    kinds: dict[str, type[Program]] = {"torch": TorchProgram, "cupy": CupyProgram}
    return kinds[request.param], request.getfixturevalue(request.param)


@pytest.fixture(params=SEEDS)
def run(request: pytest.FixtureRequest, card: Card, program: tuple[type[Program], Any]) -> Run:
    """Run the program of one seed over a pool of some kind, and return what came out."""
    kind, library = program

    def outcomes(segments: str) -> list[Outcome]:
        with AsyncMemoryPool(card.device, segments=segments, limit=LIMIT, segment_size="32 MiB") as pool:
            result = kind(pool, request.param, library).run(STEPS)
            assert pool.stats().allocated_bytes == 0
            pool.check()
        return result

    return outcomes


@pytest.mark.parametrize("segments", ["direct", "stream_ordered", "paged"])
def test_results_over_a_pool_are_those_over_plain_memory(run: Run, segments: str) -> None:
    """The same program gives the same bits over `direct` again (the control), and over each kind of pool.

    Its sizes are odd, four streams share its tensors, and fresh memory is NaN until it is written.
    """
    expected = run("direct")
    assert len(expected) > 100
    assert next((one for one in expected if not one.finite), None) is None, "the program itself is wrong"
    found = run(segments)
    assert next((pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]), None) is None
