"""Reads the shape of a model from its `config.json`, family by family.

A file leaves out what its family takes for granted, so each family says what that is.
"""

import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from asyncmem.errors import Described, InvalidRequest
from asyncmem.files import read_json
from asyncmem.planning.model import ModelShape
from asyncmem.text import printable

Source: TypeAlias = Mapping[str, object] | str | os.PathLike[str]
"""The path of a `config.json`, or of the folder it is in, or what it holds."""


def read_model(source: Source) -> ModelShape:
    """Read the shape of a model from its `config.json`.

    Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Gemma, Gemma 2, Phi, Phi-3 and GPT-2 are known. Any
    other is read as a Llama, whose `family` then keeps the name, if it has that one's keys.

    Raises:
        InvalidRequest: It is no such file; or keys are lacking, and all of them are named.
    """
    found = source if isinstance(source, Mapping) else _load(Path(source))
    family = printable(str(found.get("model_type") or "unknown"))
    config = _Config(found)
    shape = _FAMILIES.get(family, _llama)(config)
    if config.lacking:
        known = "" if family in _FAMILIES else f"known are {', '.join(_FAMILIES)}"
        got = Described(f"a model of type {printable(reprlib.repr(family))} without them")
        raise InvalidRequest("config", got, f"the keys {', '.join(config.lacking)}", hint=known)
    return ModelShape(family=family, **shape)


def _load(path: Path) -> Mapping[str, object]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest("config", Described(f"{path}: {error}"), "a model's config.json") from error
    if not isinstance(found, dict):
        raise InvalidRequest("config", Described(f"{path} with a {type(found).__name__}"), "an object of JSON")
    return found


Shape: TypeAlias = dict[str, Any]
"""The arguments of a `ModelShape`."""


class _Config:
    """Returns the values of keys, and remembers those that are lacking, so that all of them can be named."""

    def __init__(self, found: Mapping[str, object]) -> None:
        self.found = found
        self.lacking: list[str] = []

    def need(self, keys: Mapping[str, str]) -> Shape:
        """Return whole numbers that must be there, by the names of a shape."""
        self.lacking += [key for key in keys.values() if self.found.get(key) is None]
        return {name: self.whole(key, 1) for name, key in keys.items()}

    def whole(self, key: str, otherwise: int) -> int:
        """Return a whole number, or what the family takes for granted."""
        value = self.found.get(key)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(key, value, "a whole number")
        return value

    def yes(self, key: str, *, otherwise: bool = False) -> bool:
        """Return whether a switch is on."""
        value = self.found.get(key)
        return otherwise if value is None else bool(value)


_LLAMA: Final = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
}
_GPT2: Final = {
    "hidden": "n_embd", "layers": "n_layer", "vocab": "vocab_size", "heads": "n_head", "positions": "n_positions"
}  # fmt: skip
_MIXTRAL: Final = {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
_QWEN_MOE: Final = {
    "intermediate": "moe_intermediate_size", "experts": "num_experts", "experts_per_token": "num_experts_per_tok"
}  # fmt: skip
_BIASED: Final = {"gated": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True, "norm_bias": True}


def _llama(config: _Config) -> Shape:
    bias = config.yes("attention_bias")
    return config.need(_LLAMA) | {
        "kv_heads": config.whole("num_key_value_heads", 0),
        "head_dim": config.whole("head_dim", 0),
        "tie_embeddings": config.yes("tie_word_embeddings"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.yes("mlp_bias"),
    }


def _windowed(shape: Shape, window: int, layers: int) -> Shape:
    return shape | {"window": window, "windowed_layers": layers} if window and layers else shape


def _mistral(config: _Config) -> Shape:
    shape = _llama(config)
    return _windowed(shape, config.whole("sliding_window", 0), shape["layers"])


def _mixtral(config: _Config) -> Shape:
    return _mistral(config) | config.need(_MIXTRAL)


def _qwen2(config: _Config) -> Shape:
    shape = _llama(config) | {"qkv_bias": True, "output_bias": False}
    window = config.whole("sliding_window", 0) if config.yes("use_sliding_window") else 0
    return _windowed(shape, window, max(shape["layers"] - config.whole("max_window_layers", shape["layers"]), 0))


def _qwen3(config: _Config) -> Shape:
    bias = config.yes("attention_bias")
    shape = _qwen2(config) | {"qkv_bias": bias, "output_bias": bias, "head_norms": True}
    return shape | {"head_dim": shape["head_dim"] or 128}


def _with_experts(config: _Config, shape: Shape) -> Shape:
    layers, every = shape["layers"], max(config.whole("decoder_sparse_step", 1), 1)
    # Every so many layers one has experts, counted from 1, unless it is listed.
    named = config.found.get("mlp_only_layers")
    listed = {layer for layer in named if isinstance(layer, int)} if isinstance(named, list) else set()
    sparse = layers // every - sum(0 <= layer < layers and (layer + 1) % every == 0 for layer in listed)
    dense = {"dense_layers": layers - sparse, "dense_intermediate": shape["intermediate"]}
    return shape | dense | config.need(_QWEN_MOE)


def _qwen2_moe(config: _Config) -> Shape:
    return _with_experts(config, _qwen2(config)) | config.need(
        {"shared_intermediate": "shared_expert_intermediate_size"}
    )


def _qwen3_moe(config: _Config) -> Shape:
    return _with_experts(config, _qwen3(config))


def _gemma(config: _Config) -> Shape:
    tied = config.yes("tie_word_embeddings", otherwise=True)
    return _llama(config) | {"tie_embeddings": tied, "head_dim": config.whole("head_dim", 256)}


def _gemma2(config: _Config) -> Shape:
    shape = _gemma(config) | {"norms": 4}
    # Every other layer looks back on a window, the first one does.
    return _windowed(shape, config.whole("sliding_window", 4096), -(-shape["layers"] // 2))


def _phi3(config: _Config) -> Shape:
    return _mistral(config) | {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _phi(config: _Config) -> Shape:
    # Attention and the feed-forward part stand side by side behind one norm, and everything has a bias.
    return _llama(config) | _BIASED | {"head_bias": True, "norms": 1}


def _gpt2(config: _Config) -> Shape:
    shape = config.need(_GPT2)
    tied = config.yes("tie_word_embeddings", otherwise=True)
    return shape | _BIASED | {"intermediate": config.whole("n_inner", 4 * shape["hidden"]), "tie_embeddings": tied}


_FAMILIES: Final[dict[str, Callable[[_Config], Shape]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "phi": _phi,
    "phi3": _phi3,
    "gpt2": _gpt2,
}
