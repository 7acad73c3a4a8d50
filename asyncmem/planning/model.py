"""The shape of a transformer: what its tensors are, and so how many parameters it has, exactly."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

from asyncmem.errors import InvalidRequest
from asyncmem.units import parse_count

MOST: Final = 1 << 40
"""No figure is larger."""


class Tensors(NamedTuple):
    """Tensors of one shape."""

    name: str
    values: int
    """Values in each."""
    copies: int
    """How many of them the model has."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of the family that Llama and GPT-2 belong to. All figures are numbers of values, not bytes.

    Raises:
        InvalidRequest: A figure is no whole number in its range, or two contradict each other.
    """

    hidden: int
    """Width of the residual stream."""
    intermediate: int
    """Width inside the feed-forward part; of one expert where there are several."""
    layers: int
    """Decoder layers."""
    vocab: int
    """Rows of the embedding."""
    heads: int
    """Attention heads."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as heads."""
    head_dim: int = 0
    """Width of a head; 0: hidden / heads."""
    tie_embeddings: bool = False
    """Whether the output uses the embedding's weights."""
    gated: bool = True
    """Whether the feed-forward part has a gate: three matrices instead of two."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the projection out of attention has a bias."""
    mlp_bias: bool = False
    """Whether the matrices of the feed-forward part have a bias."""
    head_bias: bool = False
    """Whether the output has a bias."""
    norms: int = 2
    """Norms in a layer."""
    norm_bias: bool = False
    """Whether norms have a bias beside their weight."""
    head_norms: bool = False
    """Whether queries and keys are normed, head by head."""
    positions: int = 0
    """Learned positions; 0 where positions are computed."""
    experts: int = 1
    """Experts in a layer; 1: there is no router."""
    experts_per_token: int = 1
    """Experts that each token goes to."""
    shared_intermediate: int = 0
    """Width of an expert, with a gate of its own, that every token goes to; 0: there is none."""
    dense_layers: int = 0
    """Layers without experts in a model that has them."""
    dense_intermediate: int = 0
    """Width inside the feed-forward part of those."""
    window: int = 0
    """Tokens that attention looks back on; 0: all."""
    windowed_layers: int = 0
    """Layers to which the window applies."""
    family: str = ""
    """What the model calls its kind: "llama"."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if one.type is int:
                least = 1 if one.name in _POSITIVE else 0
                number = parse_count(getattr(self, one.name), what=one.name, least=least, most=MOST)
                object.__setattr__(self, one.name, number)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        if not self.head_dim:
            if self.hidden % self.heads:
                raise InvalidRequest("hidden", self.hidden, f"a multiple of heads, {self.heads}", hint="or a head_dim")
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise InvalidRequest("kv_heads", self.kv_heads, f"a divisor of heads, {self.heads}")
        for name, most in (
            ("experts_per_token", self.experts),
            ("dense_layers", self.layers),
            ("windowed_layers", self.layers),
        ):
            if getattr(self, name) > most:
                raise InvalidRequest(name, getattr(self, name), f"at most {most}")

    @property
    def query_width(self) -> int:
        """Values of all heads' queries for one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Values of all heads' keys for one token; those of the values are as many."""
        return self.kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """How many parameters there are; tied ones count once."""
        return sum(one.values * one.copies for one in self.tensors())

    def tensors(self) -> Iterator[Tensors]:
        """List the tensors of parameters, those of all layers together."""
        yield Tensors("embedding", self.vocab * self.hidden, 1)
        if self.positions:
            yield Tensors("positions", self.positions * self.hidden, 1)
        yield from self._attention()
        expert_layers = self.layers - self.dense_layers if self.experts > 1 else 0
        if expert_layers:
            yield Tensors("router", self.hidden * self.experts, expert_layers)
            yield from self._feed_forward("expert", self.intermediate, expert_layers * self.experts)
        if expert_layers and self.shared_intermediate:
            yield from self._feed_forward("shared expert", self.shared_intermediate, expert_layers)
            yield Tensors("shared expert's gate", self.hidden, expert_layers)
        if expert_layers < self.layers:
            dense = self.dense_intermediate if expert_layers else self.intermediate
            yield from self._feed_forward("feed-forward", dense, self.layers - expert_layers)
        yield Tensors("norms", self.hidden, (self.norms * self.layers + 1) * (2 if self.norm_bias else 1))
        if not self.tie_embeddings:
            yield Tensors("output", self.vocab * self.hidden, 1)
        if self.head_bias:
            yield Tensors("output bias", self.vocab, 1)

    def _attention(self) -> Iterator[Tensors]:
        yield Tensors("queries", self.hidden * self.query_width, self.layers)
        yield Tensors("keys and values", self.hidden * self.kv_width, 2 * self.layers)
        yield Tensors("attention output", self.query_width * self.hidden, self.layers)
        if self.qkv_bias:
            yield Tensors("query bias", self.query_width, self.layers)
            yield Tensors("key and value bias", self.kv_width, 2 * self.layers)
        if self.output_bias:
            yield Tensors("attention output bias", self.hidden, self.layers)
        if self.head_norms:
            yield Tensors("head norms", self.head_dim, 2 * self.layers)

    def _feed_forward(self, name: str, width: int, count: int) -> Iterator[Tensors]:
        into = 2 if self.gated else 1
        yield Tensors(name, self.hidden * width, (into + 1) * count)
        if self.mlp_bias:
            yield Tensors(f"{name} bias", width, into * count)
            yield Tensors(f"{name} output bias", self.hidden, count)


def llama_like(
    hidden: int, intermediate: int, layers: int, vocab: int, heads: int, kv_heads: int, tie_embeddings: bool | None,
    experts: int, experts_per_token: int | None, head_dim: int | None, *, gated: bool,
) -> ModelShape:  # fmt: skip
    """Make the shape that the functions with figures for arguments mean; None is what most models of that kind have."""
    return ModelShape(
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        vocab=vocab,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or 0,
        tie_embeddings=bool(tie_embeddings),
        gated=gated,
        experts=experts,
        experts_per_token=min(experts, 2) if experts_per_token is None else experts_per_token,
    )


_POSITIVE = frozenset({"hidden", "intermediate", "layers", "vocab", "heads", "norms", "experts", "experts_per_token"})
