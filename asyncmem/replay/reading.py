"""Recordings from files of all kinds, and from PyTorch's snapshots. The contents of a file decide, and not its name."""

import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from os import PathLike
from pathlib import Path
from pickle import BINUNICODE, SHORT_BINUNICODE, STOP, Unpickler, UnpicklingError
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncmem.errors import BadTrace, InvalidRequest
from asyncmem.figures import format_count, format_size
from asyncmem.files import naming, open_file, parse_json
from asyncmem.replay.columns import LATEST_US, Columns, Op
from asyncmem.replay.trace import Trace
from asyncmem.units import MAX_SIZE

EVENT_US: Final = 20
"""What an event counts for where no times were recorded; real programs come to 14 to 130."""


@dataclass(slots=True)
class Block:
    """One allocation; it is numbered once all that were made before the recording are known."""

    nbytes: int
    stream: int
    number: int = -1


class History:
    """The events of one device, in their order: each by its address, bytes, and the handle of its stream.

    What PyTorch's allocator wrote down may lack its beginning, its times, and single kinds of events. An allocation is
    known by its address alone, which is soon another's. Whatever is missing is put in or left out, and counted, so that
    a note can say so.

    Attributes:
        repairs: How often something was missing, by the name of the sentence that says so.
    """

    def __init__(self, *, requests: bool) -> None:
        """Begin; `requests` says whether requests to free are among the events, or only their completion."""
        self.repairs: Counter[str] = Counter()
        self._requests = requests
        self._rows: list[tuple[Op, Block, int]] = []  # with their times
        self._allocations: list[Block] = []
        self._before: dict[int, Block] = {}  # live before the recording, by address
        self._live: dict[int, Block] = {}
        self._leaving: dict[int, Block] = {}  # their free was asked for and is not complete
        self._known: set[int] = set()  # addresses of which there was any event
        self._streams = {0: 0}  # raw handles; the default stream's is 0
        self._now = 0
        self._reserved = 0
        self._reserved_before = 0

    def at(self, time_us: int | None) -> None:
        """Set the time of the next event, in microseconds since the recording began; None where it is not known."""
        if time_us is None:
            self.repairs["untimed"] += 1
            self._now += EVENT_US
        elif time_us < self._now:
            self.repairs["back"] += 1
        else:
            self._now = time_us

    # -- what the program did --------------------------------------------------------------------------------------

    def alloc(self, address: int, nbytes: int, stream: int) -> None:
        """Note an allocation. Whatever was at its address is gone, whether or not its free was recorded."""
        lost = self._live.get(address)
        if lost is not None:
            self.repairs["free"] += 1
            self.free_requested(address, lost.nbytes, stream)
        if address in self._leaving:
            self.free_completed(address, nbytes, stream)
        block = self._live[address] = Block(nbytes, self._stream(stream))
        self._allocations.append(block)
        self._known.add(address)
        self._rows.append((Op.ALLOCATE, block, self._now))

    def free_requested(self, address: int, nbytes: int, stream: int) -> None:
        """Note that the program freed what is at an address."""
        block = self._live.pop(address, None) or self._allocated_before(address, nbytes, stream)
        if block is None:
            self.repairs["allocation"] += 1
        else:
            self._leaving[address] = block
            self._rows.append((Op.FREE, block, self._now))

    def free_completed(self, address: int, nbytes: int, stream: int) -> None:
        """Note that the streams were seen done with what was freed; where no free was asked for, it is both."""
        if address not in self._leaving:
            self._miss_request(address, nbytes, stream)
        block = self._leaving.pop(address, None)
        if block is not None:
            self._rows.append((Op.DONE, block, self._now))

    # -- what the allocator did ------------------------------------------------------------------------------------

    def reserve(self, op: Op, nbytes: int, stream: int) -> None:
        """Note that it took memory from the driver (`GROW`), or gave some back (`SHRINK`)."""
        self._reserved += nbytes if op == Op.GROW else -nbytes
        self._rows.append((op, Block(nbytes, self._stream(stream)), self._now))

    # -- how it ended ----------------------------------------------------------------------------------------------

    def end(self, live: Iterable[tuple[int, int, int]], reserved: int) -> None:
        """Compare with what the allocator had when the recording ended: what was never allocated was there before.

        Args:
            live: Address, bytes and stream of each allocation.
            reserved: Bytes from the driver.

        Raises:
            BadTrace: More must have been reserved at the beginning than any device has.
        """
        found = set()
        for address, nbytes, stream in live:
            found.add(address)
            if address not in self._live and self._allocated_before(address, nbytes, stream) is None:
                self.repairs["allocation"] += 1
        self.repairs["end"] += len(self._live.keys() - found)
        self._reserved_before = max(0, reserved - self._reserved)
        if self._reserved_before >= MAX_SIZE:
            raise BadTrace(format_size(self._reserved_before), f"less than {format_size(MAX_SIZE)} reserved before it")

    def columns(self) -> Columns:
        """Return the whole history: first what was there before, in the order of addresses, then the events."""
        before = [block for _, block in sorted(self._before.items())]
        for number, block in enumerate(before + self._allocations):
            block.number = number
        rows = [(Op.GROW, Block(self._reserved_before, 0), 0)] if self._reserved_before else []
        rows += [(Op.ALLOCATE, block, 0) for block in before]
        table: NDArray[Any] = np.array(
            [(op, one.stream, one.number, one.nbytes, time) for op, one, time in rows + self._rows], np.int64
        )
        return Columns(*table.reshape(-1, len(Columns._fields)).T)

    def sentences(self) -> Iterator[str]:
        """Return sentences on what was missing."""
        if self._before:
            nbytes = format_size(sum(block.nbytes for block in self._before.values()))
            yield f"{format_count(len(self._before), 'allocation')} ({nbytes}) had been made before it began"
        for name, (noun, sentence) in _REPAIRS.items():
            if self.repairs[name]:
                yield f"{format_count(self.repairs[name], noun)} {sentence}"

    def _miss_request(self, address: int, nbytes: int, stream: int) -> None:
        if address in self._live or not self._requests:
            self.repairs["request"] += self._requests
            self.free_requested(address, nbytes, stream)
        elif address not in self._known:
            self._known.add(address)
            self.repairs["leaving"] += 1

    def _allocated_before(self, address: int, nbytes: int, stream: int) -> Block | None:
        # An address of which there was no event yet has belonged to one allocation since before the recording began.
        if address in self._known:
            return None
        self._known.add(address)
        block = self._before[address] = Block(nbytes, self._stream(stream))
        return block

    def _stream(self, handle: int) -> int:
        return self._streams.setdefault(handle, len(self._streams))


_REPAIRS: Final = {
    "free": ("free", "missing, put in where the address was allocated again"),
    "request": ("free", "known by its completion alone"),
    "allocation": ("allocation", "missing, left out with their frees"),
    "leaving": ("free", "under way when it began, left out"),
    "end": ("allocation", "live to its end, though the allocator had freed them by then"),
    "refused": ("allocation", "that the device had no memory for, left out"),
    "synthetic": ("event", "of the allocator's own, left out"),
    "untimed": ("event", f"without a time, taken to be {EVENT_US} µs after the one before"),
    "back": ("time", "before the last one, which was taken instead"),
}


_ARCHIVES: Final = (b"PK\x03\x04", b"PK\x05\x06")
_SNAPSHOTS: Final = (b"\x80", b"{")
_RECORDS: Final = b"asyncmem"
"""How an .amem begins, which is read by others."""
_SPACE: Final = b" \t\r\n"
_BLOCKS: Final = {
    "alloc": History.alloc,
    "free_requested": History.free_requested,
    "free_completed": History.free_completed,
}
_DRIVER: Final = {
    "segment_alloc": Op.GROW,
    "segment_map": Op.GROW,
    "segment_free": Op.SHRINK,
    "segment_unmap": Op.SHRINK,
}
_SYNTHETIC: Final = "mallocWithAddress"
_FEW: Final = 16
"""Devices that an error names."""
_RECORD: Final = "was torch.cuda.memory._record_memory_history() called before what is to be recorded?"


def read(path: str | PathLike[str], device: int | None = None) -> Trace:
    """Read a recording: one that `Trace.save` wrote, columns of the same form, or a snapshot of PyTorch's memory.

    A snapshot is a pickle of protocol 2 to 5, as `torch.cuda.memory._dump_snapshot` writes it, or JSON of the same
    shape. No class or function that a file names is ever loaded or called.

    Args:
        path: The file.
        device: The number of the device; None where the file has only one.

    Raises:
        BadTrace: The file is none of these, is cut off or damaged, or contradicts itself; it names the first wrong row.
        InvalidRequest: The file has nothing of that device, or has several and none was chosen.
        OSError: The file cannot be read.
    """
    path = Path(path)
    with open_file(path) as file:
        head = file.read(64).lstrip(_SPACE)
        if head.startswith(_ARCHIVES):
            return _of_device(Trace.load(path), device)
        if head.startswith(_SNAPSHOTS):
            file.seek(0)
            with naming(path):
                return from_snapshot(load_snapshot(file.read()), device=device, name=path.stem)
    hint = "asyncmem export --to torch makes a snapshot of it" if head.startswith(_RECORDS) else ""
    expected = "columns in an .npz, or a snapshot as pickle or JSON"
    raise BadTrace("another kind of file", expected, file=str(path), hint=hint)


def _of_device(trace: Trace, device: int | None) -> Trace:
    if device is None or device == trace.device:
        return trace
    raise InvalidRequest("device", device, f"{trace.device}, the only one of this recording")


def load_snapshot(data: bytes) -> object:
    """Read a file's contents, JSON or a pickle of plain data; see `from_snapshot` for what is in it.

    Raises:
        BadTrace: It is neither, cut off or damaged, or a pickle that names a class or a function.
    """
    if data[:1] == b"\x80":
        return load_plain(data)
    try:
        return parse_json(data)
    except ValueError as error:
        raise BadTrace(f"text that cannot be read ({error})", "JSON") from error


def from_snapshot(snapshot: object, *, device: int | None = None, name: str = "") -> Trace:
    """Make a trace of what one device's allocator did, from a snapshot such as `torch.cuda.memory._snapshot()` returns.

    Sizes are as the program asked for them. Frees find their allocation by the address that was live at the time.
    Streams are numbered, the default stream as 0: two that had the same handle one after the other are one, as they
    were to the allocator. What had been allocated before the recording began, or fell out of its ring, is allocated at
    the start, as far as it was freed later or is in the snapshot's segments. The trace's `note` says what was repaired.

    Args:
        snapshot: The dict with `device_traces` and, if it is to be whole, `segments`.
        device: The number of the device; None where only one has events.
        name: What tables call it.

    Raises:
        BadTrace: It is not of that shape, or has no allocations; the row is the number of the entry.
        InvalidRequest: The device has no events, or it is not said which of several is meant.
    """
    traces = _list(snapshot, "device_traces", "the snapshot")
    if not all(isinstance(one, list) for one in traces):
        raise BadTrace("other things in device_traces", "a list of events a device")
    _need_own(traces, "device")
    number = _choose(traces, device)
    entries = traces[number]
    history = History(requests=any(_action(one) == "free_requested" for one in entries))
    _add_events(history, entries)
    if isinstance(snapshot, dict) and "segments" in snapshot:
        everywhere = _list(snapshot, "segments", "the snapshot")
        segments = [one for one in everywhere if _whole(one, "device", "segment") == number]
        _need_own([_list(one, "blocks", "a segment") for one in segments], "segment")
        reserved = sum(_whole(one, "total_size", "segment", MAX_SIZE) for one in segments)
        history.end((block for one in segments for block in _allocated(one)), reserved)
    note = "; ".join([*_overflow(snapshot), *history.sentences()])
    return Trace(*history.columns(), name=name, device=number, note=note)


def _choose(traces: list[list[Any]], device: int | None) -> int:
    there = [number for number, entries in enumerate(traces) if any(_action(one) in _BLOCKS for one in entries)]
    if not there:
        raise BadTrace("no events", "a snapshot with the history of its allocations", hint=_RECORD)
    if device is None and len(there) == 1:
        return there[0]
    if device is None or device not in there:
        choices = ", ".join(map(str, there[:_FEW])) + (" or another" if len(there) > _FEW else "")
        raise InvalidRequest("device", device, f"{choices}, which {'has' if len(there) == 1 else 'have'} events")
    return device


def _add_events(history: History, entries: list[Any]) -> None:
    began: int | None = None
    for row, entry in enumerate(entries):
        action = _action(entry)
        if action not in _BLOCKS and action not in _DRIVER:
            history.repairs["refused"] += action == "oom"
            continue
        if _is_synthetic(entry):
            history.repairs["synthetic"] += 1
            continue
        time = _whole(entry, "time_us", row, LATEST_US) if "time_us" in entry else None
        began = time if began is None else began
        history.at(None if time is None or began is None else time - began)
        size, stream = _whole(entry, "size", row, MAX_SIZE), _whole(entry, "stream", row)
        address = _whole(entry, "addr", row)
        if action in _BLOCKS:
            _BLOCKS[action](history, address, size, stream)
        else:
            history.reserve(_DRIVER[action], size, stream)


def _is_synthetic(entry: dict[str, Any]) -> bool:
    # Where memory was asked for at a certain address, the allocator takes what lies before it, and frees that at once.
    tags = (entry.get("internal_metadata"), entry.get("user_metadata"))
    return any(isinstance(tag, str) and tag.endswith(_SYNTHETIC) for tag in tags)


def _allocated(segment: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    stream, address = _whole(segment, "stream", "segment"), _whole(segment, "address", "segment")
    for block in _list(segment, "blocks", "a segment"):
        nbytes = _whole(block, "size", "block", MAX_SIZE)
        if block.get("state") == "active_allocated":
            asked = _whole(block, "requested_size", "block", MAX_SIZE) if "requested_size" in block else nbytes
            yield address, asked, stream
        address += nbytes  # blocks lie side by side; some versions say no address of each


def _overflow(snapshot: object) -> Iterator[str]:
    settings = snapshot.get("allocator_settings") if isinstance(snapshot, dict) else None
    if isinstance(settings, dict) and settings.get("trace_alloc_overflowed") is True:
        yield "the recording was full, so its beginning is missing"


def _action(entry: object) -> str:
    action = entry.get("action") if isinstance(entry, dict) else None
    return action if isinstance(action, str) else ""


def _list(record: object, key: str, place: str) -> list[Any]:
    found = record.get(key) if isinstance(record, dict) else None
    if not isinstance(found, list):
        raise BadTrace(f"none in {place}", f"a list {key}")
    return found


def _need_own(lists: list[list[Any]], owner: str) -> None:
    # A pickle may name one list in two bytes as often as it likes, and each time it would be gone through.
    full = [id(one) for one in lists if one]
    if len(set(full)) < len(full):
        raise BadTrace(f"one list for several {owner}s", f"a list for each {owner}")


def _whole(record: object, key: str, place: int | str, end: int = 1 << 64) -> int:
    found = record.get(key) if isinstance(record, dict) else None
    if type(found) is not int or not 0 <= found < end:
        row, where = (place, "") if isinstance(place, int) else (None, f" in a {place}")
        raise BadTrace(f"{reprlib.repr(found)}{where}", f"{key} from 0 to {end - 1}", row=row)
    return found


# -- pickles of plain data --------------------------------------------------------------------------------------------

# An unpickler that refuses classes can still be made to fill memory, or to hash for ever, by a file of a few bytes. So
# the file is looked through first: only the codes of plain data may be in it, and only as far as they are harmless.

PLAIN: Final = "dicts, lists, tuples of up to three integers, text, numbers, True, False and None"

_HEAD: Final = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_CALLS: Final = b"c\x93iRob\x81\x92\x82\x83\x84PQ"
# A value that was remembered; None, True, False, marks, containers, filling them; remembering the last value; a float.
_SIMPLE: Final = rb"h.|j.{4}|[N\x88\x89(}\])aesu\x94]+|q.|G.{8}"
_LONGS: Final = b"|".join(rb"\x%02x.{%d}" % (nbytes, nbytes) for nbytes in range(10))  # wider ones could collide
_SHORTEST_PUT: Final = 6  # bytes for a value and for remembering it under a long number
_DAMAGE: Final = (AttributeError, EOFError, IndexError, KeyError, OverflowError, TypeError, UnpicklingError, ValueError)


def load_plain(data: bytes) -> object:
    """Return what a pickle of protocol 2 to 5 holds.

    Raises:
        BadTrace: It is cut off, damaged, or has more in it than plain data.
    """
    _check_codes(data)
    try:
        # The unpickler reads ahead where it can peek.
        return PlainUnpickler(BufferedReader(BytesIO(data))).load()
    except _DAMAGE as error:
        raise BadTrace(f"a damaged pickle ({error})", PLAIN) from error


class PlainUnpickler(Unpickler):
    """The second lock, should something have been overlooked: it refuses every class and every function."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise UnpicklingError(f"{module}.{name} is a class or a function")


def _check_codes(data: bytes) -> None:
    tokens = _tokens(len(data))
    if not _HEAD.match(data):
        raise BadTrace("another beginning", "a pickle of protocol 2 to 5")
    at = 2
    while (code := data[at : at + 1]) != STOP:
        if code == SHORT_BINUNICODE:
            at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
        elif code == BINUNICODE:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif (found := tokens.match(data, at)) is not None:
            at = found.end()
        elif not code:
            raise BadTrace(f"an end after {len(data)} bytes", "a whole pickle", hint="was it cut off?")
        else:
            what = "a class or a function to call" if code in _CALLS else f"code {code[0]:#x}"
            raise BadTrace(f"{what} at byte {at}", PLAIN)


def _tokens(length: int) -> re.Pattern[bytes]:
    # Frames, which may begin between any two codes, are read ahead as a whole. The unpickler's memory has a place for
    # every number up to the largest that a value is remembered under.
    frame = rb"\x95%b" % _number(8, length)
    put = rb"r%b" % _number(4, length // _SHORTEST_PUT)
    whole = rb"(?:\x8a(?:%b)|K.|M..|J.{4})(?:%b)?" % (_LONGS, frame)
    # Tuples have only integers in them: the hash of a tuple of tuples may be asked for, and takes for ever.
    flat = rb"%b(?:\x85|%b(?:\x86|%b\x87))" % (whole, whole, whole)
    return re.compile(rb"(?:%b)++" % b"|".join((_SIMPLE, flat, whole, put, frame)), re.DOTALL)


def _number(width: int, most: int) -> bytes:
    # Matches the bytes of a number that is not much larger than `most`.
    used = min(max(1, (most.bit_length() + 7) // 8), width)
    top = min(most >> 8 * (used - 1), 255)
    return rb".{%d}[\x00-\x%02x]\x00{%d}" % (used - 1, top, width - used)
