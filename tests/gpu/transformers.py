"""Peaks of transformers with random weights on a real GPU, beside what was estimated of them.

    python tests/gpu/transformers.py

The models are plain torch, made from a `ModelShape`: each does what a model of its family does and nothing that makes
it need less. It ends with the table of docs/explanation/estimates.md.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncmem.planning import InferenceMemoryEstimate, MemoryEstimate, ModelShape, TrainingMemoryEstimate, read_model

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.planning.models import PUBLIC

EPSILON = 1e-5
BASE = 10_000.0  # of the rotation's frequencies; which does not matter here


class Work(NamedTuple):
    """A model, and how many tokens of it are measured."""

    name: str
    served: tuple[tuple[int, int], tuple[int, int]]
    """Two pairs of a length and a batch."""
    trained: tuple[int, int]


WORKS = (
    Work("GPT-2 medium", served=((512, 64), (1024, 64)), trained=(1024, 16)),
    Work("Llama-3.2-1B", served=((2048, 8), (8192, 8)), trained=(2048, 4)),
    Work("Gemma-2B", served=((2048, 8), (8192, 4)), trained=(2048, 2)),
    Work("Mistral-7B-v0.1", served=((2048, 8), (8192, 4)), trained=(2048, 4)),
)


@dataclass(frozen=True)
class Peak:
    """What one run needed at its peak, and what was estimated, in bytes."""

    name: str
    what: str
    estimate: MemoryEstimate
    measured: int

    @property
    def ratio(self) -> float:
        """Estimate by measurement."""
        return self.estimate.total / self.measured

    def __str__(self) -> str:
        made, gib = self.estimate, 1 << 30
        tokens = f"{made.batch} x {made.seq_len}"
        return (
            f"| {self.name} | {self.what} | {tokens} | {made.weights / gib:.2f} | {made.total / gib:.2f} "
            f"| {self.measured / gib:.2f} | {100 * (self.ratio - 1):+.1f} % |"
        )


class Decoder:
    """A decoder of one expert a layer: weights in bfloat16, attention without a table of scores."""

    def __init__(self, torch: Any, shape: ModelShape) -> None:
        self.torch, self.shape = torch, shape
        self.calls = torch.nn.functional
        self.parameters: list[Any] = []
        self.embedding = self.matrix(shape.vocab, shape.hidden)
        self.positions = self.matrix(shape.positions, shape.hidden) if shape.positions else None
        self.layers = [Layer(self) for _ in range(shape.layers)]
        self.norm = self.normer()
        self.output = self.embedding if shape.tie_embeddings else self.matrix(shape.vocab, shape.hidden)

    def matrix(self, *sides: int) -> Any:
        made = self.torch.empty(sides, device="cuda", dtype=self.torch.bfloat16).normal_(std=0.02)
        self.parameters.append(made.requires_grad_())
        return made

    def linear(self, width: int, answers: int, *, bias: bool) -> Callable[[Any], Any]:
        weight, added = self.matrix(answers, width), self.matrix(answers) if bias else None
        return lambda values: self.calls.linear(values, weight, added)

    def normer(self) -> Callable[[Any], Any]:
        sides = (self.shape.hidden,)
        weight, added = self.matrix(*sides), self.matrix(*sides) if self.shape.norm_bias else None
        if added is None:
            return lambda values: self.calls.rms_norm(values, sides, weight, EPSILON)
        return lambda values: self.calls.layer_norm(values, sides, weight, added, EPSILON)

    def hidden(self, tokens: Any, begin: int, cache: Cache | None, *, checkpointing: bool = False) -> Any:
        """Compute what comes out of the last norm, for tokens from a position on."""
        at = self.torch.arange(begin, begin + tokens.shape[1], device="cuda")
        values = self.calls.embedding(tokens, self.embedding)
        turned = None
        if self.positions is None:
            turned = self.turns(at)
        else:
            values = values + self.calls.embedding(at, self.positions)
        for number, layer in enumerate(self.layers):
            own = None if cache is None else cache.of(number, begin, tokens.shape[1])
            if checkpointing:
                again = self.torch.utils.checkpoint.checkpoint
                values = again(layer, values, turned, own, use_reentrant=False)
            else:
                values = layer(values, turned, own)
        return self.norm(values)

    def turns(self, at: Any) -> tuple[Any, Any]:
        """Return the cosines and sines that turn queries and keys at these positions."""
        width = self.shape.head_dim
        steps = self.torch.arange(0, width, 2, device="cuda") / width
        angles = at[:, None] * BASE**-steps
        both = self.torch.cat((angles, angles), dim=-1)
        return both.cos().bfloat16(), both.sin().bfloat16()

    def answer(self, hidden: Any) -> Any:
        return self.calls.linear(hidden, self.output)

    def tokens(self, batch: int, length: int) -> Any:
        return self.torch.randint(self.shape.vocab, (batch, length), device="cuda")


class Layer:
    """One layer: attention, and a feed-forward part with or without a gate."""

    def __init__(self, model: Decoder) -> None:
        shape = model.shape
        self.torch, self.calls, self.shape = model.torch, model.calls, shape
        self.before_attention, self.before_forward = model.normer(), model.normer()
        self.queries = model.linear(shape.hidden, shape.query_width, bias=shape.qkv_bias)
        self.keys = model.linear(shape.hidden, shape.kv_width, bias=shape.qkv_bias)
        self.values = model.linear(shape.hidden, shape.kv_width, bias=shape.qkv_bias)
        self.attended = model.linear(shape.query_width, shape.hidden, bias=shape.output_bias)
        self.up = model.linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.gate = model.linear(shape.hidden, shape.intermediate, bias=False) if shape.gated else None
        self.down = model.linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def __call__(self, values: Any, turned: Any, cache: Any) -> Any:
        values = values + self.attention(self.before_attention(values), turned, cache)
        return values + self.forward(self.before_forward(values))

    def attention(self, values: Any, turned: Any, cache: Any) -> Any:
        batch, length, _ = values.shape
        queries, keys, found = (
            part(values).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for part in (self.queries, self.keys, self.values)
        )
        if turned is not None:
            queries, keys = self.turn(queries, *turned), self.turn(keys, *turned)
        if cache is not None:
            keys, found = cache(keys, found)
        grouped = self.shape.kv_heads != self.shape.heads
        seen = self.calls.scaled_dot_product_attention(queries, keys, found, is_causal=length > 1, enable_gqa=grouped)
        return self.attended(seen.transpose(1, 2).reshape(batch, length, -1))

    def turn(self, values: Any, cosines: Any, sines: Any) -> Any:
        left, right = values.chunk(2, dim=-1)
        return values * cosines + self.torch.cat((-right, left), dim=-1) * sines

    def forward(self, values: Any) -> Any:
        if self.gate is None:
            return self.down(self.calls.gelu(self.up(values)))
        return self.down(self.calls.silu(self.gate(values)) * self.up(values))


class Cache:
    """Keys and values of all layers, as many as a sequence will have."""

    def __init__(self, torch: Any, shape: ModelShape, batch: int, length: int) -> None:
        sides = (batch, shape.kv_heads, length, shape.head_dim)
        self.kept = [
            tuple(torch.empty(sides, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for _ in range(shape.layers)
        ]

    def of(self, layer: int, begin: int, length: int) -> Callable[[Any, Any], Iterator[Any]]:
        """Return what keeps a layer's new keys and values, and returns all there are of them."""
        end = begin + length

        def keep(*new: Any) -> Iterator[Any]:
            for kept, one in zip(self.kept[layer], new, strict=True):
                kept[:, :, begin:end] = one
                yield kept[:, :, :end]

        return keep


def served(torch: Any, shape: ModelShape, seq_len: int, batch: int) -> int:
    """Return the peak, in bytes, of a prompt that fills the cache but for one token, and of that one."""
    floor = emptied(torch)
    model = Decoder(torch, shape)
    cache = Cache(torch, shape, batch, seq_len)
    prompt = model.tokens(batch, seq_len - 1)
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            tokens, begin = prompt, 0
            for _ in range(2):
                last = model.answer(model.hidden(tokens, begin, cache)[:, -1])
                tokens, begin = last.float().argmax(-1, keepdim=True), seq_len - 1
    return int(torch.cuda.max_memory_allocated()) - floor


def trained(torch: Any, shape: ModelShape, seq_len: int, batch: int, *, checkpointing: bool) -> int:
    """Return the peak, in bytes, of a third step of AdamW."""
    floor = emptied(torch)
    model = Decoder(torch, shape)
    optimizer = torch.optim.AdamW(model.parameters)
    tokens = model.tokens(batch, seq_len)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        output = model.answer(model.hidden(tokens, 0, None, checkpointing=checkpointing))
        loss = model.calls.cross_entropy(output.float().view(-1, shape.vocab), tokens.view(-1))
        loss.backward()
        del output, loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return int(torch.cuda.max_memory_allocated()) - floor


def emptied(torch: Any) -> int:
    """Let go of models before, make the libraries take their workspaces, and return what is allocated then."""
    gc.collect()
    torch.cuda.empty_cache()
    some = torch.ones((64, 64), device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (some @ some).sum().backward()
    del some
    return int(torch.cuda.memory_allocated())


def peaks(torch: Any, work: Work) -> Iterator[Peak]:
    """Measure a model: served at two lengths, trained with all activations kept and with checkpoints."""
    shape = read_model(next(one.config for one in PUBLIC if one.name == work.name))
    for seq_len, batch in work.served:
        estimate = InferenceMemoryEstimate(model=shape, seq_len=seq_len, batch=batch, bytes_per_value=2)
        yield Peak(work.name, "served", estimate, served(torch, shape, seq_len, batch))
    seq_len, batch = work.trained
    for checkpointing in (False, True):
        made = TrainingMemoryEstimate(
            model=shape, seq_len=seq_len, batch=batch, bytes_per_value=2, checkpointing=checkpointing
        )
        measured = trained(torch, shape, seq_len, batch, checkpointing=checkpointing)
        yield Peak(work.name, "trained, checkpoints" if checkpointing else "trained", made, measured)


def main() -> None:
    """Print the table."""
    import torch

    print(torch.cuda.get_device_name(), torch.__version__)  # noqa: T201
    print("| model | what | tokens | weights, GiB | estimate, GiB | measured, GiB | estimate by measured |")  # noqa: T201
    print("|---|---|---|---|---|---|---|")  # noqa: T201
    for work in WORKS:
        for peak in peaks(torch, work):
            print(peak, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
