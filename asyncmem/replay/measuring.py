"""Measures what a device's driver charges for memory, for replays of programs that are to run on that machine."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Final, TypeAlias

from asyncmem.devices import Device
from asyncmem.devices.base import Span
from asyncmem.errors import OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.replay.model import H200, Costs

_Remap: TypeAlias = Callable[[Sequence[Span], Sequence[Span]], None]

_MIB: Final = 1 << 20

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
