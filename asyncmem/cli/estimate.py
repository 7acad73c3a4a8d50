"""`asyncmem estimate`: what a model would take, and whether the devices here have room for it."""

from typing import Any

import click

from asyncmem.cli.parameters import SIZE, json_option, refuse
from asyncmem.cli.tables import progress
from asyncmem.devices import devices
from asyncmem.figures import format_size
from asyncmem.planning import InferenceMemoryEstimate, MemoryEstimate, TrainingMemoryEstimate, read_model
from asyncmem.planning.sizes import DTYPES
from asyncmem.planning.training import OPTIMIZERS
from asyncmem.text import printable, to_json

_DTYPE = click.Choice(list(DTYPES))


@click.command()
@click.argument("config", metavar="CONFIG", type=click.Path(exists=True))
@click.option("--dtype", type=_DTYPE, default="bf16", show_default=True, help="Type of the weights.")
@click.option("--kv-dtype", type=_DTYPE, help="Type of keys and values in the cache.")
@click.option("--seq", type=click.IntRange(min=1), default=4096, show_default=True, help="Tokens of each sequence.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option("--chunk", type=click.IntRange(min=1), help="Tokens of a prompt that are computed at once.")
@click.option("--train", "optimizer", type=click.Choice(list(OPTIMIZERS)), help="Train with this optimizer.")
@click.option("--checkpointing", is_flag=True, help="With --train: layers keep their inputs alone.")
@click.option("--master-weights", is_flag=True, help="With --train: a copy of the weights in float32 is updated.")
@click.option("--fused", is_flag=True, help="With --train: the optimizer's step is one kernel.")
@click.option("--room", type=SIZE, metavar="SIZE", help="Compare with this much memory, and ask no device.")
@json_option
def estimate(
    config: str,
    dtype: str,
    kv_dtype: str | None,
    seq: int,
    batch: int,
    chunk: int | None,
    optimizer: str | None,
    room: int | None,
    *,
    as_json: bool,
    **training: bool,
) -> None:
    """Estimate what a model takes, and whether the devices here have room for it.

    CONFIG is a model's config.json, or the folder that it is in. Llama, Mistral, Mixtral, Qwen, Gemma, Phi and GPT-2
    are known; another model is read as a Llama, if it has that one's keys. Keys and values are as wide as what is
    computed, and a prompt goes through the layers at once, unless --kv-dtype and --chunk say otherwise.

    For each device it says what a pool may have there, what the model would leave of that, and the largest batch, and
    the largest length, that would fit with the other one as it is.
    """
    asked: dict[str, Any] = {"model": read_model(config), "seq_len": seq, "batch": batch, "bytes_per_value": dtype}
    one: MemoryEstimate
    if optimizer is None:
        refuse("goes with --train only", **training)
        one = InferenceMemoryEstimate(**asked | {"kv_bytes": kv_dtype, "chunk": chunk})
    else:
        refuse("does not go with --train", kv_dtype=kv_dtype, chunk=chunk)
        one = TrainingMemoryEstimate(**asked | training, optimizer=optimizer)
    fits = [_fit(one, format_size(room), room)] if room is not None else _fits_here(one)
    if as_json:
        click.echo(to_json(one.as_dict() | {"devices": fits}, indent=2))
        return
    wide = max(len(fit["name"]) for fit in fits)
    click.echo(one.summary() + "\n")
    for fit in fits:
        click.echo(f"  {printable(fit['name']):{wide}}  {_words(fit)}")


def _fits_here(one: MemoryEstimate) -> list[dict[str, Any]]:
    with progress("asking the devices"):
        found = devices()
    return [_fit(one, device.name, device.room(), device.reason) for device in found]


def _fit(one: MemoryEstimate, name: str, room: int, reason: str | None = None) -> dict[str, Any]:
    """Return how a model fits a device, or a size that stands for one.

    `left` is what the model leaves of the bytes that a pool may have there, below zero what it lacks. The largest batch
    and length are those that would fit with the other one as it is.
    """
    left = one.left(room)
    return {
        "name": name,
        "reason": reason,
        "room": room,
        "left": left,
        "fits": reason is None and left >= 0,
        "largest_batch": one.largest_batch(room),
        "largest_seq_len": one.largest_seq_len(room),
    }


def _words(fit: dict[str, Any]) -> str:
    if fit["reason"] is not None:
        return f"cannot be used: {printable(fit['reason'])}"
    most = "; at most batch {largest_batch:,}, or {largest_seq_len:,} tokens".format_map(fit)
    left, room = (format_size(abs(fit[name])) for name in ("left", "room"))
    text = f"fits: {left} of {room} are left" if fit["fits"] else f"too small: {left} more than {room} are needed"
    return text + most if fit["largest_seq_len"] else text
