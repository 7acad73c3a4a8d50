"""`asyncmem estimate`: what a model would take, and whether the devices here have room for it."""

from dataclasses import asdict, dataclass

import click

from asyncmem.cli.parameters import SIZE, json_option
from asyncmem.cli.tables import progress
from asyncmem.devices import devices
from asyncmem.figures import format_size
from asyncmem.planning import InferenceMemoryEstimate, MemoryEstimate, TrainingMemoryEstimate, read_model
from asyncmem.planning.sizes import DTYPES
from asyncmem.planning.training import OPTIMIZERS
from asyncmem.text import printable, to_json

_DTYPE = click.Choice(list(DTYPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a model fits one device, or a size that stands for one."""

    name: str
    reason: str | None
    """Why the device cannot be used, or None."""
    room: int
    """Bytes that a pool may have there."""
    left: int
    """What the model leaves of them; below zero, what it lacks."""
    fits: bool
    """Whether the model runs there."""
    largest_batch: int
    """Sequences of this length that fit."""
    largest_seq_len: int
    """Tokens that each of these sequences may have."""


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
    checkpointing: bool,
    master_weights: bool,
    fused: bool,
    room: int | None,
    as_json: bool,
) -> None:
    """Estimate what a model takes, and whether the devices here have room for it.

    CONFIG is a model's config.json, or the folder that it is in. Llama, Mistral, Mixtral, Qwen, Gemma, Phi and GPT-2
    are known; another model is read as a Llama, if it has that one's keys. Keys and values are as wide as what is
    computed, and a prompt goes through the layers at once, unless --kv-dtype and --chunk say otherwise.

    For each device it says what a pool may have there, what the model would leave of that, and the largest batch, and
    the largest length, that would fit with the other one as it is.
    """
    model = read_model(config)
    one: MemoryEstimate
    if optimizer is None:
        _refuse("goes with --train only", checkpointing=checkpointing, master_weights=master_weights, fused=fused)
        kv_bytes = None if kv_dtype is None else DTYPES[kv_dtype]
        one = InferenceMemoryEstimate(
            model=model, seq_len=seq, batch=batch, bytes_per_value=DTYPES[dtype], kv_bytes=kv_bytes, chunk=chunk
        )
    else:
        _refuse("does not go with --train", kv_dtype=kv_dtype, chunk=chunk)
        one = TrainingMemoryEstimate(
            model=model,
            seq_len=seq,
            batch=batch,
            bytes_per_value=DTYPES[dtype],
            optimizer=optimizer,
            checkpointing=checkpointing,
            master_weights=master_weights,
            fused=fused,
        )
    fits = [_fit(one, format_size(room), room)] if room is not None else _fits_here(one)
    if as_json:
        click.echo(to_json(one.as_dict() | {"devices": [asdict(fit) for fit in fits]}, indent=2))
        return
    wide = max(len(fit.name) for fit in fits)
    click.echo(one.summary() + "\n")
    for fit in fits:
        click.echo(f"  {printable(fit.name):{wide}}  {_words(fit)}")


def _refuse(reason: str, **given: object) -> None:
    for name, value in given.items():
        if value:
            raise click.UsageError(f"--{name.replace('_', '-')} {reason}")


def _fits_here(one: MemoryEstimate) -> list[Fit]:
    with progress("asking the devices"):
        found = devices()
    return [_fit(one, device.name, device.room(), device.reason) for device in found]


def _fit(one: MemoryEstimate, name: str, room: int, reason: str | None = None) -> Fit:
    left = one.left(room)
    return Fit(
        name=name,
        reason=reason,
        room=room,
        left=left,
        fits=reason is None and left >= 0,
        largest_batch=one.largest_batch(room),
        largest_seq_len=one.largest_seq_len(room),
    )


def _words(fit: Fit) -> str:
    if fit.reason is not None:
        return f"cannot be used: {printable(fit.reason)}"
    most = f"; at most batch {fit.largest_batch:,}, or {fit.largest_seq_len:,} tokens" if fit.largest_seq_len else ""
    room = format_size(fit.room)
    if fit.fits:
        return f"fits: {format_size(fit.left)} of {room} are left{most}"
    return f"too small: {format_size(-fit.left)} more than {room} are needed{most}"
