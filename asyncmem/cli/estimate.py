"""`asyncmem estimate`: what a model would take, and whether the devices here have room for it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import click

from asyncmem.cli.parameters import read_size
from asyncmem.devices import DeviceInfo, devices
from asyncmem.figures import format_size
from asyncmem.planning import InferenceMemoryEstimate, MemoryEstimate, TrainingMemoryEstimate, read_model
from asyncmem.planning.optimizers import OPTIMIZERS
from asyncmem.planning.widths import DTYPES

_DTYPE = click.Choice(list(DTYPES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One device, or a size that stands for one, and what of the model goes there."""

    name: str
    reason: str | None
    """Why it cannot be used, or None."""
    room: int
    """Bytes that a pool may have there."""
    left: int
    """What the model leaves of them; below zero, what it lacks."""
    largest_batch: int
    """Sequences of this length that fit."""
    largest_seq_len: int
    """Tokens that each of these sequences may have."""

    def as_dict(self) -> dict[str, object]:
        """Answer it ready for JSON."""
        return {
            "name": self.name,
            "fits": self.fits,
            "reason": self.reason,
            "room": self.room,
            "left": self.left,
            "largest_batch": self.largest_batch,
            "largest_seq_len": self.largest_seq_len,
        }

    @property
    def fits(self) -> bool:
        """Whether the model runs there."""
        return self.reason is None and self.left >= 0


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
@click.option(
    "--room",
    callback=lambda *given: read_size(*given) if given[2] else None,
    metavar="SIZE",
    help="Compare with this much memory, and ask no device.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else.")
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
    """Say what a model would take, and whether the devices here have room for it.

    CONFIG is a model's config.json, or the folder that it is in. Llama, Mistral, Mixtral, Qwen, Gemma, Phi and GPT-2
    are known; another model is read as a Llama, if it has that one's keys. Keys and values are as wide as what is
    computed, and a prompt goes through the layers at once, unless --kv-dtype and --chunk say otherwise.

    For each device it says what a pool may have there, what the model would leave of that, and the largest batch, and
    the largest length, that would fit with the other one as it is.
    """
    model = read_model(config)
    one: MemoryEstimate
    if optimizer is None:
        _refuse_without_train(checkpointing=checkpointing, master_weights=master_weights, fused=fused)
        kv_bytes = None if kv_dtype is None else DTYPES[kv_dtype]
        one = InferenceMemoryEstimate(
            model=model, seq_len=seq, batch=batch, bytes_per_value=DTYPES[dtype], kv_bytes=kv_bytes, chunk=chunk
        )
    else:
        _refuse_with_train(kv_dtype=kv_dtype, chunk=chunk)
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
    places = list(_places(one, room))
    if as_json:
        click.echo(json.dumps(one.as_dict() | {"devices": [place.as_dict() for place in places]}, indent=2))
    else:
        click.echo(_text(one, places))


def _refuse_without_train(**given: bool) -> None:
    for name, value in given.items():
        if value:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --train only")


def _refuse_with_train(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} does not go with --train")


def _places(one: MemoryEstimate, room: int | None) -> Iterator[Place]:
    if room is not None:
        yield _place(one, format_size(room), room)
        return
    for device in devices():
        yield _place(one, device.name, device.room(), device)


def _place(one: MemoryEstimate, name: str, room: int, device: DeviceInfo | None = None) -> Place:
    return Place(
        name=name,
        reason=None if device is None else device.reason,
        room=room,
        left=one.left(room),
        largest_batch=one.largest_batch(room),
        largest_seq_len=one.largest_seq_len(room),
    )


def _text(one: MemoryEstimate, places: list[Place]) -> str:
    wide = max(len(place.name) for place in places)
    return "\n".join([one.summary(), "", *(f"  {place.name:{wide}}  {_words(place)}" for place in places)])


def _words(place: Place) -> str:
    if place.reason is not None:
        return f"cannot be used: {place.reason}"
    most = (
        f"; at most batch {place.largest_batch:,}, or {place.largest_seq_len:,} tokens" if place.largest_seq_len else ""
    )
    room = format_size(place.room)
    if place.fits:
        return f"fits: {format_size(place.left)} of {room} are left{most}"
    return f"too small: {format_size(-place.left)} more than {room} are needed{most}"
