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
    config = _Config(family, found)
    shape = _FAMILIES.get(family, _llama)(config)
    return ModelShape(family=family, **config.check(shape))


Shape: TypeAlias = dict[str, Any]
"""The arguments of a `ModelShape`."""


class _Config:
    """Returns keys, and remembers those that are lacking, so that all of them can be named."""

    def __init__(self, family: str, found: Mapping[str, object]) -> None:
        self._family = family
        self._found = found
        self._lacking: list[str] = []

    def need(self, key: str) -> int:
        """Return a whole number that must be there."""
        if self._found.get(key) is None:
            self._lacking.append(key)
            return 1
        return self.whole(key, 0)

    def whole(self, key: str, otherwise: int) -> int:
        """Return a whole number, or what the family takes for granted."""
        value = self._found.get(key)
        if value is None:
            return otherwise
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequest(key, value, "a whole number")
        return value

    def yes(self, key: str, *, otherwise: bool = False) -> bool:
        """Return whether a switch is on."""
        value = self._found.get(key)
        return otherwise if value is None else bool(value)

    def listed(self, key: str) -> list[object]:
        """Return a list; empty where there is none."""
        value = self._found.get(key)
        return list(value) if isinstance(value, list) else []

    def check(self, shape: Shape) -> Shape:
        """Return the shape, if no key is lacking."""
        if self._lacking:
            known = "" if self._family in _FAMILIES else f"known are {', '.join(_FAMILIES)}"
            got = Described(f"a model of type {printable(reprlib.repr(self._family))} without them")
            raise InvalidRequest("config", got, f"the keys {', '.join(self._lacking)}", hint=known)
        return shape


def _load(path: Path) -> Mapping[str, object]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise InvalidRequest("config", Described(f"{path}: {error}"), "a model's config.json") from error
    if not isinstance(found, dict):
        raise InvalidRequest("config", Described(f"{path} with a {type(found).__name__}"), "an object of JSON")
    return found


def _llama(config: _Config) -> Shape:
    heads = config.need("num_attention_heads")
    bias = config.yes("attention_bias")
    return {
        "hidden": config.need("hidden_size"),
        "intermediate": config.need("intermediate_size"),
        "layers": config.need("num_hidden_layers"),
        "vocab": config.need("vocab_size"),
        "heads": heads,
        "kv_heads": config.whole("num_key_value_heads", heads),
        "head_dim": config.whole("head_dim", 0),
        "tie_embeddings": config.yes("tie_word_embeddings"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.yes("mlp_bias"),
    }


def _mistral(config: _Config) -> Shape:
    shape = _llama(config)
    window = config.whole("sliding_window", 0)
    return shape | {"window": window, "windowed_layers": shape["layers"] if window else 0}


def _mixtral(config: _Config) -> Shape:
    return _mistral(config) | {
        "experts": config.need("num_local_experts"),
        "experts_per_token": config.need("num_experts_per_tok"),
    }


def _qwen2(config: _Config) -> Shape:
    shape = _llama(config) | {"qkv_bias": True, "output_bias": False}
    window = config.whole("sliding_window", 0) if config.yes("use_sliding_window") else 0
    layers = max(shape["layers"] - config.whole("max_window_layers", shape["layers"]), 0) if window else 0
    return shape | {"window": window if layers else 0, "windowed_layers": layers}


def _qwen3(config: _Config) -> Shape:
    bias = config.yes("attention_bias")
    shape = _qwen2(config) | {"qkv_bias": bias, "output_bias": bias, "head_norms": True}
    return shape | {"head_dim": shape["head_dim"] or 128}


def _with_experts(config: _Config, shape: Shape) -> Shape:
    layers, every = shape["layers"], max(config.whole("decoder_sparse_step", 1), 1)
    # Every so many layers one has experts, counted from 1, unless it is listed.
    listed = {layer for layer in config.listed("mlp_only_layers") if isinstance(layer, int)}
    sparse = layers // every - sum(0 <= layer < layers and (layer + 1) % every == 0 for layer in listed)
    return shape | {
        "intermediate": config.need("moe_intermediate_size"),
        "experts": config.need("num_experts"),
        "experts_per_token": config.need("num_experts_per_tok"),
        "dense_layers": layers - sparse,
        "dense_intermediate": shape["intermediate"],
    }


def _qwen2_moe(config: _Config) -> Shape:
    shared = config.need("shared_expert_intermediate_size")
    return _with_experts(config, _qwen2(config)) | {"shared_intermediate": shared}


def _qwen3_moe(config: _Config) -> Shape:
    return _with_experts(config, _qwen3(config))


def _gemma(config: _Config) -> Shape:
    tied = config.yes("tie_word_embeddings", otherwise=True)
    return _llama(config) | {"tie_embeddings": tied, "head_dim": config.whole("head_dim", 256)}


def _gemma2(config: _Config) -> Shape:
    shape = _gemma(config)
    # Every other layer looks back on a window, the first one does.
    window = config.whole("sliding_window", 4096)
    return shape | {"norms": 4, "window": window, "windowed_layers": -(-shape["layers"] // 2) if window else 0}


def _phi3(config: _Config) -> Shape:
    return _mistral(config) | {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _phi(config: _Config) -> Shape:
    # Attention and the feed-forward part stand side by side behind one norm, and everything has a bias.
    return _llama(config) | {
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "norms": 1,
        "norm_bias": True,
    }


def _gpt2(config: _Config) -> Shape:
    hidden = config.need("n_embd")
    return {
        "hidden": hidden,
        "intermediate": config.whole("n_inner", 4 * hidden),
        "layers": config.need("n_layer"),
        "vocab": config.need("vocab_size"),
        "heads": config.need("n_head"),
        "tie_embeddings": config.yes("tie_word_embeddings", otherwise=True),
        "positions": config.need("n_positions"),
        "gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
    }


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
