"""PyTorch's memory snapshots as traces: `torch.cuda.memory._dump_snapshot`'s pickles, the same as JSON, or the dict."""

import json
import reprlib
from collections.abc import Iterator
from typing import Any, Final

from asyncmem.errors import BadTrace, InvalidRequest
from asyncmem.replay.columns import LATEST_US
from asyncmem.replay.history import History
from asyncmem.replay.plain_pickle import load_plain
from asyncmem.replay.trace import Trace
from asyncmem.units import MAX_SIZE

_TELL: Final = {
    "alloc": History.alloc,
    "free_requested": History.free_requested,
    "free_completed": History.free_completed,
    "segment_alloc": History.grow,
    "segment_map": History.grow,
    "segment_free": History.shrink,
    "segment_unmap": History.shrink,
}
_BLOCKS: Final = {"alloc", "free_requested", "free_completed"}
_SYNTHETIC: Final = "mallocWithAddress"
_RECORD: Final = "was torch.cuda.memory._record_memory_history() called before what is to be recorded?"


def load_snapshot(data: bytes) -> object:
    """Read a file's contents, JSON or a pickle of plain data; see `from_snapshot` for what is in it.

    Raises:
        BadTrace: It is neither, cut off or damaged, or a pickle that names a class or a function.
    """
    if data[:1] == b"\x80":
        return load_plain(data)
    try:
        return json.loads(data)
    except (RecursionError, ValueError) as error:
        raise BadTrace(f"text that cannot be read ({error})", "JSON") from error


def from_snapshot(snapshot: object, *, device: int | None = None, name: str = "") -> Trace:
    """Make a trace of what one device's allocator did, from a snapshot such as `torch.cuda.memory._snapshot()` answers.

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
    number = _choose(traces, device)
    entries = traces[number]
    history = History(requests=any(_action(one) == "free_requested" for one in entries))
    _tell(history, entries)
    if isinstance(snapshot, dict) and "segments" in snapshot:
        everywhere = _list(snapshot, "segments", "the snapshot")
        segments = [one for one in everywhere if _whole(one, "device", "segment") == number]
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
        choices = ", ".join(map(str, there))
        raise InvalidRequest("device", device, f"{choices}, which {'has' if len(there) == 1 else 'have'} events")
    return device


def _tell(history: History, entries: list[Any]) -> None:
    began: int | None = None
    for row, entry in enumerate(entries):
        action = _action(entry)
        tell = _TELL.get(action)
        if tell is None:
            history.repairs["refused"] += action == "oom"
            continue
        if _is_synthetic(entry):
            history.repairs["synthetic"] += 1
            continue
        if "time_us" in entry:
            time = _whole(entry, "time_us", row, LATEST_US)
            began = time if began is None else began
            history.at(time - began)
        else:
            history.pass_time()
        size, stream = _whole(entry, "size", row, MAX_SIZE), _whole(entry, "stream", row)
        tell(history, _whole(entry, "addr", row), size, stream)


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


def _whole(record: object, key: str, place: int | str, end: int = 1 << 64) -> int:
    found = record.get(key) if isinstance(record, dict) else None
    if type(found) is not int or not 0 <= found < end:
        row, where = (place, "") if isinstance(place, int) else (None, f" in a {place}")
        raise BadTrace(f"{reprlib.repr(found)}{where}", f"{key} from 0 to {end - 1}", row=row)
    return found
