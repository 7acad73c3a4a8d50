"""What PyTorch's memory viewer asks of a snapshot, step by step as it goes back from the end to the beginning."""

from bisect import bisect_right
from typing import Any

Entry = dict[str, Any]

PLAIN = (str, int, float, bool, type(None))
OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
    "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
    "TUPLE3", "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "NEWTRUE", "NEWFALSE", "NONE",
}  # fmt: skip
"""What the viewer's unpickler knows."""


def need_plain(value: object) -> None:
    """A snapshot has plain data alone, of exactly these types; text for the keys of dicts."""
    if type(value) is dict:
        assert all(type(key) is str for key in value)
        need_plain(list(value.values()))
    elif type(value) in {list, tuple}:
        for one in value:  # type: ignore[attr-defined]  # which both have
            need_plain(one)
    else:
        assert type(value) in PLAIN, value


class Rewinding:
    """One device, taken back from what is there at the end.

    Attributes:
        blocks: What is live or leaving, by address: bytes, and whether its free was asked for.
        segments: What is had, by address.
    """

    def __init__(self, snapshot: dict[str, Any], device: int) -> None:
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, tuple[int, bool]] = {}
        for segment in (one for one in snapshot["segments"] if one["device"] == device):
            self._take_over(segment)
        for entry in reversed(snapshot["device_traces"][device]):
            self._undo(entry)

    def _take_over(self, segment: dict[str, Any]) -> None:
        at = segment["address"]
        self._need_room(self.segments, at, segment["total_size"])
        self.segments[at] = segment["total_size"]
        held = [one for one in segment["blocks"] if one["state"] == "active_allocated"]
        for block in segment["blocks"]:
            assert block["address"] == at, "blocks tile their segment"
            assert block["size"] > 0
            assert block["state"] in {"active_allocated", "active_pending_free", "inactive"}
            assert block["requested_size"] <= block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        assert segment["allocated_size"] == segment["active_size"] == sum(one["size"] for one in held)
        assert segment["requested_size"] == sum(one["requested_size"] for one in held)
        self.blocks |= {one["address"]: (one["requested_size"], False) for one in held}

    def _undo(self, entry: Entry) -> None:
        assert isinstance(entry["frames"], list)
        assert {"user_metadata", "stream", "time_us", "size"} <= entry.keys()
        assert "category" not in entry
        if entry["action"] == "oom":
            assert "addr" not in entry
            assert entry["device_free"] >= 0
            return
        address, nbytes = entry["addr"], entry["size"]
        match entry["action"]:
            case "alloc":
                assert self.blocks.pop(address) == (nbytes, False)
            case "free_requested":
                assert self.blocks[address] == (nbytes, True)
                self.blocks[address] = nbytes, False
            case "free_completed":
                self._need_segment(address, nbytes)
                self.blocks[address] = nbytes, True
            case "segment_alloc":
                assert self.segments.pop(address) == nbytes
                assert not [one for one in self.blocks if address <= one < address + nbytes]
            case "segment_free":
                self._need_room(self.segments, address, nbytes)
                self.segments[address] = nbytes
            case other:
                raise AssertionError(other)

    def _need_segment(self, address: int, nbytes: int) -> None:
        assert any(one <= address and address + nbytes <= one + size for one, size in self.segments.items())
        self._need_room({one: size for one, (size, _) in self.blocks.items()}, address, nbytes)

    @staticmethod
    def _need_room(there: dict[int, int], address: int, nbytes: int) -> None:
        starts = sorted(there)
        at = bisect_right(starts, address)
        assert at == 0 or starts[at - 1] + there[starts[at - 1]] <= address
        assert at == len(starts) or address + nbytes <= starts[at]


def rewind(snapshot: dict[str, Any]) -> list[Rewinding]:
    """Take each device back to its beginning."""
    need_plain(snapshot)
    times = [[one["time_us"] for one in entries] for entries in snapshot["device_traces"]]
    assert all(one == sorted(one) for one in times)
    assert all(segment["device"] < len(times) for segment in snapshot["segments"])
    return [Rewinding(snapshot, device) for device in range(len(times))]
