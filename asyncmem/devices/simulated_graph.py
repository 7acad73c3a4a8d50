"""Captured work of the simulated device: what a CUDA graph is, with replays that the order checker sees."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from asyncmem.errors import DeviceError, InvalidRequest

if TYPE_CHECKING:
    from asyncmem.devices.simulated_stream import SimulatedStream

Range = tuple[int, int]
"""An address and a number of bytes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One captured piece of work: how long it takes, what it touches, and what it does to real memory."""

    duration: float
    reads: tuple[Range, ...]
    writes: tuple[Range, ...]
    effect: Callable[[], None] | None


@dataclass(eq=False)
class Capture:
    """A capture under way, or its outcome, on the stream that began it and those that joined it."""

    steps: list[Step] = field(default_factory=list)
    records: int = 0
    """Fences recorded into it."""
    broken: DeviceError | None = None
    """Why it cannot become a graph."""

    def break_by(self, call: str, code: int, name: str) -> DeviceError:
        """End the hope for a graph, and answer the error."""
        self.broken = DeviceError(call, code=code, code_name=name)
        return self.broken


class SimulatedGraph:
    """Work that can be launched again and again. Made by `SimulatedStream.end_capture`."""

    def __init__(self, capture: Capture) -> None:
        """Take a capture that has ended."""
        self._steps = tuple(capture.steps)
        self.records = capture.records

    def __len__(self) -> int:
        """Answer the number of pieces of work."""
        return len(self._steps)

    def launch(self, stream: "SimulatedStream") -> None:
        """Submit all of it to a stream, in the order in which it was captured.

        Raises:
            StreamOrderError: It touches what other work may still be using, or what is there no more.
        """
        if stream.capturing():
            raise InvalidRequest("stream", stream, "a stream that is not being captured itself")
        stream.device.log.enter("launch_graph")
        for step in self._steps:
            stream.submit(step.duration, step.reads, step.writes, step.effect)
