"""A trace keeps its rules from the moment it is made, and returns what it comes to."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem.errors import BadTrace
from asyncmem.replay import Op, Trace

from .support import TRACES, Row, rows, same, trace_of

MIB = 1 << 20

# Two allocations live at once, then one; the recorded allocator took 8 MiB and gave back 4.
GOOD: list[Row] = [
    (Op.GROW, 0, -1, 4 * MIB, 0),
    (Op.ALLOCATE, 0, 0, 3 * MIB, 5),
    (Op.GROW, 2, -1, 4 * MIB, 5),
    (Op.ALLOCATE, 2, 1, 2 * MIB, 7),
    (Op.FREE, 1, 0, 3 * MIB, 10),
    (Op.ALLOCATE, 0, 2, MIB, 11),
    (Op.DONE, 1, 0, 3 * MIB, 40),
    (Op.SHRINK, 0, -1, 4 * MIB, 1_000_040),
]


def changed(row: int, column: int, value: int) -> list[Row]:
    """Return the good rows with one value changed."""
    table = [list(one) for one in GOOD]
    table[row][column] = value
    return [(op, stream, number, nbytes, time) for op, stream, number, nbytes, time in table]


def test_a_trace_answers_its_figures() -> None:
    """What was live, what was reserved, how many and how long follow from the rows."""
    trace = trace_of(GOOD, name="small")
    assert (len(trace), trace.allocations, trace.streams) == (8, 3, 3)
    assert (trace.peak_requested, trace.peak_recorded) == (5 * MIB, 8 * MIB)
    assert trace.duration == 1.00004
    assert repr(trace) == "<asyncmem.replay.Trace 'small': 3 allocations on 3 streams, at most 5 MiB live, 1 s>"


def test_an_empty_trace_is_one() -> None:
    """A program that allocates nothing can be recorded too."""
    trace = trace_of([])
    assert (len(trace), trace.allocations, trace.streams, trace.duration) == (0, 0, 0, 0.0)
    assert (trace.peak_requested, trace.peak_recorded) == (0, 0)
    assert [column.size for column in trace.steps()] == [0] * 4


def test_steps_are_what_a_replay_does() -> None:
    """Allocations and frees alone, each with its block's slot, in columns that compiled code can walk."""
    steps = trace_of(GOOD).steps()
    assert steps.slot.tolist() == [0, 1, 0, 2]
    assert steps.nbytes.tolist() == [3 * MIB, 2 * MIB, -1, MIB]
    assert steps.stream.tolist() == [0, 2, 1, 0]
    assert steps.time_us.tolist() == [5, 7, 10, 11]
    assert [column.dtype for column in steps] == [np.int32, np.int64, np.int32, np.int64]
    assert all(column.flags.c_contiguous for column in steps)


def test_a_trace_cannot_be_changed() -> None:
    """Neither its fields nor its arrays, nor the arrays that it was made of afterwards."""
    table = np.array(GOOD, np.int64)
    trace = Trace(*table.T)
    table[:] = 7
    assert trace.nbytes[1] == 3 * MIB
    with pytest.raises(FrozenInstanceError):
        trace.name = "another"  # type: ignore[misc]
    for column in trace.columns:
        assert column.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


@pytest.mark.parametrize(
    ("wrong", "row", "text"),
    [
        (changed(3, 0, 9), 3, "expected op from 0 to 4, got 9"),
        (changed(3, 1, 1 << 16), 3, "stream from 0 to 65535, got 65536"),
        (changed(3, 1, -1), 3, "got -1"),
        (changed(3, 3, -5), 3, "nbytes from 0"),
        (changed(3, 3, 1 << 47), 3, "got 140737488355328"),
        (changed(3, 4, 4), 3, "a time not before the last row's, got 4 after 5 µs"),
        (changed(0, 4, -1), 0, "time_us from 0"),
        (changed(0, 2, 0), 0, "id -1 for the allocator's own"),
        (changed(3, 2, 5), 3, "allocations numbered from 0, got number 5 for number 1"),
        (changed(3, 2, 0), 3, "got number 0 for number 1"),
        (changed(4, 2, 3), 4, "FREE of a live allocation, got number 3 of 3"),
        (changed(4, 2, -1), 4, "FREE of a live allocation, got number -1"),
        (changed(4, 2, 2), 4, "FREE of a live allocation, got number 2"),
        (changed(4, 3, 7), 4, "the bytes of its allocation, got 7 and not 3145728"),
        (changed(6, 0, Op.FREE), 6, "got number 0, as in row 4"),
        (changed(6, 2, 1), 6, "DONE of an allocation whose free was asked for, got number 1"),
        (changed(6, 2, 9), 6, "DONE of an allocation"),
        (changed(6, 3, 9), 6, "the bytes of its allocation"),
        ([*GOOD, (Op.FREE, 0, -1, MIB, 2_000_000)], 8, "FREE of a live allocation, got number -1"),
        ([*GOOD, (Op.DONE, 0, 0, 3 * MIB, 2_000_000)], 8, "as in row 6"),
    ],
)
def test_a_row_that_contradicts_others_is_refused(wrong: list[Row], row: int, text: str) -> None:
    """The error names the first row that cannot be, what it says and what it should."""
    with pytest.raises(BadTrace) as caught:
        trace_of(wrong)
    assert caught.value.row == row
    assert text in str(caught.value)


@pytest.mark.parametrize("op", [Op.ALLOCATE, Op.GROW, Op.SHRINK])
def test_more_than_any_device_has_is_refused(op: Op) -> None:
    """Sums that no machine can hold are a mistake, and are found before they overflow."""
    huge = [(op, 0, row if op == Op.ALLOCATE else -1, (1 << 47) - 1, 0) for row in range(70_000)]
    with pytest.raises(BadTrace, match=r"row 1: expected at most 128 TiB .* at once"):
        trace_of(huge)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda column: column[:-1], "columns of one length"),
        (lambda column: column.astype(np.float64), "whole numbers in nbytes, one a row, got float64 in 1 dimensions"),
        (lambda column: column.reshape(2, -1), "got int64 in 2 dimensions"),
    ],
)
def test_columns_that_do_not_fit_are_refused(spoil: Callable[..., np.ndarray], text: str) -> None:
    """Columns are whole numbers in one dimension, one a row each."""
    op, stream, number, nbytes, time = np.array(GOOD, np.int64).T
    with pytest.raises(BadTrace, match=text):
        Trace(op, stream, number, spoil(nbytes.copy()), time)


@given(rows())
def test_figures_are_those_of_a_plain_account(found: list[Row]) -> None:
    """The peak is that of adding and taking off one by one; steps are the program's rows, its streams without gaps."""
    trace = trace_of(found)
    live = peak = 0
    for op, _, _, nbytes, _ in found:
        live += {Op.ALLOCATE: nbytes, Op.FREE: -nbytes}.get(Op(op), 0)
        peak = max(peak, live)
    assert trace.peak_requested == peak
    place = {stream: number for number, stream in enumerate(sorted({0, *(row[1] for row in found)}))}
    assert trace.streams == (len(place) if found else 0)
    done = [
        (slot, -1 if op else nbytes, place[stream], time) for op, stream, slot, nbytes, time in found if op <= Op.FREE
    ]
    assert list(zip(*(column.tolist() for column in trace.steps()), strict=True)) == done


@given(rows(), st.text(), st.integers(0, 99), st.text())
def test_a_saved_trace_is_loaded_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, found: list[Row], name: str, device: int, note: str
) -> None:
    """Whatever the trace, loading what was saved gives all its rows and words again."""
    path = tmp_path_factory.getbasetemp() / "saved"
    trace = trace_of(found, name=name, device=device, note=note)
    trace.save(path)
    assert same(Trace.load(path), trace)


def test_numpy_reads_what_was_saved(tmp_path: Path) -> None:
    """The file has the columns that tools of other people expect, in the types that they expect."""
    trace_of(GOOD, name="small", note="by hand").save(tmp_path / "small.npz")
    with np.load(tmp_path / "small.npz", allow_pickle=False) as saved:
        columns = {name: saved[name] for name in saved.files}
    assert '"note": "by hand"' in str(columns.pop("meta"))
    kinds = {"op": np.uint8, "stream": np.uint8, "id": np.int32, "size": np.int64, "dt_us": np.int32}
    assert {name: column.dtype for name, column in columns.items()} == kinds
    assert columns["dt_us"].tolist() == [0, 5, 0, 2, 3, 1, 29, 1_000_000]


@pytest.mark.parametrize(
    ("name", "allocations", "gigabytes", "streams", "ratio"),
    [
        ("gpt2_train_varlen", 62_881, 28.90, 1, 1.213),
        ("gnn_sampled", 11_531, 12.05, 1, 2.978),
        ("stream_prefetch", 29_621, 2.75, 3, 1.597),
        ("four_streams", 2_388, 0.76, 5, 15.912),
    ],
)
def test_recorded_programs_come_to_what_was_measured(
    name: str, allocations: int, gigabytes: float, streams: int, ratio: float
) -> None:
    """The figures that were noted when the programs ran follow from their recordings."""
    trace = Trace.load(TRACES / f"{name}.npz")
    assert (trace.name, trace.device, trace.note) == (name, 0, "")
    assert (trace.allocations, round(trace.peak_requested / 1e9, 2), trace.streams) == (allocations, gigabytes, streams)
    assert round(trace.peak_recorded / trace.peak_requested, 3) == ratio
