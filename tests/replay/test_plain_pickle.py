"""Pickles of plain data are read; whatever else a pickle may do, it does not do here."""

import contextlib
import copyreg
import io
import os
import pickle
import shlex
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmem.errors import BadTrace
from asyncmem.replay.reading import PlainUnpickler, load_plain

WHOLE = st.integers(-(1 << 71), (1 << 71) - 1)
FLAT = st.one_of(st.lists(WHOLE, max_size=3).map(tuple), WHOLE, st.floats(allow_nan=False), st.booleans(), st.none())
PLAIN = st.recursive(
    st.one_of(FLAT, st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.one_of(st.text(), WHOLE), inner)),
    max_leaves=50,
)


class Calls:
    """Makes a file when it is unpickled as usual."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f": > {shlex.quote(str(self.path))}",)


@given(PLAIN, st.integers(2, 5))
def test_plain_data_comes_back_as_it_was(data: object, protocol: int) -> None:
    """Dicts, lists, flat tuples, text and numbers of any protocol are what Python would make of them."""
    assert load_plain(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", range(2, 6))
def test_large_data_comes_back_as_it_was(protocol: int) -> None:
    """Nor does size matter: long numbers for what is remembered, long texts, and pickles in frames."""
    shared = ["frame"]
    data = [{"id": (0, n), "size": n, f"key {n}": "x" * (n % 600), "frames": shared} for n in range(40_000)]
    found: Any = load_plain(pickle.dumps(data, protocol))
    assert found == data
    assert found[0]["frames"] is found[-1]["frames"]


def test_a_frame_may_begin_between_any_two_codes() -> None:
    """Python puts the head of a frame wherever the last one is full, inside of a tuple too."""
    assert load_plain(b"\x80\x04K\x01" + b"\x95\x02" + bytes(7) + b"K\x02\x95\x02" + bytes(7) + b"\x86.") == (1, 2)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    """A file that would have something done is refused, wherever in it that stands, and nothing has been done."""
    path = tmp_path / "made"
    data = pickle.dumps({"segments": [], "device_traces": [[Calls(path)]]}, protocol)
    with pytest.raises(BadTrace, match=r"got a class or a function to call at byte \d+"):
        load_plain(data)
    with pytest.raises(pickle.UnpicklingError, match="system is a class or a function"):
        PlainUnpickler(io.BytesIO(data)).load()
    assert not path.exists()
    pickle.loads(data)
    assert path.exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\ngetcwd\n)R",
        b"\x8c\x02os\x8c\x06getcwd\x93)R",
        b"(ios\ngetcwd\n",
        b"(cos\ngetcwd\no",
        b"cos\ngetcwd\n)\x81",
        b"cos\ngetcwd\n)}\x92",
        b"}}b",
        b"}Q",
        b"Pname\n",
        b"\x82\x07",
        b"\x83\x07\x00",
        b"\x84\x07\x00\x00\x00",
    ],
)
def test_every_way_to_a_class_or_function_is_refused(code: bytes) -> None:
    """By name, by number, made, called, filled in, or fetched from outside."""
    copyreg.add_extension("os", "getcwd", 7)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(BadTrace, match="a class or a function to call"):
            load_plain(b"\x80\x04" + code + b".")
    finally:
        copyreg.remove_extension("os", "getcwd", 7)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "data",
    [
        {1, 2},
        b"bytes",
        bytearray(b"1"),
        1 << 80,
        ((1, 2), 3),
        ([],),
        ("text",),
        ((1,), 2, 3, 4),
        (1, 2, 3, 4),
        OrderedDict(),
        1j,
        print,
    ],
)
def test_what_is_no_plain_data_is_refused(data: object) -> None:
    """Sets, bytes, huge numbers, objects, and tuples but of up to three numbers have no place in a recording."""
    for protocol in range(2, 6):
        with pytest.raises(BadTrace, match="expected dicts, lists"):
            load_plain(pickle.dumps([data], protocol))


def hashes_for_ever() -> bytes:
    """Make a dict with a key that is a tuple of a tuple twice, a hundred levels deep."""
    return b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 100 + b"Ns."


@pytest.mark.parametrize(
    "data",
    [
        hashes_for_ever(),
        b"\x80\x02Nr" + (1 << 24).to_bytes(4, "little") + b".",
        b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.",
        b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
        b"\x80\x04X" + (1 << 31).to_bytes(4, "little") + b"x.",
        b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        b"\x80\x02\x8b" + (1 << 30).to_bytes(4, "little") + b"x.",
        b"\x80\x02" + b"(" * 1_000_000,
        b"\x80\x02" + b"]" * 1_000_000,
        b"\x80\x02]q\x00" + b"h\x00a" * 300_000,
        b"\x80\x02I" + b"9" * 100_000 + b"\n.",
    ],
)
def test_hostile_pickles_end_soon(data: bytes) -> None:
    """Declared sizes, numbers to remember under, depth and hashes cost no more than the file is long."""
    began = time.perf_counter()
    with pytest.raises(BadTrace):
        load_plain(data)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02" + b"]" * 1_000_000 + b"a" * 999_999 + b".",
        b"\x80\x02]q\x00" + b"h\x00a" * 300_000 + b".",
    ],
)
def test_what_is_deep_or_round_is_read_and_forgotten(data: bytes) -> None:
    """A million lists in each other, or one that holds itself, are lists, and can be let go of."""
    assert isinstance(load_plain(data), list)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x04",
        b"\x80\x01N.",
        b"\x80\x06N.",
        b"\x80\x02.",
        b"\x80\x02h\x05.",
        b"\x80\x02}a.",
        b"\x80\x02]Ns.",
        b"\x80\x02}]Ns.",
        b"\x80\x02u.",
        b"\x80\x02}(Nu.",
        b"\x80\x02]K\x01K\x02s.",
        b"\x80\x04\x8c\x01\xff.",
        b"\x80\x02K\x01\x86.",
    ],
)
def test_pickles_that_make_no_sense_are_refused(data: bytes) -> None:
    """Nothing on the stack, nothing remembered, nothing to fill: whatever Python makes of it, it is one error here."""
    with pytest.raises(BadTrace):
        load_plain(data)


FILE = pickle.dumps({"device_traces": [[{"action": "alloc", "addr": 1 << 47, "size": 1.5, "pool": (0, 1)}]]}, 4)


@settings(max_examples=500)
@given(st.one_of(st.binary(), st.binary().map(b"\x80\x04".__add__)))
def test_random_bytes_are_data_or_refused(data: bytes) -> None:
    """Nothing but plain data or the one error comes of any bytes."""
    with contextlib.suppress(BadTrace):
        load_plain(data)


def test_a_pickle_that_is_cut_off_is_refused() -> None:
    """Wherever that is."""
    for length in range(len(FILE)):
        with pytest.raises(BadTrace):
            load_plain(FILE[:length])


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(2, len(FILE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_pickles_are_data_or_refused(changes: list[tuple[int, int]]) -> None:
    """Bytes changed anywhere in a good file are noticed, or are other plain data."""
    spoiled = bytearray(FILE)
    for place, byte in changes:
        spoiled[place] = byte
    with contextlib.suppress(BadTrace):
        load_plain(bytes(spoiled))
