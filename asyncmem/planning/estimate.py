"""What estimates of inference and of training share: bytes, words, how much more would fit; and warm-up lists."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_size
from asyncmem.planning.model import MOST, ModelShape
from asyncmem.planning.sizes import COMPUTED, Buffers, bytes_of, merged, total_of, width
from asyncmem.text import printable
from asyncmem.units import Size, parse_count, parse_size


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate(ABC):
    """The memory that a model takes at its peak, in bytes.

    It knows the tensors, and not what surrounds them: the context of a GPU (about 0.5 GiB), the workspaces of its
    libraries, and what an allocator reserves beyond what is asked.

    Raises:
        InvalidRequest: A figure is out of its range.
    """

    model: ModelShape
    """Whose memory it is."""
    seq_len: int
    """Tokens of each sequence."""
    batch: int = 1
    """Sequences at once."""
    bytes_per_value: float = 2
    """Bytes of each weight."""

    def __post_init__(self) -> None:
        """Check the figures."""
        for name in ("batch", "seq_len"):
            object.__setattr__(self, name, parse_count(getattr(self, name), what=name, least=1, most=MOST))
        object.__setattr__(self, "bytes_per_value", width(self.bytes_per_value))  # a type's name will do
        if self.model.positions and self.seq_len > self.model.positions:
            raise InvalidRequest("seq_len", self.seq_len, f"at most the model's {self.model.positions} positions")

    @abstractmethod
    def parts(self) -> dict[str, int]:
        """Return the parts by their names, in bytes."""

    @abstractmethod
    def at_peak(self) -> Buffers:
        """Return what is alive at the peak: pairs of a size and how many there are."""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return total_of(self.at_peak())

    @property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return total_of(self.weight_buffers())

    def weight_buffers(self) -> Buffers:
        """Return the tensors of parameters."""
        return self.each_parameter(self.bytes_per_value)

    def each_parameter(self, bytes_each: float) -> Buffers:
        """Return tensors of the parameters' shapes, with so many bytes a value."""
        return tuple((bytes_of(one.values, bytes_each), one.copies) for one in self.model.tensors())

    @property
    def computed(self) -> float:
        """Bytes of each value that is computed: those of the weights, but at least two."""
        return max(self.bytes_per_value, COMPUTED)

    def gb(self, part: str = "total") -> float:
        """Return the total, or a part by its name, in GB (10**9 bytes)."""
        return self._bytes(part) / 1e9

    def gib(self, part: str = "total") -> float:
        """Return the total, or a part by its name, in GiB (2**30 bytes)."""
        return self._bytes(part) / (1 << 30)

    def mib(self, part: str = "total") -> float:
        """Return the total, or a part by its name, in MiB (2**20 bytes)."""
        return self._bytes(part) / (1 << 20)

    def _bytes(self, part: str) -> int:
        known = {**self.parts(), "total": self.total}
        if part not in known:
            raise InvalidRequest("part", part, f"one of {', '.join(known)}")
        return known[part]

    def at(self, *, seq_len: int | None = None, batch: int | None = None) -> Self:
        """Return the estimate for another length, or another number of sequences."""
        return replace(
            self,
            seq_len=self.seq_len if seq_len is None else seq_len,
            batch=self.batch if batch is None else batch,
        )

    def left(self, room: Size) -> int:
        """Return the bytes that would be left of `room`; below zero, how many are lacking."""
        return parse_size(room, what="room") - self.total

    def largest_batch(self, room: Size) -> int:
        """Return how many sequences of this length fit into `room`; 0 where not one does."""
        nbytes = parse_size(room, what="room")
        return _most(lambda batch: self.at(batch=batch).total <= nbytes, MOST)

    def largest_seq_len(self, room: Size) -> int:
        """Return how many tokens each sequence may have in `room`, with this batch; 0 where not one fits."""
        nbytes = parse_size(room, what="room")
        return _most(lambda length: self.at(seq_len=length).total <= nbytes, self.model.positions or MOST)

    def as_dict(self) -> dict[str, object]:
        """Return everything, ready for JSON: what was assumed, the parts and the total in bytes."""
        return {
            "family": self.model.family,
            "parameters": self.model.parameters,
            "seq_len": self.seq_len,
            "batch": self.batch,
            "bytes_per_value": self.bytes_per_value,
            **self.parts(),
            "total": self.total,
        }

    def summary(self) -> str:
        """Return all of it as text for one screen."""
        rows = [*self.parts().items(), ("total at the peak", self.total)]
        wide = max(len(name) for name, _ in rows)
        lines = [f"  {name.replace('_', ' '):{wide}}  {format_size(nbytes):>10}" for name, nbytes in rows]
        return "\n".join([self._title(), *lines])

    def _title(self) -> str:
        name = printable(self.model.family) or "a transformer"
        return (
            f"{name}: {format_count(self.model.parameters, 'parameter')} of {self.bytes_per_value:g} B, "
            f"{format_count(self.batch, 'sequence')} of {format_count(self.seq_len, 'token')}"
        )


def _most(fits: Callable[[int], bool], most: int) -> int:
    """Find the largest number that fits, where each below one that fits does so too."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def transformer_warmup(
    batch: int,
    seq_len: int,
    hidden: int,
    *,
    intermediate: int | None = None,
    heads: int | None = None,
    layers: int = 1,
    bytes_per_value: float | str = 2,
) -> list[tuple[int, int]]:
    """Return the buffers that a transformer's layers compute with, by size, largest first.

    Args:
        batch: Sequences at once.
        seq_len: Tokens of each.
        hidden: Width of the residual stream: eight buffers of it in a layer.
        intermediate: Width of the feed-forward part, four buffers in a layer; None: four times `hidden`.
        heads: Give it where attention keeps its scores, two tables for each head; None where it does not, as with
            flash attention.
        layers: Layers whose buffers are alive at once: 1 to serve or with checkpointing, else all of them to train.
        bytes_per_value: Bytes of each value, or a type's name: "bf16".

    Raises:
        InvalidRequest: A figure is out of its range.
    """
    inner = 4 * hidden if intermediate is None else intermediate
    scores = 0 if heads is None else heads
    for name, value in (
        ("batch", batch),
        ("seq_len", seq_len),
        ("hidden", hidden),
        ("intermediate", inner),
        ("heads", heads or 1),
        ("layers", layers),
    ):
        parse_count(value, what=name, least=1, most=MOST)
    tokens, each = batch * seq_len, width(bytes_per_value)
    buffers = (
        (bytes_of(tokens * hidden, each), 8 * layers),
        (bytes_of(tokens * inner, each), 4 * layers),
        (bytes_of(tokens * seq_len * scores, each), 2 * layers),
    )
    return merged(buffers)


def warmup_from(estimate: MemoryEstimate) -> list[tuple[int, int]]:
    """Return all that is alive at an estimate's peak, by size, largest first; together they are its total."""
    return merged(estimate.at_peak())
