"""Blocks, the entries they wait for, and the segments and streams they belong to."""

from dataclasses import dataclass, field

Entries = dict[int, int]
"""{stream: epoch} of work that may still touch the memory."""


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment."""

    address: int
    granules: int
    segment: int
    arena: int
    entries: Entries = field(default_factory=dict)
    state: str = "pending"
    before: "Block | None" = None
    after: "Block | None" = None
    home: int = 0
    """While live: its stream."""
    owed: int = 0
    """While live: the epoch that home itself still owed when the block was taken, 0 for none."""
    account: int = 0
    requested: int = 0
    level: int = 0
    lease: int = 0
    """While leased: its arena."""
    shared: bool = False
    """While cached: in the shared cache."""
    position: int = -1
    """While free: where its candidate list has it."""


@dataclass(slots=True)
class Segment:
    """A range of device memory, or (with a container) the inside of a leased block."""

    address: int
    nbytes: int
    arena: int
    first: Block
    container: Block | None = None


@dataclass(slots=True)
class Epochs:
    """How far a stream has come: epochs of one stream finish in order."""

    open: int = 1
    recorded: int = 0
    done: int = 0


def joined(a: Entries, b: Entries) -> Entries:
    """Return the union with the later epoch of each stream."""
    return {stream: max(a.get(stream, 0), b.get(stream, 0)) for stream in a.keys() | b.keys()}


def listed(entries: Entries) -> tuple[tuple[int, int], ...]:
    """Return entries as callers see them: sorted by stream."""
    return tuple(sorted(entries.items()))
