"""What a model takes while it serves: weights, keys and values, and what one layer computes."""

from dataclasses import dataclass

from asyncmem.planning.estimate import MemoryEstimate
from asyncmem.planning.model import MOST, llama_like
from asyncmem.planning.sizes import Buffers, bytes_of, larger, total_of, width
from asyncmem.units import parse_count


@dataclass(frozen=True, kw_only=True)
class InferenceMemoryEstimate(MemoryEstimate):
    """The memory of a model that serves sequences of `seq_len` tokens, prompt and answer together."""

    kv_bytes: float | None = None
    """Bytes of each value in the cache; None: as many as are computed with."""
    chunk: int | None = None
    """Tokens of each sequence that go through the layers at once; None: all of them, as with a long prompt."""
    rolling: bool = False
    """Whether layers with a window keep only what is in it; most programs keep all."""

    def __post_init__(self) -> None:
        """Check the figures."""
        super().__post_init__()
        if self.kv_bytes is not None:
            object.__setattr__(self, "kv_bytes", width(self.kv_bytes, "kv_bytes"))
        if self.chunk is not None:
            object.__setattr__(self, "chunk", parse_count(self.chunk, what="chunk", least=1, most=MOST))

    @property
    def kv_cache(self) -> int:
        """Bytes of all layers' keys and values."""
        return total_of(self._cache())

    @property
    def activations(self) -> int:
        """Bytes of what the widest step of a layer, or the output, has alive."""
        return total_of(self._activations())

    def parts(self) -> dict[str, int]:
        """Return weights, cache and activations, in bytes; they add up to the total."""
        return {"weights": self.weights, "kv_cache": self.kv_cache, "activations": self.activations}

    def at_peak(self) -> Buffers:
        """Return all of them: pairs of a size and how many there are."""
        return (*self.weight_buffers(), *self._cache(), *self._activations())

    def _cache(self) -> Buffers:
        model = self.model
        windowed = model.windowed_layers if self.rolling else 0
        each = self.computed if self.kv_bytes is None else self.kv_bytes

        def layers(count: int, tokens: int) -> tuple[int, int]:
            return bytes_of(self.batch * model.kv_width * tokens, each), 2 * count

        whole = layers(model.layers - windowed, self.seq_len)
        return (whole, layers(windowed, min(self.seq_len, model.window))) if windowed else (whole,)

    def _wide(self, values: int) -> int:
        return bytes_of(self.batch * min(self.chunk or self.seq_len, self.seq_len) * values, self.computed)

    def _activations(self) -> Buffers:
        model, wide = self.model, self._wide
        # Queries, rotated queries and the result; keys and values are rotated before they go to the cache.
        attention = ((wide(model.query_width), 3), (wide(model.kv_width), 2))
        # The output is computed for the last token of each sequence, and sampled from in float32.
        output = ((bytes_of(self.batch * model.vocab, self.computed + 4), 1),)
        # What came into the layer, and the norm of what comes into its part, are alive beside each of them.
        return ((wide(model.hidden), 2), *larger(attention, self._feed_forward(), output))

    def _feed_forward(self) -> Buffers:
        model, wide = self.model, self._wide
        added = wide(model.hidden)  # what attention has added to; its caller still holds what came into the layer
        # The gate, what is gated, and their product; without a gate, before and behind the activation.
        steps = 3 if model.gated else 2
        if model.experts == 1:
            return ((added, 1), (wide(model.intermediate), steps))
        return (
            (added, 1),
            (wide(model.intermediate * model.experts_per_token), steps),
            (wide(model.hidden * model.experts_per_token), 1),  # the tokens, sorted by expert
            (wide(model.shared_intermediate), steps),
        )


def estimate_inference_memory(
    hidden: int,
    intermediate: int,
    layers: int,
    vocab: int,
    heads: int,
    kv_heads: int,
    seq_len: int,
    bytes_per_value: float | str = 2,
    *,
    batch: int = 1,
    kv_bytes: float | str | None = None,
    tie_embeddings: bool | None = None,
    experts: int = 1,
    experts_per_token: int | None = None,
    head_dim: int | None = None,
    gated: bool = True,
    chunk: int | None = None,
) -> InferenceMemoryEstimate:
    """Estimate what serving takes, from a few figures of a Llama-like model.

    `InferenceMemoryEstimate(model=read_model("config.json"), seq_len=...)` does so for a model's own file.

    Args:
        hidden: Width of the residual stream.
        intermediate: Width inside the feed-forward part; of one expert where there are several.
        layers: Decoder layers.
        vocab: Size of the vocabulary.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        seq_len: Tokens of each sequence, prompt and answer together.
        bytes_per_value: Bytes of each weight, or a type's name: "bf16".
        batch: Sequences at once.
        kv_bytes: The same of each value in the cache; None: as many as are computed with.
        tie_embeddings: Whether the output uses the embedding's weights; None: it does not, as in a Llama.
        experts: Experts in each layer.
        experts_per_token: Experts that each token goes to; None: two, where there are several.
        head_dim: Width of a head; None: hidden / heads.
        gated: Whether the feed-forward part has a gate.
        chunk: Tokens that go through the layers at once; None: all.

    Raises:
        InvalidRequest: A figure is out of its range.
    """
    sizes = hidden, intermediate, layers, vocab, heads, kv_heads
    model = llama_like(*sizes, tie_embeddings, experts, experts_per_token, head_dim, gated=gated)
    return InferenceMemoryEstimate(
        model=model,
        seq_len=seq_len,
        batch=batch,
        bytes_per_value=width(bytes_per_value),
        kv_bytes=None if kv_bytes is None else width(kv_bytes, "kv_bytes"),
        chunk=chunk,
    )
