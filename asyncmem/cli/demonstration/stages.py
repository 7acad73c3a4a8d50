"""The three stages, as work on streams: numpy on the host, and durations on the simulated device."""

import functools
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from asyncmem.core import Buffer
from asyncmem.devices import Device, Host, Simulated, Stream, device
from asyncmem.errors import InvalidRequest

Floats = npt.NDArray[np.float32]
Totals = npt.NDArray[np.float64]

VARIETIES: Final = 16
"""Items repeat after so many, so that what is right can be computed beforehand."""

SIMULATED_SECONDS: Final = 0.002
"""How long a stage works on an item where the work is only simulated."""


class Stages(Protocol):
    """Each stage queues its work and returns at once; only the last is awaited."""

    checks: str
    """What the verdict of `reduce` is founded on."""

    @property
    def decoding(self) -> Stream: ...
    @property
    def transforming(self) -> Stream: ...
    @property
    def reducing(self) -> Stream: ...

    def decode(self, index: int, raw: Buffer) -> None: ...
    def transform(self, raw: Buffer, features: Buffer) -> None: ...
    async def reduce(self, index: int, features: Buffer, totals: Buffer) -> bool:
        """Finish the item, and say whether its result is right."""


def decode(index: int, raw: Floats) -> None:
    """Make up an item's data."""
    np.multiply(_ramp(raw.size), index % VARIETIES + 1, out=raw)
    np.remainder(raw, 251, out=raw)


def transform(raw: Floats, features: Floats) -> None:
    """Compute something of the same size."""
    np.sqrt(raw, out=features)
    np.subtract(features, features.mean(), out=features)


def reduce(features: Floats, totals: Totals) -> None:
    """Sum it up."""
    totals[0] = np.square(features).sum(dtype=np.float64)
    totals[1] = features.max()


@functools.cache
def _ramp(size: int) -> Floats:
    return np.arange(size, dtype=np.float32)


def plain_totals(nbytes: int) -> list[Totals]:
    """Compute every variety with plain numpy memory: what the pipeline has to arrive at, bit for bit."""
    raw, features = np.empty((2, nbytes // 4), np.float32)
    results = []
    for index in range(VARIETIES):
        totals = np.empty(2, np.float64)
        decode(index, raw)
        transform(raw, features)
        reduce(features, totals)
        results.append(totals)
    return results


class HostStages:
    """Real work: each stage's numpy runs in order on its own stream's thread."""

    checks = "every result against plain numpy"

    def __init__(self, device: Host, item_bytes: int) -> None:
        self.decoding = device.create_stream("decode")
        self.transforming = device.create_stream("transform")
        self.reducing = device.create_stream("reduce")
        self._expected = plain_totals(item_bytes)

    def decode(self, index: int, raw: Buffer) -> None:
        """Queue the first stage."""
        self.decoding.run(decode, index, _floats(raw))

    def transform(self, raw: Buffer, features: Buffer) -> None:
        """Queue the second, behind the first of the same item."""
        raw.use_on(self.transforming)
        self.transforming.run(transform, _floats(raw), _floats(features))

    async def reduce(self, index: int, features: Buffer, totals: Buffer) -> bool:
        """Run the third behind the second, and compare."""
        features.use_on(self.reducing)
        result = np.asarray(totals.view("float64"))
        await self.reducing.run(reduce, _floats(features), result)
        return bool(np.array_equal(result, self._expected[index % VARIETIES]))


class SimulatedStages:
    """Work that only takes time. The device raises when two stages touch a buffer without order between them."""

    checks = "the stream order of every access"

    def __init__(self, device: Simulated) -> None:
        self.decoding = device.create_stream("decode")
        self.transforming = device.create_stream("transform")
        self.reducing = device.create_stream("reduce")

    def decode(self, index: int, raw: Buffer) -> None:  # noqa: ARG002 - all items take the same time
        """Queue the first stage."""
        self.decoding.launch(SIMULATED_SECONDS, writes=[raw])

    def transform(self, raw: Buffer, features: Buffer) -> None:
        """Queue the second, behind the first of the same item."""
        raw.use_on(self.transforming)
        self.transforming.launch(SIMULATED_SECONDS, reads=[raw], writes=[features])

    async def reduce(self, index: int, features: Buffer, totals: Buffer) -> bool:  # noqa: ARG002 - see decode
        """Run the third behind the second."""
        features.use_on(self.reducing)
        self.reducing.launch(SIMULATED_SECONDS, reads=[features], writes=[totals])
        await self.reducing.synchronize()
        return True


def _floats(buffer: Buffer) -> Floats:
    return np.asarray(buffer.view("float32"))


def device_for(name: str) -> Device:
    """Open the device of that name. The simulated one runs by the wall clock here, so that waiting really takes time.

    Raises:
        InvalidRequest: No such device.
        BackendUnavailable: It is not here.
    """
    found = device(name)
    return Simulated(clock="wall") if isinstance(found, Simulated) else found


def stages_for(device: Device, item_bytes: int) -> Stages:
    """Make the stages that can run on a device."""
    if isinstance(device, Host):
        return HostStages(device, item_bytes)
    if isinstance(device, Simulated):
        return SimulatedStages(device)
    raise InvalidRequest("device", device.name, 'one that the demonstration has stages for: "host" or "simulated"')
