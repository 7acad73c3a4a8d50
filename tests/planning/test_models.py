"""The shapes of models: their parameters are counted to the last one, and files are read or refused by name."""

import json
from pathlib import Path

import pytest

from asyncmem import InvalidRequest
from asyncmem.planning import InferenceMemoryEstimate, ModelShape, TrainingMemoryEstimate, read_model

from .models import GEMMA_2, GPT2, LLAMA_3, MISTRAL, PUBLIC, Public, llama_like


@pytest.mark.parametrize("public", PUBLIC, ids=str)
def test_weights_are_the_true_number_of_parameters(public: Public) -> None:
    """Times the width, to the byte, to serve and to train."""
    model = read_model(public.config)
    assert model.parameters == public.parameters
    for width in (1, 2, 4):
        assert (
            InferenceMemoryEstimate(model=model, seq_len=8, bytes_per_value=width).weights == width * public.parameters
        )
    assert TrainingMemoryEstimate(model=model, seq_len=8).gradients == 2 * public.parameters


def test_layers_without_experts_are_counted_apart() -> None:
    """A step of two leaves every other layer dense, and layers may be named too."""
    base = llama_like("qwen3_moe", 64, 256, 4, 100, 4, 2, head_dim=16)
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    all_sparse = read_model({**base, **experts})
    dense, sparse = 3 * 64 * 256, 8 * 3 * 64 * 32 + 8 * 64
    stepped = read_model({**base, **experts, "decoder_sparse_step": 2})
    assert stepped.dense_layers == 2
    assert stepped.parameters == all_sparse.parameters + 2 * (dense - sparse)
    named = read_model({**base, **experts, "mlp_only_layers": [0]})
    assert named.parameters == all_sparse.parameters + dense - sparse


def test_windows_are_read() -> None:
    """All layers of a Mistral, every other one of a Gemma 2, and those of a Qwen2 only where they are switched on."""
    assert (read_model(MISTRAL.config).window, read_model(MISTRAL.config).windowed_layers) == (4096, 32)
    assert read_model(GEMMA_2.config).windowed_layers == 13
    qwen = llama_like("qwen2", 64, 256, 4, 100, 4, 2, sliding_window=32, max_window_layers=1)
    assert read_model(qwen).window == 0
    assert read_model({**qwen, "use_sliding_window": True}).windowed_layers == 3


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    """By its path, also as text."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3.config), encoding="utf-8")
    model = read_model(LLAMA_3.config)
    assert read_model(tmp_path) == read_model(str(tmp_path / "config.json")) == model
    assert model.family == "llama"


def test_an_unknown_model_says_which_keys_it_lacks() -> None:
    """All of them at once, and which families are known."""
    with pytest.raises(InvalidRequest, match="d_model_style") as refused:
        read_model({"model_type": "d_model_style", "hidden_size": 64, "vocab_size": 100})
    text = str(refused.value)
    for key in ("num_attention_heads", "intermediate_size", "num_hidden_layers"):
        assert key in text
    assert "hidden_size" not in text.replace("hidden_size,", "")
    assert "known are llama, mistral" in text


def test_an_unknown_model_with_the_keys_of_a_llama_is_read_as_one() -> None:
    """And keeps its own name."""
    model = read_model({**LLAMA_3.config, "model_type": "novel"})
    assert (model.parameters, model.family) == (LLAMA_3.parameters, "novel")


def test_a_known_model_that_lacks_keys_is_refused_too() -> None:
    """Its own keys are named."""
    with pytest.raises(InvalidRequest, match=r"n_layer, .*n_head|n_layer"):
        read_model({"model_type": "gpt2", "n_embd": 768})


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    """An empty file, other JSON, half of one: by the file's name."""
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_model(path)
    with pytest.raises(InvalidRequest, match="nowhere"):
        read_model(tmp_path / "nowhere")


def test_a_value_of_another_kind_is_refused_by_its_key() -> None:
    """Text where a number belongs."""
    with pytest.raises(InvalidRequest, match="num_hidden_layers"):
        read_model({**LLAMA_3.config, "num_hidden_layers": "32"})


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden": 0}, "hidden"),
        ({"layers": -1}, "layers"),
        ({"vocab": 1.5}, "vocab"),
        ({"heads": 3}, "hidden"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"windowed_layers": 3}, "windowed_layers"),
    ],
)
def test_figures_that_cannot_be_right_are_refused(change: dict[str, int], name: str) -> None:
    """By their name."""
    figures = {"hidden": 64, "intermediate": 256, "layers": 2, "vocab": 100, "heads": 4} | change
    with pytest.raises(InvalidRequest) as refused:
        ModelShape(**figures)  # type: ignore[arg-type]  # wrong on purpose
    assert refused.value.what == name


def test_learned_positions_bound_the_length() -> None:
    """A GPT-2 has no more than it has learned, and no estimate beyond."""
    model = read_model(GPT2.config)
    estimate = InferenceMemoryEstimate(model=model, seq_len=1024)
    with pytest.raises(InvalidRequest, match="1024"):
        estimate.at(seq_len=1025)
    assert estimate.largest_seq_len("100 GiB") == 1024
