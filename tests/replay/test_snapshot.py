"""Snapshots of PyTorch's memory become traces without contradictions, whatever they lack; the note says what."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncmem import InvalidRequest
from asyncmem.errors import BadTrace
from asyncmem.files import naming
from asyncmem.replay import from_snapshot, read
from asyncmem.replay.reading import load_snapshot

from .support import Torch, events, same

A, B, C = 0x7F00_0000_0000, 0x7F00_0020_0000, 0x7F00_0040_0000
SIDE = 0x5581_2345_6789
"""A stream's handle."""


def program() -> Torch:
    """Run a little program: A is used again on another stream's time, C stays."""
    torch = Torch()
    torch.alloc(A, 1000)
    torch.alloc(B, 700, stream=SIDE)
    torch.free(A)
    torch.alloc(C, 300)
    torch.request(B)
    torch.alloc(A, 900)
    torch.complete(B)
    torch.free(A)
    return torch


def test_a_whole_recording_becomes_a_trace() -> None:
    """Each free finds the allocation that was at its address then, streams are numbered, sizes are as asked for."""
    trace = from_snapshot(program().snapshot(), name="small")
    assert events(trace) == [
        ("ALLOCATE", 0, 1000, 0),
        ("ALLOCATE", 1, 700, 1),
        ("FREE", 0, 1000, 0),
        ("DONE", 0, 1000, 0),
        ("ALLOCATE", 2, 300, 0),
        ("FREE", 1, 700, 1),
        ("ALLOCATE", 3, 900, 0),
        ("DONE", 1, 700, 1),
        ("FREE", 3, 900, 0),
        ("DONE", 3, 900, 0),
    ]
    assert (trace.name, trace.device, trace.note) == ("small", 0, "")
    assert (trace.peak_requested, trace.peak_recorded) == (1700, 3 << 21)
    assert trace.time_us.tolist() == [10 * row for row in range(13)]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_are_read_as_pytorch_writes_them(tmp_path: Path, protocol: int) -> None:
    """Of every protocol that a version of Python writes by default, or that is asked for."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(program().snapshot(), protocol))
    assert same(read(path), from_snapshot(program().snapshot(), name="snapshot"))


@pytest.mark.parametrize("indent", [None, 2])
def test_json_of_the_same_shape_is_read(tmp_path: Path, indent: int | None) -> None:
    """Whatever the file is called."""
    path = tmp_path / "snapshot.npz"
    path.write_text("\n " + json.dumps(program().snapshot(), indent=indent), encoding="utf-8")
    assert same(read(path), from_snapshot(program().snapshot(), name="snapshot"))


# -- the beginning is missing --------------------------------------------------------------------------------------


def test_what_was_allocated_before_is_allocated_at_the_start() -> None:
    """Frees of unknown allocations, and blocks of the segments that nobody allocated, were there all the time."""
    trace = from_snapshot(program().snapshot(first=8))
    assert events(trace)[:3] == [("ALLOCATE", 0, 700, 1), ("ALLOCATE", 1, 300, 0), ("FREE", 0, 700, 1)]
    assert trace.note == "2 allocations (1000 B) had been made before it began"
    assert trace.peak_requested == 1200
    assert trace.peak_recorded == 3 << 21


def test_without_segments_only_what_is_freed_is_known_to_have_been_there() -> None:
    """A snapshot may have no segments: then C, which nobody frees, is not known of."""
    snapshot = program().snapshot(first=8)
    del snapshot["segments"]
    trace = from_snapshot(snapshot)
    assert trace.note == "1 allocation (700 B) had been made before it began"


def test_frees_under_way_at_the_beginning_are_left_out() -> None:
    """The program had freed it before, so to a replay it is not there any more."""
    trace = from_snapshot(program().snapshot(first=9))
    assert events(trace)[:3] == [("ALLOCATE", 0, 300, 0), ("ALLOCATE", 1, 900, 0), ("FREE", 1, 900, 0)]
    assert "1 free under way when it began, left out" in trace.note


def test_a_full_ring_is_said() -> None:
    """PyTorch says when its recording was full, and the note repeats it."""
    settings = {"trace_alloc_overflowed": True, "trace_alloc_max_entries": 100}
    trace = from_snapshot(program().snapshot(first=8, allocator_settings=settings))
    assert trace.note.startswith("the recording was full, so its beginning is missing; 2 allocations")


SLOTS = [A + (slot << 21) for slot in range(12)]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 1 << 21), st.sampled_from([0, SIDE, 5]), st.booleans())),
    st.floats(0, 1),
)
def test_a_recording_cut_anywhere_has_what_was_live_from_then_on(
    steps: list[tuple[int, int, int, bool]], share: float
) -> None:
    """The bytes live after each event are those of the whole program, wherever the ring cut its history off."""
    torch = Torch()
    live: dict[int, int] = {}
    leaving: set[int] = set()
    account: list[int] = []  # what is live after each entry
    for slot, size, stream, slowly in steps:
        addr = SLOTS[slot]
        if addr in leaving:
            leaving.remove(addr)
            torch.complete(addr)
        elif addr in live:
            del live[addr]
            torch.request(addr)
            account += [sum(live.values())] * (len(torch.entries[0]) - len(account))
            if slowly:
                leaving.add(addr)
            else:
                torch.complete(addr)
        else:
            torch.alloc(addr, size, stream=stream)
            account += [sum(live.values())] * (len(torch.entries[0]) - 1 - len(account))
            live[addr] = size
        account += [sum(live.values())] * (len(torch.entries[0]) - len(account))
    first = int(share * len(account))
    kept = [one["action"] for one in torch.entries[0][first:]]
    # A completion alone, in a recording without any request, counts as a free.
    assume("free_requested" in kept or ("alloc" in kept and "free_completed" not in kept))
    trace = from_snapshot(torch.snapshot(first=first))
    before = account[first - 1] if first else 0
    assert trace.peak_requested == max(before, *account[first:])
    assert trace.peak_recorded == len(torch.segments) << 21
    assert trace.allocations - kept.count("free_requested") == len(live)


# -- other things are missing --------------------------------------------------------------------------------------


def test_frees_that_are_missing_are_put_in() -> None:
    """Memory is not allocated twice at once: where its address is allocated again, the former one was freed."""
    torch = program()
    trace = from_snapshot(torch.snapshot(without=("free_requested", "free_completed")))
    assert events(trace)[-3:] == [("FREE", 0, 1000, 0), ("DONE", 0, 1000, 0), ("ALLOCATE", 3, 900, 0)]
    assert trace.note == (
        "1 free missing, put in where the address was allocated again; "
        "2 allocations live to its end, though the allocator had freed them by then"
    )


def test_a_completion_alone_is_a_free() -> None:
    """Some recordings lack all requests to free; then the completion is both."""
    torch = program()
    trace = from_snapshot(torch.snapshot(without=("free_requested",)))
    assert events(trace)[2:4] == [("FREE", 0, 1000, 0), ("DONE", 0, 1000, 0)]
    assert trace.note == ""
    assert from_snapshot(torch.snapshot(first=9, without=("free_requested",))).allocations == 3
    del torch.entries[0][4]  # and here one of them
    assert torch.entries[0][4]["action"] == "free_completed"
    trace = from_snapshot(torch.snapshot())
    assert events(trace)[2:4] == [("FREE", 0, 1000, 0), ("DONE", 0, 1000, 0)]
    assert trace.note == "1 free known by its completion alone"


def test_requests_alone_are_frees() -> None:
    """When the streams were done may be missing: nothing is replayed of it."""
    trace = from_snapshot(program().snapshot(without=("free_completed",)))
    # A was allocated again, so its first allocation was done with; of the others nobody knows.
    assert [event for event in events(trace) if event[0] == "DONE"] == [("DONE", 0, 1000, 0)]
    assert trace.note == ""


def test_frees_of_allocations_that_are_missing_are_left_out() -> None:
    """What was allocated while nobody recorded is not made up: its size is known, its place in the order is not."""
    torch = program()
    last = max(row for row, one in enumerate(torch.entries[0]) if one["action"] == "alloc")
    del torch.entries[0][last]
    trace = from_snapshot(torch.snapshot())
    assert (trace.allocations, trace.peak_requested) == (3, 1700)
    assert trace.note == "1 allocation missing, left out with their frees"
    torch.alloc(A, 500)
    del torch.entries[0][-1]
    assert from_snapshot(torch.snapshot()).note == "2 allocations missing, left out with their frees"


def test_an_address_known_from_a_completion_was_not_allocated_before() -> None:
    """Its free was under way when the recording began, so what is freed there later was allocated since."""
    torch = Torch()
    torch.alloc(A, 100)
    torch.alloc(B, 700)
    torch.request(A)
    torch.complete(A)
    torch.alloc(A, 900)
    del torch.entries[0][-1]
    torch.free(A)
    trace = from_snapshot(torch.snapshot(first=5))
    assert events(trace) == [("ALLOCATE", 0, 700, 0)]
    assert trace.note.endswith(
        "1 allocation missing, left out with their frees; 1 free under way when it began, left out"
    )


def test_without_times_every_event_counts_the_same() -> None:
    """Early versions of PyTorch recorded none."""
    torch = program()
    for entry in torch.entries[0]:
        del entry["time_us"]
    trace = from_snapshot(torch.snapshot())
    assert trace.time_us.tolist() == [20 * row for row in range(1, 14)]
    assert trace.note == "13 events without a time, taken to be 20 µs after the one before"


def test_events_keep_their_order_where_times_do_not() -> None:
    """The clock is read before the entry is written, so times may step back; the order is that of the list."""
    torch = program()
    torch.entries[0][3]["time_us"] -= 25
    trace = from_snapshot(torch.snapshot())
    assert trace.time_us.tolist()[:6] == [0, 10, 20, 20, 40, 50]
    assert events(trace) == events(from_snapshot(program().snapshot()))
    assert trace.note == "1 time before the last one, which was taken instead"


# -- streams, devices, other events --------------------------------------------------------------------------------


def test_streams_of_one_handle_are_one() -> None:
    """A handle may be a destroyed stream's; the allocator took both for one, and nobody can tell them apart."""
    torch = Torch()
    for addr, stream in ((A, SIDE), (B, 2**64 - 1), (C, 0)):
        torch.alloc(addr, 100, stream=stream)
    torch.free(A)
    torch.alloc(A, 200, stream=SIDE)
    trace = from_snapshot(torch.snapshot())
    assert [stream for op, _, _, stream in events(trace) if op == "ALLOCATE"] == [1, 2, 0, 1]


def test_each_device_is_a_trace_of_its_own() -> None:
    """Addresses and stream handles of several devices may be the same; who reads has to say which device is meant."""
    torch = Torch(devices=4)
    torch.alloc(A, 100, device=1, stream=SIDE)
    torch.alloc(A, 300, device=3, stream=7)
    torch.alloc(B, 400, device=3, stream=SIDE)
    torch.free(A, device=1)
    snapshot = torch.snapshot()
    one, three = from_snapshot(snapshot, device=1), from_snapshot(snapshot, device=3)
    assert (one.device, one.peak_requested, one.streams, one.note) == (1, 100, 2, "")
    assert (three.device, three.peak_requested, three.streams, three.note) == (3, 700, 3, "")
    assert one.peak_recorded == 1 << 21
    for wrong in (None, 0, 4, -1):
        with pytest.raises(InvalidRequest, match="device: expected 1, 3, which have events"):
            from_snapshot(snapshot, device=wrong)
    snapshot["device_traces"][1] = []
    assert from_snapshot(snapshot).device == 3
    with pytest.raises(InvalidRequest, match="device: expected 3, which has events, got 1"):
        from_snapshot(snapshot, device=1)


def test_other_events_are_passed_over() -> None:
    """Marks, and what later versions may add, are no allocations; what failed is counted in the note."""
    torch = program()
    for action in ("snapshot", "annotate", "something new"):
        torch.note(action, addr=0, size=0, stream=0)
    torch.note("oom", device_free=5, size=1 << 40, stream=0)
    trace = from_snapshot(torch.snapshot())
    assert events(trace) == events(from_snapshot(program().snapshot()))
    assert trace.note == "1 allocation that the device had no memory for, left out"


@pytest.mark.parametrize("tag", [{"internal_metadata": "mallocWithAddress"}, {"user_metadata": "x\nmallocWithAddress"}])
def test_what_the_allocator_allocates_for_itself_is_left_out(tag: dict[str, str]) -> None:
    """To place memory at an address, it takes what lies before and frees that: no program asked for it."""
    torch = program()
    for action in ("alloc", "free_requested", "free_completed"):
        torch.note(action, addr=B, size=1 << 20, stream=0, **tag)
    trace = from_snapshot(torch.snapshot())
    assert events(trace) == events(from_snapshot(program().snapshot()))
    assert trace.note == "3 events of the allocator's own, left out"


def test_segments_that_grow_and_shrink_are_followed() -> None:
    """What the allocator had from the driver is known also where it maps pages, and from before the recording."""
    torch = program()
    torch.note("segment_map", addr=C, size=10 << 20, stream=0)
    torch.note("segment_unmap", addr=C, size=10 << 20, stream=0)
    torch.release(A)
    assert from_snapshot(torch.snapshot()).peak_recorded == (3 << 21) + (10 << 20)
    trace = from_snapshot(torch.snapshot(first=8))
    assert trace.peak_recorded == (3 << 21) + (10 << 20)
    assert trace.columns.nbytes[0] == 3 << 21


def test_segments_of_early_versions_are_read() -> None:
    """Blocks without addresses lie side by side, and without sizes asked for they count whole."""
    snapshot = program().snapshot(first=8)
    for segment in snapshot["segments"]:
        segment["blocks"] = [{"size": 512, "state": "inactive"}, {"size": 1024, "state": "active_allocated"}]
    trace = from_snapshot(snapshot)
    assert trace.note.startswith("4 allocations (3.68 KiB) had been made")


# -- broken and hostile --------------------------------------------------------------------------------------------


def spoiled(row: int, **changes: Any) -> dict[str, Any]:
    """Return a snapshot in which one entry is changed."""
    torch = program()
    torch.entries[0][row] |= changes
    return torch.snapshot()


@pytest.mark.parametrize(
    ("snapshot", "text"),
    [
        (None, "expected a list device_traces, got none in the snapshot"),
        ([], "expected a list device_traces"),
        ({}, "expected a list device_traces"),
        ({"device_traces": {}}, "expected a list device_traces"),
        ({"device_traces": [{}]}, "a list of events a device"),
        ({"device_traces": []}, "got no events .*_record_memory_history"),
        ({"device_traces": [[], [None, 5, {}, {"action": 7}]]}, "got no events"),
        (spoiled(1, addr=None), "row 1: expected addr from 0 to 18446744073709551615, got None"),
        (spoiled(1, addr=-1), "row 1: expected addr"),
        (spoiled(1, addr=1 << 64), "row 1: expected addr"),
        (spoiled(1, size=-512), "row 1: expected size from 0 to 140737488355327, got -512"),
        (spoiled(1, size=1 << 47), "row 1: expected size"),
        (spoiled(1, size=True), "row 1: expected size"),
        (spoiled(1, size=1e3), r"row 1: expected size .*, got 1000\.0"),
        (spoiled(1, size="9" * 10_000), "row 1: expected size"),
        (spoiled(1, stream="side"), "row 1: expected stream"),
        (spoiled(1, time_us=1 << 60), "row 1: expected time_us"),
        (spoiled(3, action=[]), None),
        (program().snapshot(segments=7), "a list segments"),
        (program().snapshot(segments=[7]), "device from 0 .* in a segment"),
        (program().snapshot(segments=[{"device": 0, "total_size": 5, "stream": 0, "address": 0}]), "a list blocks"),
        (
            program().snapshot(
                segments=[{"device": 0, "total_size": 5, "stream": 0, "address": 0, "blocks": [{"size": None}]}]
            ),
            "size from 0 .* in a block",
        ),
        (
            program().snapshot(
                segments=[{"device": 0, "total_size": (1 << 47) - 1, "stream": 0, "address": 0, "blocks": []}] * 70_000
            ),
            "less than 128 TiB reserved before it",
        ),
    ],
)
def test_what_is_wrong_with_a_snapshot_is_said(snapshot: object, text: str | None) -> None:
    """What is missing or makes no sense is named, with the entry that it stands in."""
    if text is None:
        assert from_snapshot(snapshot).allocations
        return
    with pytest.raises(BadTrace, match=text):
        from_snapshot(snapshot)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b'{"a": 1',
        b'{"a": ' * 100_000,
        b'{"a": ' + b"[" * 1_000_000,
        b'{"device_traces": [[{"action": "alloc", "addr": ' + b"9" * 1_000_000 + b"}]]}",
        b'{"device_traces": "\xff"}',
        b"{}",
        b"\x80\x04N.",
        b"\x80\x04",
    ],
)
def test_broken_files_are_refused(tmp_path: Path, data: bytes) -> None:
    """Cut off, too deep, no text or no snapshot: the error names the file."""
    path = tmp_path / "broken"
    path.write_bytes(data)
    with pytest.raises(BadTrace) as caught:
        read(path)
    assert caught.value.file == str(path)
    assert len(str(caught.value)) < 600


def test_what_does_not_fit_into_memory_is_refused() -> None:
    """That is the file's fault too, and says so."""
    with pytest.raises(BadTrace, match="trace 'huge': expected what fits into memory"), naming("huge"):
        bytearray(1 << 62)


def test_a_class_in_a_snapshot_is_refused(tmp_path: Path) -> None:
    """A snapshot is data: what names a class or a function is not loaded."""
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(program().snapshot(extra=Path), 4))
    with pytest.raises(BadTrace, match="a class or a function to call"):
        read(path)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 1 << 70),
    st.floats(),
    st.sampled_from(["alloc", "free_requested", "free_completed", "segment_free", "active_allocated", A, B, C, 0]),
    st.just([]),
    st.just({}),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 400), VALUES), min_size=1, max_size=6), st.integers(0, 9))
def test_snapshots_with_anything_in_them_are_traces_or_refused(changes: list[tuple[int, Any]], first: int) -> None:
    """Whatever stands in whatever place: a trace that keeps the rules comes of it, or one of the two errors."""
    snapshot = load_snapshot(json.dumps(program().snapshot(first=first)).encode())
    places: list[tuple[Any, Any]] = []

    def walk(inside: Any) -> None:
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                walk(inside[key])

    walk(snapshot)
    for place, value in changes:
        inside, key = places[place % len(places)]
        inside[key] = value
    try:
        trace = from_snapshot(snapshot)
    except InvalidRequest:
        return
    assert trace.peak_requested >= 0
