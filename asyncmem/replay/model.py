"""What a program is replayed on: a device, how late it is, what its driver charges; and how memory is got from it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from statistics import median
from typing import Final, Self, TypeAlias

from asyncmem import readers
from asyncmem.core import DRIVER_CALLS
from asyncmem.devices import Device
from asyncmem.devices.base import Span
from asyncmem.errors import Described, InvalidRequest, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.files import read_json
from asyncmem.options import OPTIONS, PoolOptions
from asyncmem.readers import Patience

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""Points of rising size: bytes, and nanoseconds for one call. Between them the cost is a straight line."""

Costs: TypeAlias = Mapping[str, Curve]
"""A curve for each of the calls; a call that has none is free."""

_MIB: Final = 1 << 20

H200: Final[Costs] = {
    "cuMemCreate": ((2 * _MIB, 7_000), (20 * _MIB, 10_000), (256 * _MIB, 8_000), (1024 * _MIB, 15_000)),
    "cuMemMap": ((2 * _MIB, 600),),
    # Neighbours share a call that sets access or unmaps, but each handle costs as if it were alone.
    "cuMemSetAccess": ((2 * _MIB, 18_000), (20 * _MIB, 18_000), (256 * _MIB, 37_000), (1024 * _MIB, 59_000)),
    # Unmapping and releasing were measured together; how they share it is an assumption.
    "cuMemUnmap": ((2 * _MIB, 10_200), (1024 * _MIB, 112_400)),
    "cuMemRelease": ((2 * _MIB, 8_800), (256 * _MIB, 37_400), (1024 * _MIB, 120_600)),
    "cuMemAllocAsync": ((2 * _MIB, 34_000), (64 * _MIB, 57_000), (256 * _MIB, 186_000), (1024 * _MIB, 737_000)),
    # Freeing what is then trimmed out of the driver's pool was not measured; it is taken to be as dear as cuMemFree.
    "cuMemFreeAsync": ((2 * _MIB, 23_000), (64 * _MIB, 36_000), (256 * _MIB, 74_000), (1024 * _MIB, 231_000)),
    "cuMemAlloc": ((2 * _MIB, 26_000), (64 * _MIB, 29_000), (256 * _MIB, 33_000), (1024 * _MIB, 70_000)),
    "cuMemFree": ((2 * _MIB, 23_000), (64 * _MIB, 36_000), (256 * _MIB, 74_000), (1024 * _MIB, 231_000)),
    "cuEventRecord": ((0, 136),),
    "cuStreamWaitEvent": ((0, 116),),
}
"""NVIDIA H200, driver 580.159, CUDA 13.0, called from C."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A device that does its work a fixed time after it was given it.

    Attributes:
        lag: How late it is, in seconds: the memory that a program frees is in use for so long.
        pace: What the recorded times are multiplied by; 0 replays by the order of events alone.
        costs: What each driver call costs. It is counted, and not added to the program's time.

    Raises:
        InvalidRequest: A number is negative or not finite.
    """

    lag: float = 0.0
    pace: float = 1.0
    costs: Costs = field(default_factory=lambda: H200)

    def __post_init__(self) -> None:
        for name, value in (("lag", self.lag), ("pace", self.pace)):
            if not 0 <= value < math.inf:
                raise InvalidRequest(name, value, "a number from 0")

    def curves(self) -> list[list[tuple[int, float]]]:
        """Return the costs as the core takes them: in microseconds, in the order of `DRIVER_CALLS`."""
        return [[(nbytes, ns / 1000) for nbytes, ns in self.costs.get(call, ())] for call in DRIVER_CALLS]


_EXPECTED: Final = 'an object such as {"cuMemMap": [[2097152, 600]]}: points of rising bytes and nanoseconds by call'


def read_costs(path: str | PathLike[str]) -> Costs:
    """Read costs from a file of JSON: points of bytes and nanoseconds by the call's name; others are an H200's.

    Raises:
        InvalidRequest: The file is no such object, or names another call.
        OSError: The file cannot be read.
    """
    try:
        found = read_json(path)
    except ValueError as error:
        raise InvalidRequest("costs", Described(f"{path}: {error}"), _EXPECTED) from error
    if not isinstance(found, dict):
        raise InvalidRequest("costs", Described(f"{path} with a {type(found).__name__}"), _EXPECTED)
    return {**H200, **{call: _curve(call, points) for call, points in found.items()}}


def _curve(call: str, points: object) -> Curve:
    if call not in DRIVER_CALLS:
        raise InvalidRequest("costs", call, f"one of {', '.join(DRIVER_CALLS)}")
    if not isinstance(points, Sequence) or not points or not all(map(_is_point, points)):
        raise InvalidRequest(f"costs of {call}", points, "points such as [[2097152, 600]]")
    curve = tuple((nbytes, float(ns)) for nbytes, ns in points)
    if any(one[0] >= next_one[0] for one, next_one in pairwise(curve)):
        raise InvalidRequest(f"costs of {call}", points, "points of rising bytes")
    return curve


def _is_point(point: object) -> bool:
    match point:
        case [int(nbytes), int(ns) | float(ns)]:
            return 0 <= nbytes < 1 << 62 and 0 <= ns < 1 << 62 and not isinstance(ns, bool)
    return False


_Remap: TypeAlias = Callable[[Sequence[Span], Sequence[Span]], None]

_SIZES: Final = (2 * _MIB, 20 * _MIB, 64 * _MIB, 256 * _MIB, 1024 * _MIB)

_PIECES: Final = 4
"""So many are mapped at once, each apart from the others, so that each has calls of its own."""

_ASKED: Final = 2
"""One part in so many of what is free is asked for at most."""

_REPEATS: Final = 7

_UNMAPS: Final = 0.5
"""Of what it takes to unmap a small piece and to release it, the part of the former."""

_MAPS: Final = H200["cuMemMap"][0][1]

_SEGMENTS: Final = {"stream_ordered": ("cuMemAllocAsync", "cuMemFreeAsync"), "direct": ("cuMemAlloc", "cuMemFree")}


def measure_costs(device: Device) -> Costs:
    """Measure what the calls cost by which memory comes from a device and goes back (blocks, for about a second).

    All is done through the device, as a pool does it, so what a call takes on its way there is a part of its cost.
    Calls that have no like on this device are left out, and so are those for fences. A piece of memory comes, moves and
    goes by several calls that are timed together. So how they share it is an assumption: that mapping takes what it
    does on an H200, and unmapping the same at every size. A replay reckons with the sums.

    Args:
        device: Nothing else should use it meanwhile: up to half of what is free there is taken, and given back.

    Raises:
        OutOfMemoryError: Too little is free, or others took it meanwhile.
        DeviceError: A call failed.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    most = device.memory().free // _ASKED
    if device.page:
        for nbytes, calls in _of_pieces(device, _sizes(device, device.page, most // _PIECES)):
            for call, ns in calls.items():
                found.setdefault(call, []).append((nbytes, ns))
    for kind in filter(device.segment_kinds.__contains__, _SEGMENTS):
        for nbytes in _sizes(device, device.granularity, most):
            for call, ns in zip(_SEGMENTS[kind], _of_segment(device, kind, nbytes), strict=True):
                found.setdefault(call, []).append((nbytes, ns))
    return {call: tuple(points) for call, points in found.items()}


def _sizes(device: Device, unit: int, most: int) -> list[int]:
    whole = dict.fromkeys(-(-nbytes // unit) * unit for nbytes in _SIZES)
    fit = [nbytes for nbytes in whole if nbytes <= most]
    if not fit:
        raise OutOfMemoryError(OutOfMemoryFacts(asked=min(whole), device=device.name, device_free=most * _ASKED))
    return fit


def _of_pieces(device: Device, sizes: Sequence[int]) -> Iterator[tuple[int, dict[str, float]]]:
    """Time pieces that come, move and go; share the nanoseconds of one among its calls."""
    unmaps = math.inf
    for nbytes in sizes:
        come, move, go = _of_piece(device, nbytes)
        unmaps = min(unmaps, go * _UNMAPS, move)
        show = min(move - unmaps, come)  # to map, and to set access
        maps = min(_MAPS, show)
        yield (
            nbytes,
            {
                "cuMemCreate": come - show,
                "cuMemMap": maps,
                "cuMemSetAccess": show - maps,
                "cuMemUnmap": unmaps,
                "cuMemRelease": go - unmaps,
            },
        )


def _of_piece(device: Device, nbytes: int) -> tuple[float, float, float]:
    come, move, go = [], [], []
    with _reserved(device, 2 * _PIECES * nbytes) as (start, remap):
        places = [(start + at * nbytes, nbytes) for at in range(2 * _PIECES)]
        here, there = places[::2], places[1::2]
        for _ in range(1 + _REPEATS):
            come.append(_took(device, lambda: remap((), here)))
            move.append(_took(device, lambda: remap(here, there)))
            go.append(_took(device, lambda: remap(there, ())))
    return _usual(come) / _PIECES, _usual(move) / _PIECES, _usual(go) / _PIECES


def _of_segment(device: Device, kind: str, nbytes: int) -> tuple[float, float]:
    """Time getting a segment, and giving it back: nanoseconds."""
    took, went = [], []
    for _ in range(1 + _REPEATS):
        started = device.now
        segment = device.allocate_segment(nbytes, kind)
        took.append((device.now - started) * 1e9)
        try:
            device.default_stream.synchronize_blocking()
        finally:
            went.append(_took(device, lambda: device.free_segment(segment)))  # noqa: B023 - called at once
    return _usual(took), _usual(went)


def _took(device: Device, call: Callable[[], object]) -> float:
    started = device.now
    call()
    return (device.now - started) * 1e9


def _usual(times: Sequence[float]) -> float:
    return median(times[1:])  # for the first there was much to set up


@contextmanager
def _reserved(device: Device, nbytes: int) -> Iterator[tuple[int, _Remap]]:
    """Reserve addresses; give the first, and what maps there, which goes back with them."""
    mapped: set[Span] = set()
    start = device.reserve(nbytes)

    def remap(out: Sequence[Span], into: Sequence[Span]) -> None:
        done = device.remap(out, into)
        mapped.difference_update(out[: done.unmapped])
        mapped.update(into[: done.mapped])
        if done.error is not None:
            raise done.error

    try:
        yield start, remap
    finally:
        device.remap(sorted(mapped), ())  # and what the driver did not take back before
        device.unreserve(start, nbytes)


# -- how memory is got -------------------------------------------------------------------------------------------------

KINDS: Final = ("paged", "apart", "stream_ordered", "direct")
"""The kinds of segments that can be replayed."""

MATTERS: Final = (
    "small_limit",
    "strategy",
    "segment_size",
    "stream_cache_blocks",
    "stream_cache_bytes",
    "shared_cache_blocks",
    "shared_cache_bytes",
)
"""The options of a pool that change a replay."""

IMPATIENT: Final = Patience(seconds=0.0)
"""Growth does not wait."""

_OWN: Final = ("take_back", "patience")
_REPLAYED: Final = ("patience", *MATTERS)


@dataclass(frozen=True)
class Policy:
    """How memory is got; without arguments by pages below reserved addresses.

    Attributes:
        segments: "paged" (pages below reserved addresses), "stream_ordered" (segments, which become one where they lie
            side by side and are free in a stream's order), "apart" (those that never do) or "direct".
        take_back: Whether idle memory is used again before more than ever is taken: pages are moved, segments
            go back; for all but "direct".
        patience: How long growth may wait before more than ever is taken; for all but "direct".
        options: The pool's; those in `MATTERS` count.
        text: How it was written, for tables.

    Raises:
        InvalidRequest: There is no such kind of segments.
    """

    segments: str = "paged"
    take_back: bool = True
    patience: Patience = IMPATIENT
    options: PoolOptions = field(default_factory=PoolOptions)
    text: str = ""

    def __post_init__(self) -> None:
        if self.segments not in KINDS:
            raise InvalidRequest("policy", self.segments, f"one of {', '.join(KINDS)}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a kind of segments and settings, such as "paged,small_limit=512KiB,patience=2%,take_back=off".

        Raises:
            InvalidRequest: A setting is unknown, has no effect here, or cannot be right.
        """
        segments, settings = _read(text, "paged")
        own = {name: value for name, value in settings.items() if name in _OWN}
        options = {_known(name): value for name, value in settings.items() if name not in _OWN}
        return cls(
            segments=segments,
            take_back=bool(readers.switch(own.get("take_back", "on"), "take_back")),
            patience=readers.patience(own.get("patience", "0s"), "patience"),
            options=PoolOptions().replace(**options),  # type: ignore[arg-type]  # read as text
            text=text,
        )

    def __str__(self) -> str:
        return self.text or self.segments


def pool_options(text: str) -> PoolOptions:
    """Read a kind of segments and options of a pool, such as "paged,segment_size=2MiB", for a replay by a real one.

    Raises:
        InvalidRequest: There is no such option, or its value cannot be right.
    """
    segments, settings = _read(text, "auto")
    return PoolOptions(segments=segments).replace(**settings)  # type: ignore[arg-type]  # read as text


def policy_like(text: str) -> str:
    """Return the policy of the model that comes closest to a pool's options, both as text.

    Raises:
        InvalidRequest: There is no such option, or its value cannot be right.
    """
    kind = pool_options(text).segments
    segments = kind if kind in KINDS else "apart"  # the segments of the host and of other devices
    _, settings = _read(text, "auto")
    return ",".join([segments, *(f"{name}={value}" for name, value in settings.items() if name in _REPLAYED)])


def arguments_of(text: str) -> dict[str, object]:
    """Return a pool's options that are written as text, as its arguments.

    Raises:
        InvalidRequest: There is no such option, or its value cannot be right.
    """
    pool_options(text)
    segments, settings = _read(text, "auto")
    numbers = {name: int(value) for name, value in settings.items() if value.isdecimal()}
    return {"segments": segments, **settings, **numbers}


def _read(text: str, otherwise: str) -> tuple[str, dict[str, str]]:
    if not isinstance(text, str):
        raise InvalidRequest("policy", text, "text")
    segments, *settings = (part.strip() for part in text.split(","))
    if "=" in segments:
        segments, settings = otherwise, [segments, *settings]
    found = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise InvalidRequest("policy", setting, "settings such as small_limit=512KiB")
        found[name] = value
    return segments, found


def _known(name: str) -> str:
    if name in MATTERS:
        return name
    expected = f"one of {', '.join((*_OWN, *MATTERS))}"
    raise InvalidRequest("policy", name, expected, hint="it has no effect on a replay" if name in OPTIONS else "")
