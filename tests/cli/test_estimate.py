"""`asyncmem estimate`: what a model takes, and what of it goes where."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from asyncmem.planning import InferenceMemoryEstimate, TrainingMemoryEstimate, read_model
from tests.cuda.fake import MIB, FakeDriver

Invoke = Callable[..., Result]

SMALL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Write a model's file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL), encoding="utf-8")
    return str(path)


def test_serving_is_estimated(invoke: Invoke, config: str) -> None:
    """Its figures are those of the library; a size stands for a device."""
    result = invoke("estimate", config, "--dtype", "fp16", "--seq", "512", "--batch", "4", "--room", "1 GiB", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    one = InferenceMemoryEstimate(model=read_model(SMALL), seq_len=512, batch=4)
    assert {name: told[name] for name in one.as_dict()} == one.as_dict()
    (place,) = told["devices"]
    assert place == {
        "name": "1 GiB",
        "fits": True,
        "reason": None,
        "room": 1 << 30,
        "left": (1 << 30) - one.total,
        "largest_batch": one.largest_batch(1 << 30),
        "largest_seq_len": one.largest_seq_len(1 << 30),
    }


def test_training_is_estimated(invoke: Invoke, config: str) -> None:
    """With an optimizer by name, and its options."""
    asked = ("--train", "adamw", "--checkpointing", "--master-weights", "--fused", "--seq", "512")
    told = json.loads(invoke("estimate", config, *asked, "--room", "1 GiB", "--json").stdout)
    one = TrainingMemoryEstimate(
        model=read_model(SMALL), seq_len=512, checkpointing=True, master_weights=True, fused=True
    )
    assert {name: told[name] for name in one.as_dict()} == one.as_dict()
    (place,) = told["devices"]
    assert not place["fits"]
    assert place["left"] < 0


def test_a_narrow_cache_and_chunks_take_less(invoke: Invoke, config: str) -> None:
    """Each of its own part."""
    plain = json.loads(invoke("estimate", config, "--room", "1 GiB", "--json").stdout)
    less = ("--kv-dtype", "fp8", "--chunk", "256")
    small = json.loads(invoke("estimate", config, *less, "--room", "1 GiB", "--json").stdout)
    assert small["kv_cache"] * 2 == plain["kv_cache"]
    assert small["activations"] < plain["activations"] / 8


@pytest.mark.fake_only
def test_each_device_says_whether_it_has_room(invoke: Invoke, config: str, fake: FakeDriver) -> None:
    """One has it, one has too little, and by how much."""
    fake.reset()
    fake.devices(2, 4096 * MIB)
    fake.others(3500 * MIB, 1)
    told = json.loads(invoke("estimate", config, "--seq", "512", "--json").stdout)
    first, second, *others = told["devices"]
    assert (first["name"], first["fits"]) == ("cuda:0", True)
    assert (second["name"], second["fits"]) == ("cuda:1", False)
    assert second["left"] == second["room"] - told["total"] < 0
    assert "host" in {one["name"] for one in others}
    text = invoke("estimate", config, "--seq", "512").stdout
    for words in ("llama:", "kv cache", "cuda:0", "fits:", "too small:", "at most batch"):
        assert words in text


@pytest.mark.fake_only
def test_a_device_that_cannot_be_used_says_why(invoke: Invoke, config: str, fake: FakeDriver) -> None:
    """In its line."""
    fake.devices(0)
    text = invoke("estimate", config).stdout
    assert "cannot be used" in text
    assert "no GPU" in text


@pytest.mark.parametrize(
    "wrong",
    [
        ("--dtype", "bf17"),
        ("--train", "adamx"),
        ("--checkpointing",),
        ("--fused",),
        ("--master-weights",),
        ("--train", "adamw", "--chunk", "8"),
        ("--train", "adamw", "--kv-dtype", "fp8"),
        ("--batch", "0"),
        ("--room", "much"),
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_refused(invoke: Invoke, config: str, wrong: tuple[str, ...]) -> None:
    """As a mistake of the command line, with the option's name."""
    result = invoke("estimate", config, *wrong)
    assert result.exit_code == 2
    assert wrong[-1 if wrong[-1].startswith("--") else -2] in result.output


def test_a_model_that_lacks_keys_is_refused(invoke: Invoke, tmp_path: Path) -> None:
    """By the keys."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "novel"}', encoding="utf-8")
    result = invoke("estimate", str(path))
    assert result.exit_code == 2
    assert "num_hidden_layers" in result.output
