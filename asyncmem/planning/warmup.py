"""What a pool can have ready for a transformer: lists of sizes and counts, as `pool.warmup` takes them."""

from asyncmem.planning.buffers import merged
from asyncmem.planning.estimate import MemoryEstimate
from asyncmem.planning.model import whole_number
from asyncmem.planning.widths import bytes_of, width


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
    """Answer the buffers that a transformer's layers compute with, by size, largest first.

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
        whole_number(name, value)
    tokens, each = batch * seq_len, width(bytes_per_value)
    buffers = (
        (bytes_of(tokens * hidden, each), 8 * layers),
        (bytes_of(tokens * inner, each), 4 * layers),
        (bytes_of(tokens * seq_len * scores, each), 2 * layers),
    )
    return merged(buffers)


def warmup_from(estimate: MemoryEstimate) -> list[tuple[int, int]]:
    """Answer all that is alive at an estimate's peak, by size, largest first; together they are its total."""
    return merged(estimate.at_peak())
