"""Programs that no policy was tuned to: what pages reserve for them, beside PyTorch's expandable segments."""

import pytest

from asyncmem.replay import Model, Op, Trace, read, replay
from benchmarks.reserved.expandable import expandable
from benchmarks.reserved.programs import FAMILIES, mutated, part

from .support import TRACES, same

LAG = 0.02


@pytest.mark.parametrize(
    ("name", "measured"), [("gpt2_train_varlen", 1.051), ("gnn_sampled", 1.035), ("stream_prefetch", 1.042)]
)
def test_expandable_segments_are_worked_out_as_they_were_measured(name: str, measured: float) -> None:
    """PyTorch reserved so much on a GPU for the program that was recorded."""
    trace = read(TRACES / f"{name}.npz")
    assert expandable(trace, LAG) / trace.peak_requested == pytest.approx(measured, abs=0.001)


# One stream each: where a second one copies ahead, what waits for fences is still dearer than to PyTorch.
@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.__name__ != "prefetch"], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("seed", [0, 1])
def test_pages_reserve_no_more_than_expandable_segments(family: object, seed: int) -> None:
    """With the GPU 20 ms behind, and nobody waiting, by at most two hundredths of what is needed."""
    assert callable(family)
    trace = family(seed)
    assert isinstance(trace, Trace)
    found = replay(trace, model=Model(lag=LAG))
    assert found.waits == 0
    assert found.peak_reserved <= expandable(trace, LAG) + 0.02 * trace.peak_requested


def test_a_large_request_is_worth_its_moves() -> None:
    """This one's comes when the time for moves is spent, and would take 8 % more memory than there is."""
    found = replay(part(read(TRACES / "gnn_sampled.npz"), 0.35, 0.7))
    assert found.reserved_over_requested <= 1.03


def test_a_seed_makes_one_program() -> None:
    """Another one makes another."""
    for family in FAMILIES:
        assert same(family(5), family(5))
        assert not same(family(5), family(6))


def test_a_part_begins_with_what_was_live() -> None:
    """And goes on as the whole did."""
    whole = read(TRACES / "stream_prefetch.npz")
    cut = part(whole, 0.4, 0.6)
    assert 0 < cut.peak_requested <= whole.peak_requested
    steps = whole.op <= Op.FREE
    first = int(0.4 * steps.sum())
    before = whole.nbytes[steps][:first] * (1 - 2 * whole.op[steps][:first].astype(int))
    live = int(cut.nbytes[: len(cut) - (int(0.6 * steps.sum()) - first)].sum())
    assert live == before.sum()


def test_a_mutated_program_has_other_sizes_and_as_many() -> None:
    """Each distinct size becomes one other, so what came again and again still does."""
    whole = read(TRACES / "gnn_sampled.npz")
    other = mutated(whole, 3)
    assert other.allocations == whole.allocations
    ratio = other.nbytes.sum() / whole.nbytes[whole.op <= Op.FREE].sum()
    assert 0.7 < ratio < 1.42
    assert len(set(other.nbytes.tolist())) == pytest.approx(len(set(whole.nbytes.tolist())), rel=0.1)
