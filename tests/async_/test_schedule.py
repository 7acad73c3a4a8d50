"""Schedules are whole, can be taken without a deadlock, and cost the memory and the time that the formulas say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem import InvalidRequest
from asyncmem.pipeline.parallel import Schedule, Step
from asyncmem.pipeline.parallel.schedule import SCHEDULES, needed_by

KINDS = st.sampled_from(sorted(SCHEDULES))
STAGES = st.integers(1, 7)
MICRO_BATCHES = st.integers(1, 12)
SECONDS = st.floats(0.001, 10)


@given(KINDS, STAGES, MICRO_BATCHES)
def test_every_stage_takes_every_micro_batch_forward_and_backward_once(kind: str, stages: int, count: int) -> None:
    """The backward comes behind the forward; both go through the micro-batches in their order, so sums have one."""
    schedule = SCHEDULES[kind](stages, count)
    assert len(schedule.steps) == stages
    for steps in schedule.steps:
        assert [step.micro_batch for step in steps if step.forward] == list(range(count))
        assert [step.micro_batch for step in steps if not step.forward] == list(range(count))
        assert all(steps.index(Step(True, at)) < steps.index(Step(False, at)) for at in range(count))


@given(KINDS, STAGES, MICRO_BATCHES, st.data())
def test_it_can_be_taken_whatever_the_steps_last(kind: str, stages: int, count: int, data: st.DataObject) -> None:
    """No stage waits for ever, none takes two steps at once, and none takes a step before what it needs is over."""
    schedule = SCHEDULES[kind](stages, count)
    each = st.lists(SECONDS, min_size=stages, max_size=stages)
    forward, backward = data.draw(each), data.draw(each)
    ends: dict[tuple[int, Step], float] = {}
    free = [0.0] * stages
    for stage, step, begin, end in schedule.course(forward, backward):
        needed = needed_by(stage, step, stages - 1)
        assert needed is None or ends[needed] <= begin
        assert free[stage] <= begin
        ends[stage, step] = free[stage] = end
    assert len(ends) == 2 * stages * count
    assert schedule.makespan(forward, backward) == max(ends.values())


@given(STAGES, MICRO_BATCHES)
def test_a_stage_keeps_no_more_than_the_formula_says(stages: int, count: int) -> None:
    """GPipe keeps all micro-batches, 1F1B as many as there are stages from there on, eager twice these less one."""
    assert [SCHEDULES["gpipe"](stages, count).live(at) for at in range(stages)] == [count] * stages
    kept = [SCHEDULES["1f1b"](stages, count).live(at) for at in range(stages)]
    assert kept == [min(stages - at, count) for at in range(stages)]
    kept = [SCHEDULES["eager"](stages, count).live(at) for at in range(stages)]
    assert kept == [min(2 * (stages - at) - 1, count) for at in range(stages)]


@given(KINDS, STAGES, MICRO_BATCHES, SECONDS, SECONDS)
def test_equal_stages_leave_the_bubble_of_the_formula(
    kind: str, stages: int, count: int, forward: float, backward: float
) -> None:
    """All take the time of so many steps more as there are stages behind the first: (S-1)/(M+S-1) is idle."""
    schedule = SCHEDULES[kind](stages, count)
    both = [forward] * stages, [backward] * stages
    assert math.isclose(schedule.makespan(*both), (count + stages - 1) * (forward + backward))
    assert math.isclose(schedule.bubble(*both), (stages - 1) / (count + stages - 1), abs_tol=1e-9)


def test_the_slowest_stage_holds_the_others_up() -> None:
    """With unequal stages the bubble is that of the course, here counted by hand."""
    schedule = SCHEDULES["1f1b"](2, 3)
    assert schedule.makespan([1, 2], [1, 2]) == 1 + 3 * 4 + 1
    assert math.isclose(schedule.bubble([1, 2], [1, 2]), 1 - 18 / 28)


def test_an_order_that_cannot_be_taken_is_refused() -> None:
    """A backward before the forward that it comes from would wait for ever."""
    wrong = Schedule("wrong", 1, ((Step(False, 0), Step(True, 0)),))
    with pytest.raises(InvalidRequest, match="no stage waits for itself"):
        wrong.makespan([1], [1])


def test_a_step_says_what_it_is() -> None:
    """Errors name it so."""
    assert [str(Step(True, 3)), str(Step(False, 0))] == ["forward of micro-batch 3", "backward of micro-batch 0"]
