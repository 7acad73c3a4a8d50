"""What a model takes while it trains: parameters, gradients, the optimizer's states, and saved activations.

Not all of it is alive at once: gradients come as activations go. So the peak is that of two moments, when the backward
pass begins and when it ends.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from asyncmem.errors import InvalidRequest
from asyncmem.planning.estimate import MemoryEstimate
from asyncmem.planning.model import llama_like
from asyncmem.planning.sizes import Buffers, bytes_of, larger, times, total_of, width


class Optimizer(NamedTuple):
    """What one keeps beside the parameters."""

    states: int
    """Values it keeps for each parameter."""
    state_bytes: float | None = None
    """Bytes of each of them; None: as many as the parameter it updates has."""
    temporaries: int = 0
    """Values for each parameter that a step needs for a moment, unless it is fused into one kernel."""


_BLOCKWISE: Final = 1 + 4 / 256
"""A byte, and for each 256 of them a scale in float32."""

OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "sgd": Optimizer(0),
    "sgd_momentum": Optimizer(1),
    "adagrad": Optimizer(1, temporaries=1),
    "rmsprop": Optimizer(1, temporaries=1),
    "adam": Optimizer(2, temporaries=1),
    "adamw": Optimizer(2, temporaries=1),
    "adam_8bit": Optimizer(2, _BLOCKWISE),
    "adamw_8bit": Optimizer(2, _BLOCKWISE),
}
"""Optimizers by name."""

_FULL = 4
"""Bytes of a value in float32, in which losses are computed and masters kept."""


@dataclass(frozen=True, kw_only=True)
class TrainingMemoryEstimate(MemoryEstimate):
    """The memory of a training step over `batch` sequences of `seq_len` tokens, from the second step on.

    Attention is assumed to keep no table of scores, as flash attention does, and dropout to be off.
    """

    optimizer: str = "adamw"
    """Its name, one of `OPTIMIZERS`."""
    checkpointing: bool = False
    """Whether each layer keeps only its input, and is computed once more in the backward pass."""
    master_weights: bool = False
    """Whether there is a copy of the weights in float32 that the optimizer updates."""
    fused: bool = False
    """Whether the optimizer's step is one kernel, which needs no memory of its own."""
    accumulate: bool = False
    """Whether gradients of the batch before are still there when a backward pass begins."""

    def __post_init__(self) -> None:
        """Check the figures."""
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise InvalidRequest("optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")

    @property
    def gradients(self) -> int:
        """Bytes of the gradients, when all of them are there."""
        return total_of(self.weight_buffers())

    @property
    def optimizer_states(self) -> int:
        """Bytes of what the optimizer keeps, the copy of the weights included."""
        return total_of(self._states())

    @property
    def activations(self) -> int:
        """Bytes of what the forward pass saves, and of the first backward step; the most there are of them."""
        return total_of(self._saved())

    def parts(self) -> dict[str, int]:
        """Return the most that there is of each part, in bytes; gradients and activations not at the same time."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer_states": self.optimizer_states,
            "activations": self.activations,
        }

    def at_peak(self) -> Buffers:
        """Return what is alive in the moment that needs most: pairs of a size and how many there are."""
        gradients = self.weight_buffers()
        begin = (*self._saved(), *(gradients if self.accumulate else ()))
        end = (*gradients, *larger(self._step(), (*self._layer(), *self._backward())))
        return (*self.weight_buffers(), *self._states(), *larger(begin, end))

    @property
    def _optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer]

    @property
    def _updated(self) -> float:
        return _FULL if self.master_weights else self.bytes_per_value

    def _states(self) -> Buffers:
        bytes_each = self._updated if self._optimizer.state_bytes is None else self._optimizer.state_bytes
        states = times(self._optimizer.states, self.each_parameter(bytes_each))
        return (*states, *(self.each_parameter(_FULL) if self.master_weights else ()))

    def _step(self) -> Buffers:
        return times(0 if self.fused else self._optimizer.temporaries, self.each_parameter(self._updated))

    def _saved(self) -> Buffers:
        model, wide = self.model, self._wide
        kept = ((wide(model.hidden), model.layers),) if self.checkpointing else times(model.layers, self._layer())
        again = (*self._layer(), *self._backward()) if self.checkpointing else self._backward()
        return (*kept, (wide(model.hidden), 2), *larger(self._loss(), again))

    def _layer(self) -> Buffers:
        """Return what one layer saves for its backward pass."""
        model, wide = self.model, self._wide
        # The first two norms keep what came in and what they return; more of them, what came in.
        norms = 2 * min(model.norms, 2) + max(model.norms - 2, 0)
        heads = 2 if model.head_norms else 1
        return (
            (wide(model.hidden), norms),
            (wide(model.query_width), heads + 1),  # queries, and what attention returns
            (wide(model.kv_width), heads + 1),  # keys and values
            *self._feed_forward(),
        )

    def _feed_forward(self) -> Buffers:
        model, wide = self.model, self._wide
        # The gate before and behind its activation, what is gated, and the product; or before and behind alone.
        steps = 4 if model.gated else 2
        if model.experts == 1:
            return ((wide(model.intermediate), steps),)
        return (
            (wide(model.intermediate * model.experts_per_token), steps),
            (wide(model.hidden * model.experts_per_token), 2),  # sorted by expert, and what the experts return
            (wide(model.shared_intermediate), steps),
        )

    def _backward(self) -> Buffers:
        """Return the gradients inside the widest step of a layer."""
        model, steps = self.model, 3 if self.model.gated else 2
        inner = model.intermediate * model.experts_per_token + model.shared_intermediate
        return ((self._wide(inner), steps), (self._wide(model.hidden), 2))

    def _loss(self) -> Buffers:
        """Return what turns the output into a loss: the output, and in float32 its log-softmax and two gradients."""
        values = self.batch * self.seq_len * self.model.vocab
        return ((bytes_of(values, self.computed), 1), (bytes_of(values, _FULL), 3))

    def _wide(self, values: int) -> int:
        return bytes_of(self.batch * self.seq_len * values, self.computed)


def estimate_training_memory(
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
    optimizer: str = "adamw",
    checkpointing: bool = False,
    master_weights: bool = False,
    fused: bool = False,
    accumulate: bool = False,
    tie_embeddings: bool | None = None,
    experts: int = 1,
    experts_per_token: int | None = None,
    head_dim: int | None = None,
    gated: bool = True,
) -> TrainingMemoryEstimate:
    """Estimate what training takes, from a few figures of a Llama-like model.

    `TrainingMemoryEstimate(model=read_model("config.json"), seq_len=...)` does so for a model's own file.

    Args:
        hidden: Width of the residual stream.
        intermediate: Width inside the feed-forward part; of one expert where there are several.
        layers: Decoder layers.
        vocab: Size of the vocabulary.
        heads: Attention heads.
        kv_heads: Heads of keys and values.
        seq_len: Tokens of each sequence.
        bytes_per_value: Bytes of each weight and gradient, or a type's name: "bf16".
        batch: Sequences at once.
        optimizer: One of `OPTIMIZERS`.
        checkpointing: Whether each layer keeps only its input, and is computed once more in the backward pass.
        master_weights: Whether there is a copy of the weights in float32 that the optimizer updates.
        fused: Whether the optimizer's step is one kernel.
        accumulate: Whether gradients of the batch before are still there when a backward pass begins.
        tie_embeddings: Whether the output uses the embedding's weights; None: it does not, as in a Llama.
        experts: Experts in each layer.
        experts_per_token: Experts that each token goes to; None: two, where there are several.
        head_dim: Width of a head; None: hidden / heads.
        gated: Whether the feed-forward part has a gate.

    Raises:
        InvalidRequest: A figure is out of its range, or there is no such optimizer.
    """
    sizes = hidden, intermediate, layers, vocab, heads, kv_heads
    model = llama_like(*sizes, tie_embeddings, experts, experts_per_token, head_dim, gated=gated)
    return TrainingMemoryEstimate(
        model=model,
        seq_len=seq_len,
        batch=batch,
        bytes_per_value=width(bytes_per_value),
        optimizer=optimizer,
        checkpointing=checkpointing,
        master_weights=master_weights,
        fused=fused,
        accumulate=accumulate,
    )
