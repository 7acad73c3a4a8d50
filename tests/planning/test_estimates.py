"""Estimates: their parts to the byte, the moment of the peak, and what else would fit."""

import dataclasses

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.planning import (
    InferenceMemoryEstimate,
    MemoryEstimate,
    TrainingMemoryEstimate,
    estimate_inference_memory,
    estimate_training_memory,
    read_model,
    transformer_warmup,
    warmup_from,
)
from asyncmem.planning.training import OPTIMIZERS

from .models import GEMMA_2, LLAMA_3, MISTRAL, MIXTRAL, PUBLIC, Public

GIB = 1 << 30


def serving(public: Public = LLAMA_3, seq_len: int = 8192, **terms: float | bool | None) -> InferenceMemoryEstimate:
    return InferenceMemoryEstimate(model=read_model(public.config), seq_len=seq_len, **terms)  # type: ignore[arg-type]


def training(public: Public = LLAMA_3, seq_len: int = 2048, **terms: float | str | bool) -> TrainingMemoryEstimate:
    return TrainingMemoryEstimate(model=read_model(public.config), seq_len=seq_len, **terms)  # type: ignore[arg-type]


def test_the_few_figures_of_a_model_are_enough() -> None:
    """A Mistral of 7 billion in three widths, from eight numbers."""
    for width, name in ((4, "fp32"), (2, "bf16"), (1, "int8"), (0.5, "int4")):
        one = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, width)
        assert one.weights == MISTRAL.parameters * width
        assert one == estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, name)


@pytest.mark.parametrize(
    ("public", "per_token"),
    [
        # 2 (keys and values) x layers x heads of them x their width x 2 bytes.
        (LLAMA_3, 2 * 32 * 8 * 128 * 2),
        (GEMMA_2, 2 * 26 * 4 * 256 * 2),
        (PUBLIC[0], 2 * 32 * 32 * 128 * 2),
        (MIXTRAL, 2 * 32 * 8 * 128 * 2),
    ],
    ids=str,
)
def test_the_cache_is_exact(public: Public, per_token: int) -> None:
    """Two values for each layer, head of keys and element of it, for each token of each sequence."""
    assert serving(public, 4096).kv_cache == per_token * 4096
    assert serving(public, 4096, batch=3).kv_cache == 3 * per_token * 4096
    assert serving(public, 4096, kv_bytes=1).kv_cache == per_token * 4096 // 2
    # Narrow weights do not make the cache narrow.
    assert serving(public, 4096, bytes_per_value=0.5).kv_cache == per_token * 4096


def test_a_rolling_cache_keeps_the_window() -> None:
    """All layers of a Mistral, every other one of a Gemma 2; and everything where it is shorter."""
    assert serving(MISTRAL, 16384, rolling=True).kv_cache == serving(MISTRAL, 4096).kv_cache
    assert serving(MISTRAL, 100, rolling=True).kv_cache == serving(MISTRAL, 100).kv_cache
    whole, window = serving(GEMMA_2, 16384).kv_cache, serving(GEMMA_2, 4096).kv_cache
    gemma = dataclasses.replace(serving(GEMMA_2, 16384), rolling=True)
    gemma = dataclasses.replace(gemma, model=dataclasses.replace(gemma.model, window=4096))
    assert gemma.kv_cache == (whole + window) // 2


def test_activations_are_those_of_the_widest_step() -> None:
    """A long prompt computes the feed-forward part, one token the output; chunks bound the prompt."""
    prompt, tokens = serving(), 8192
    assert prompt.activations == tokens * 2 * (3 * 4096 + 3 * 14336)
    assert serving(chunk=512).activations == 512 * 2 * (3 * 4096 + 3 * 14336)
    assert serving(chunk=1, batch=4).activations == 4 * 2 * 2 * 4096 + 4 * 128256 * (2 + 4)
    assert serving(chunk=100_000).activations == prompt.activations


def test_the_parts_of_serving_add_up() -> None:
    """Weights, cache and activations are all of it, in each unit."""
    one = serving(batch=4)
    assert one.total == sum(one.parts().values()) == one.weights + one.kv_cache + one.activations
    assert one.gib("kv_cache") == 4
    assert one.gb() == pytest.approx(one.total / 1e9)
    assert one.mib("activations") * 1024 == pytest.approx(one.gib("activations") * 1024**2)
    with pytest.raises(InvalidRequest, match="kv_cache"):
        one.gb("cache")


@pytest.mark.parametrize(("name", "per_parameter"), [("sgd", 0), ("sgd_momentum", 2), ("adamw", 4), ("adam", 4)])
def test_optimizers_keep_their_states(name: str, per_parameter: int) -> None:
    """As wide as the parameters that they update."""
    one = training(optimizer=name)
    assert one.optimizer_states == per_parameter * LLAMA_3.parameters
    assert training(optimizer=name, bytes_per_value=4).optimizer_states == 2 * per_parameter * LLAMA_3.parameters
    masters = training(optimizer=name, master_weights=True)
    assert masters.optimizer_states == (2 * per_parameter + 4) * LLAMA_3.parameters


def test_states_of_eight_bits_are_bytes_with_their_scales() -> None:
    """A scale in float32 for each 256 of them, also where weights are wide."""
    for width in (2, 4):
        states = training(optimizer="adamw_8bit", bytes_per_value=width).optimizer_states
        assert states == pytest.approx(2 * LLAMA_3.parameters * (1 + 4 / 256), rel=1e-6)


def test_activations_of_training_are_what_the_backward_pass_needs() -> None:
    """Of every layer, or of one and the inputs of all where they are computed again; and the loss in float32."""
    tokens, loss = 2048, 2048 * 128256 * (2 + 3 * 4)
    layer = 4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336
    assert training().activations == tokens * 2 * (32 * layer + 2 * 4096) + loss
    assert training(checkpointing=True).activations == tokens * 2 * (32 * 4096 + 2 * 4096) + loss


def test_the_peak_of_training_is_its_worst_moment() -> None:
    """Few tokens: the optimizer's step, which fused needs nothing; many tokens: the turn, where no gradient is."""
    few, many = training(seq_len=8), training(batch=16)
    weights = 2 * LLAMA_3.parameters
    assert few.total == weights + weights + 2 * weights + weights
    assert dataclasses.replace(few, fused=True).total < few.total
    assert many.total == many.weights + many.optimizer_states + many.activations
    assert dataclasses.replace(many, accumulate=True).total == many.total + many.gradients
    assert dataclasses.replace(many, checkpointing=True).total < many.total


def test_what_fits_fits_and_one_more_does_not() -> None:
    """The largest batch and length, of serving and of training; 0 where the weights alone are too much."""
    for one in (serving(), training(), training(checkpointing=True), serving(MIXTRAL, bytes_per_value=1)):
        room = 141 * 10**9
        batch, length = one.largest_batch(room), one.largest_seq_len(room)
        assert batch >= 1
        assert one.at(batch=batch).total <= room < one.at(batch=batch + 1).total
        assert one.at(seq_len=length).total <= room < one.at(seq_len=length + 1).total
        assert one.left(room) == room - one.total
        assert one.largest_batch("1 GiB") == one.largest_seq_len("1 GiB") == 0
        assert one.left("1 GiB") < 0


def test_an_estimate_says_all_of_it() -> None:
    """On a screen with units, and ready for JSON."""
    one = serving(batch=4)
    text = one.summary()
    for words in ("llama: 8,030,261,248 parameters of 2 B, 4 sequences of 8,192 tokens", "kv cache", "4 GiB"):
        assert words in text
    told = one.as_dict()
    assert (told["family"], told["kv_cache"], told["total"]) == ("llama", one.kv_cache, one.total)
    assert "optimizer states" in training().summary()


@pytest.mark.parametrize(
    ("terms", "name"),
    [
        ({"batch": 0}, "batch"),
        ({"seq_len": 0}, "seq_len"),
        ({"bytes_per_value": -2}, "bytes_per_value"),
        ({"bytes_per_value": "bf17"}, "bytes_per_value"),
        ({"kv_bytes": "bf17"}, "kv_bytes"),
        ({"chunk": 0}, "chunk"),
        ({"layers": 0}, "layers"),
    ],
)
def test_terms_that_cannot_be_right_are_refused(terms: dict[str, object], name: str) -> None:
    """By their name."""
    figures: dict[str, object] = {
        "hidden": 64,
        "intermediate": 256,
        "layers": 2,
        "vocab": 100,
        "heads": 4,
        "kv_heads": 2,
        "seq_len": 8,
    }
    with pytest.raises(InvalidRequest) as refused:
        estimate_inference_memory(**(figures | terms))  # type: ignore[arg-type]  # wrong on purpose
    assert refused.value.what == name


def test_an_unknown_optimizer_is_refused_with_the_known_ones() -> None:
    """All of them."""
    with pytest.raises(InvalidRequest, match=", ".join(OPTIMIZERS)):
        estimate_training_memory(64, 256, 2, 100, 4, 2, 8, optimizer="adamx")


@pytest.mark.parametrize(
    "one",
    [serving(), serving(MIXTRAL), training(), training(checkpointing=True), training(seq_len=8), training(GEMMA_2)],
    ids=repr,
)
def test_a_warmup_is_all_that_is_alive_at_the_peak(one: MemoryEstimate) -> None:
    """Together its buffers are the total, each size once, largest first."""
    sizes = warmup_from(one)
    assert sum(size * count for size, count in sizes) == one.total
    assert [size for size, _ in sizes] == sorted({size for size, _ in sizes}, reverse=True)
    assert all(size > 0 and count > 0 for size, count in sizes)


def test_a_transformer_has_its_buffers() -> None:
    """Those of a layer's width, of its feed-forward part, and tables of scores where they are kept."""
    assert transformer_warmup(2, 128, 64) == [(2 * 128 * 256 * 2, 4), (2 * 128 * 64 * 2, 8)]
    assert transformer_warmup(2, 128, 64, intermediate=96, layers=3) == [(2 * 128 * 96 * 2, 12), (2 * 128 * 64 * 2, 24)]
    assert (2 * 128 * 128 * 8 * 4, 2) in transformer_warmup(2, 128, 64, heads=8, bytes_per_value="fp32")
    with pytest.raises(InvalidRequest, match="layers"):
        transformer_warmup(2, 128, 64, layers=0)


@pytest.mark.asyncio
async def test_a_pool_takes_both() -> None:
    """What they name is served together without another segment."""
    small = estimate_inference_memory(64, 256, 2, 1000, 4, 2, 32)
    for sizes in (transformer_warmup(2, 128, 64), warmup_from(small)):
        async with AsyncMemoryPool("simulated") as pool:
            await pool.warmup(sizes)
            segments = pool.stats().grows
            buffers = [pool.allocate(size) for size, count in sizes for _ in range(count)]
            assert pool.stats().grows == segments > 0
            assert pool.stats().active_bytes == sum(size * count for size, count in sizes)
            for buffer in buffers:
                buffer.free()
