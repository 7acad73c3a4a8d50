"""Archives of columns are read as far as they make sense; what does not is named, and costs nothing."""

import contextlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncmem import InvalidRequest
from asyncmem.errors import BadTrace
from asyncmem.replay import Trace, read

from .support import TRACES

PLAIN: dict[str, Any] = {
    "op": np.array([3, 0, 0, 1], np.uint8),
    "stream": np.array([0, 0, 1, 0], np.uint8),
    "id": np.array([-1, 0, 1, 0], np.int32),
    "size": np.array([2 << 20, 512, 0, 512], np.int64),
    "dt_us": np.array([0, 3, 0, 20], np.int32),
}
META = {"version": 1, "name": "plain", "device": 2, "note": "by hand"}


def archive(**changes: Any) -> bytes:
    """Make an archive as numpy does, with some columns changed, added, or (None) left out."""
    file = io.BytesIO()
    np.savez(file, **{name: column for name, column in (PLAIN | changes).items() if column is not None})
    return file.getvalue()


def with_member(name: str, data: bytes, packing: int = zipfile.ZIP_STORED) -> bytes:
    """Make an archive in which one member is what is given."""
    file = io.BytesIO(archive(**{name.removesuffix(".npy"): None}))
    with zipfile.ZipFile(file, "a", packing) as changed:
        changed.writestr(name, data)
    return file.getvalue()


def head(text: str, length: int | None = None) -> bytes:
    """Make the head of an array."""
    return b"\x93NUMPY\x01\x00" + (len(text) if length is None else length).to_bytes(2, "little") + text.encode()


def written(tmp_path: Path, data: bytes) -> Path:
    """Put it into a file."""
    path = tmp_path / "some.npz"
    path.write_bytes(data)
    return path


def test_columns_of_others_are_read(tmp_path: Path) -> None:
    """An archive that says nothing of itself is called by its file's name, and may have more than is needed."""
    trace = read(written(tmp_path, archive(extra=np.zeros((3, 3)))))
    assert (trace.name, trace.device, trace.note) == ("some", 0, "")
    assert trace.time_us.tolist() == [0, 3, 3, 23]
    assert (trace.peak_requested, trace.peak_recorded, trace.streams) == (512, 2 << 20, 2)


def test_columns_of_other_widths_and_byte_orders_are_read(tmp_path: Path) -> None:
    """What counts are the numbers, not how many bytes they have in which order."""
    wide = {name: column.astype(">i8") for name, column in PLAIN.items()}
    trace = read(written(tmp_path, archive(**wide)))
    assert trace.nbytes.tolist() == [2 << 20, 512, 0, 512]


def test_the_words_of_an_archive_are_read(tmp_path: Path) -> None:
    """Name, device and note come from `meta`, whatever the file is called."""
    trace = read(written(tmp_path, archive(meta=np.array(json.dumps(META)))))
    assert (trace.name, trace.device, trace.note) == ("plain", 2, "by hand")


def test_another_device_than_the_recorded_one_is_refused(tmp_path: Path) -> None:
    """Who asks for a device gets its events or an error, and never those of another."""
    path = written(tmp_path, archive(meta=np.array(json.dumps(META))))
    assert read(path, device=2).device == 2
    with pytest.raises(InvalidRequest, match="device: expected 2, the only one"):
        read(path, device=0)


@pytest.mark.parametrize("name", [*PLAIN])
def test_a_missing_column_is_named(tmp_path: Path, name: str) -> None:
    """Which column it is that an archive lacks."""
    with pytest.raises(BadTrace, match=rf"some.npz': expected an archive with .*, got no {name}.npy"):
        read(written(tmp_path, archive(**{name: None})))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (archive(size=PLAIN["size"][:-1]), "expected columns of one length, got 3 in nbytes and 4 in op"),
        (archive(size=PLAIN["size"].astype(float)), "size.npy of another kind"),
        (archive(size=np.array([None] * 4, object)), "size.npy of another kind"),
        (archive(size=PLAIN["size"].reshape(2, 2)), "size.npy of another kind"),
        (archive(size=np.zeros(4, [("a", "<i4"), ("b", "<i4")])), "size.npy of another kind"),
        (archive(dt_us=np.array("text")), "dt_us"),
        (archive(op=np.array(["a"] * 4)), "whole numbers in op"),
        (archive(op=np.array([3, 0, 0, 5], np.uint8)), "row 3: expected op from 0 to 4, got 5"),
        (archive(id=np.array([-1, 0, 7, 0])), "row 2: expected allocations numbered from 0, got number 7"),
        (archive(dt_us=np.array([0, 3, -1, 20])), "row 2: expected 0 or more in dt_us, got -1"),
        (archive(dt_us=np.array([0, 1 << 62, 1 << 62, 1 << 62])), "got a sum of centuries"),
        (archive(meta=np.array("{}")), "expected meta with version"),
        (archive(meta=np.array(json.dumps(META | {"version": 2}))), "newer asyncmem"),
        (archive(meta=np.array(json.dumps(META | {"device": "2"}))), "expected meta with version"),
        (archive(meta=np.array("[" * 100_000)), "damaged"),
        (archive(meta=np.array("no json")), "damaged"),
        (archive(meta=np.frombuffer(b"\xff" * 8, "<U2")), "damaged"),
        (archive(meta=np.array([1, 2])), "2 rows of int64 in meta.npy"),
        (with_member("op.npy", b""), "op.npy with another head"),
        (with_member("op.npy", b"\x93NUMPY\x03\x00" + b"\xff" * 9), "op.npy with another head"),
        (with_member("op.npy", head("{'descr': '|u1', 'fortran_order': False, 'shape': (4,)}") + b"\0" * 3), "3 bytes"),
        (
            with_member("op.npy", head(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({1 << 60},)}}")),
            "rows of",
        ),
        (with_member("op.npy", head("{'descr': '<i8', 'fortran_order': False, 'shape': (-1,)}")), "another kind"),
        (with_member("op.npy", head("{'descr': '<U0', 'fortran_order': False, 'shape': (4,)}")), "damaged"),
        (with_member("op.npy", head("{'descr': '|O', 'fortran_order': False, 'shape': (4,)}")), "another kind"),
        (with_member("op.npy", head("__import__('os').getcwd()")), "another kind"),
        (with_member("op.npy", head("(" * 9000)), "another kind"),
        (with_member("op.npy", head("{", 60_000)), "another head"),
        (with_member("op.npy", b"x" * 99, zipfile.ZIP_LZMA), "packed in another way"),
        (archive()[:-1], "damaged"),
        (archive()[:400], "damaged"),
        (b"PK\x03\x04", "damaged"),
        (b"", "another kind of file"),
        (b"time,size\n1,2\n", "another kind of file"),
        (b"asyncmem and records", "--to torch"),
    ],
)
def test_what_is_wrong_with_an_archive_is_said(tmp_path: Path, data: bytes, text: str) -> None:
    """Whatever it is, the error names the file, and the row where there is one."""
    with pytest.raises(BadTrace, match=text) as caught:
        read(written(tmp_path, data))
    assert caught.value.file == str(tmp_path / "some.npz")


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Sums guard the columns: what was damaged on the way is not replayed."""
    data = bytearray(archive())
    place = data.index(PLAIN["size"].tobytes())
    data[place + 2] ^= 1
    with pytest.raises(BadTrace, match="damaged"):
        read(written(tmp_path, bytes(data)))


def test_an_archive_that_swells_is_refused_before_it_does(tmp_path: Path) -> None:
    """More rows than so many bytes can hold are not unpacked."""
    file = io.BytesIO()
    np.savez_compressed(file, **{name: np.zeros(1 << 20, column.dtype) for name, column in PLAIN.items()})
    assert len(file.getvalue()) < 20_000
    with pytest.raises(BadTrace, match=r"expected at most \d+, .* got 1048576 rows of uint8 in op.npy"):
        read(written(tmp_path, file.getvalue()))


def test_an_archive_that_lies_about_its_length_is_refused(tmp_path: Path) -> None:
    """No more is unpacked than was said, so that what was added up holds."""
    file = io.BytesIO()
    np.savez_compressed(file, **PLAIN | {"op": np.zeros(1 << 20, np.uint8)})
    data, length = file.getvalue(), (1 << 20) + 128
    lie = data.replace(length.to_bytes(4, "little"), (200).to_bytes(4, "little"))
    assert lie != data
    with pytest.raises(BadTrace, match=r"damaged|bytes in op"):
        read(written(tmp_path, lie))


def test_a_file_that_cannot_be_opened_is_no_bad_trace(tmp_path: Path) -> None:
    """The operating system's own errors say best that a file is missing, or none."""
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.npz")
    with pytest.raises(FileNotFoundError):
        Trace.load(tmp_path / "none.npz")
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


LARGE = (TRACES / "four_streams.npz").read_bytes()


@settings(max_examples=200)
@given(st.sampled_from([archive(meta=np.array(json.dumps(META))), LARGE]), st.data())
def test_damaged_archives_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, whole: bytes, data: st.DataObject
) -> None:
    """Cut or changed anywhere, an archive gives a trace or the one error, and no other."""
    spoiled = bytearray(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(whole)), st.integers(0, 255)), max_size=5)):
        if place < len(spoiled):
            spoiled[place] = byte
    path = tmp_path_factory.getbasetemp() / "spoiled.npz"
    path.write_bytes(bytes(spoiled))
    with contextlib.suppress(BadTrace):
        assert Trace.load(path).allocations >= 0
