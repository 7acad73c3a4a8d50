"""On what a row is measured."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """The device, and what programs are replayed there."""

    device: str
    """A device's name: "cuda:0"."""
    traces: tuple[str, ...] = ()
    """Files with recordings, for the row `replay`."""
