"""Traces of all shapes, and a stand-in for PyTorch's allocator that writes down what the real one would."""

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from asyncmem.replay import Op, Trace

TRACES = Path(__file__).parents[1] / "traces"

Row = tuple[int, int, int, int, int]


def trace_of(rows: list[Row], **about: Any) -> Trace:
    """Make a trace of rows (op, stream, id, nbytes, time)."""
    return Trace(*np.array(rows, np.int64).reshape(-1, 5).T, **about)


def same(one: Trace, other: Trace) -> bool:
    """Say whether two traces have the same events, under the same names."""
    about = [(each.name, each.device, each.note) for each in (one, other)]
    pairs = zip(one.columns, other.columns, strict=True)
    return about[0] == about[1] and all(np.array_equal(mine, yours) for mine, yours in pairs)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Draw the rows of a trace without contradictions."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99), st.integers(0, 1 << 41), st.integers(0, 300)))
    )
    gaps = st.one_of(st.integers(0, 5000), st.integers(0, 1 << 40))
    found: list[Row] = []
    sizes: list[int] = []
    live: list[int] = []
    leaving: list[int] = []
    time = 0
    for op, pick, nbytes, stream in steps:
        time += draw(gaps)
        if op == Op.ALLOCATE:
            live.append(len(sizes))
            sizes.append(nbytes)
            found.append((op, stream, live[-1], nbytes, time))
        elif op == Op.FREE and live:
            leaving.append(live.pop(pick % len(live)))
            found.append((op, stream, leaving[-1], sizes[leaving[-1]], time))
        elif op == Op.DONE and leaving:
            gone = leaving.pop(pick % len(leaving))
            found.append((op, stream, gone, sizes[gone], time))
        elif op >= Op.GROW:
            found.append((op, stream, -1, nbytes, time))
    return found


class Torch:
    """What PyTorch's allocator would write down, for one device or several; the test says what happens.

    Attributes:
        entries: The history of each device.
        segments: What is mapped, by device and address; each has room for one allocation at a time.
    """

    def __init__(self, devices: int = 1) -> None:
        self.entries: list[list[dict[str, Any]]] = [[] for _ in range(devices)]
        self.segments: dict[tuple[int, int], dict[str, Any]] = {}
        self.now = 1_700_000_000_000_000

    def note(self, action: str, *, device: int = 0, **more: Any) -> None:
        """Write an entry."""
        self.now += 10
        entry = {"action": action, "time_us": self.now, "frames": [], "compile_context": "N/A", "user_metadata": ""}
        self.entries[device].append(entry | more)

    def alloc(self, addr: int, size: int, *, stream: int = 0, device: int = 0, room: int = 1 << 21) -> None:
        """Allocate, in a new segment of `room` bytes where there is none."""
        if (device, addr) not in self.segments:
            self.note("segment_alloc", addr=addr, size=room, stream=stream, device=device)
            segment = {"device": device, "address": addr, "total_size": room, "stream": stream}
            self.segments[device, addr] = segment | {"segment_type": "large", "segment_pool_id": (0, 0)}
        self.note("alloc", addr=addr, size=size, stream=stream, device=device)
        self._put(addr, device, size, "active_allocated")

    def request(self, addr: int, *, device: int = 0) -> None:
        """Ask for a free, which may have to wait for other streams."""
        self._end("free_requested", addr, device, "active_pending_free")

    def complete(self, addr: int, *, device: int = 0) -> None:
        """See the streams done."""
        self._end("free_completed", addr, device, "inactive")

    def free(self, addr: int, *, device: int = 0) -> None:
        """Free what only its own stream has used."""
        self.request(addr, device=device)
        self.complete(addr, device=device)

    def release(self, addr: int, *, device: int = 0) -> None:
        """Give a segment back to the driver."""
        segment = self.segments.pop((device, addr))
        room, stream = segment["total_size"], segment["stream"]
        self.note("segment_free", addr=addr, size=room, stream=stream, device=device)

    def snapshot(self, *, first: int = 0, without: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        """Return the snapshot; its history begins with entry `first` of each device, and lacks some actions."""
        traces = [[one for one in entries[first:] if one["action"] not in without] for entries in self.entries]
        settings = {"expandable_segments": False, "roundup_power2_divisions": {"1": 0, "2": 0}}
        found = {"segments": [*self.segments.values()], "device_traces": traces, "allocator_settings": settings}
        return found | {"external_annotations": []} | more

    def _end(self, action: str, addr: int, device: int, state: str) -> None:
        segment = self.segments[device, addr]
        size = segment["blocks"][0]["requested_size"]
        self.note(action, addr=addr, size=size, stream=segment["stream"], device=device)
        self._put(addr, device, size, state)

    def _put(self, addr: int, device: int, size: int, state: str) -> None:
        segment = self.segments[device, addr]
        whole = -(-size // 512) * 512
        rest = {
            "address": addr + whole,
            "size": segment["total_size"] - whole,
            "requested_size": 0,
            "state": "inactive",
        }
        block = {"address": addr, "size": whole, "requested_size": size, "state": state}
        segment["blocks"] = [block, rest] if rest["size"] else [block]


def events(trace: Trace) -> list[tuple[str, int, int, int]]:
    """Return the allocations and frees in words: op, number, bytes, stream."""
    return [
        (Op(op).name, int(number), int(nbytes), int(stream))
        for op, stream, number, nbytes, _ in zip(*trace.columns, strict=True)
        if op <= Op.DONE
    ]
