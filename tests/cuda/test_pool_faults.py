"""Whichever call of the driver fails, a pool is usable or closed afterwards, and the driver holds nothing of it."""

import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from asyncmem import AsyncmemError, AsyncMemoryPool, DeviceError, PoolClosed, PoolTimeout
from asyncmem.devices import Stream
from asyncmem.devices.gpu.device import Gpu
from asyncmem.pool.executor import Executor
from tests.conservation import whole

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20
LIMIT = 12 * MIB
EDGE = 4096
"""Bytes that are written at either end of a block; the fake takes long for all of it."""
KINDS = ("paged", "stream_ordered", "direct")
CODES = {"out of memory": 2, "unknown": 999}

# What the driver calls when it lets go of a thing whose owner has nobody left to try again: failing, it stays.
FINAL = {"cuEventDestroy", "cuStreamDestroy", "cuDevicePrimaryCtxRelease"}


class Workload:
    """Requests on two streams, one after the other, with work, frees elsewhere and trims; its errors are counted."""

    def __init__(self, device: Gpu, kind: str) -> None:
        self.device = device
        self.streams = [device.create_stream(name) for name in ("left", "right")]
        self.pool = AsyncMemoryPool(
            device, limit=LIMIT, segment_size=4 * MIB, segments=kind, min_free=0, stall_after=None
        )
        self.errors: Counter[str] = Counter()

    def run(self) -> None:
        random_ = random.Random(0)
        for number in range(24):
            self.attempt(self.single, number, random_)
            if number % 8 == 5:
                self.attempt(lambda *_: self.pool.empty_cache(), number, random_)

    def attempt(self, part: Callable[[int, random.Random], None], number: int, random_: random.Random) -> None:
        try:
            part(number, random_)
        except AsyncmemError as error:
            self.errors[type(error).__name__] += 1

    def single(self, number: int, random_: random.Random) -> None:
        stream, other = self.streams[number % 2], self.streams[(number + 1) % 2]
        nbytes = random_.randrange(1, 4) * MIB
        with self.pool.allocate(nbytes, stream=stream, timeout=2) as buffer:
            self.fill(buffer.address, buffer.nbytes, stream)
            if random_.random() < 0.5:
                buffer.use_on(other)
                self.fill(buffer.address, buffer.nbytes, other)
                stream.wait(other.record())
            if random_.random() < 0.3:
                other.wait(stream.record())
                buffer.free(stream=other)

    def fill(self, address: int, nbytes: int, stream: Stream) -> None:
        for at in (address, address + nbytes - EDGE):
            self.device.fill(at, EDGE, 1, stream)


def survive(workload: Workload, fake: FakeDriver) -> None:
    """Play under faults, then see that the pool is whole and serves, or is closed and says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a fault that met nobody who waits is a warning
        workload.run()
        fake.clear_faults()
        workload.pool.check()
        try:
            workload.pool.allocate(LIMIT, timeout=10).free()
        except PoolClosed:
            pass
        else:
            whole(workload.pool)
        workload.pool.close()


def calls_of(fake: FakeDriver, gpu: Gpu, kind: str) -> Counter[str]:
    before = fake.counts()
    survive(Workload(gpu, kind), fake)
    return Counter(fake.counts()) - Counter(before)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_call_fails_once(fake: FakeDriver, gpu: Gpu, kind: str, code: str) -> None:
    """Calls of each name, the first, the last and some between."""
    for name, count in sorted(calls_of(fake, gpu, kind).items()):
        if name in FINAL:
            continue
        for nth in sorted({1, 2, count // 2, count}):
            if nth >= 1:
                workload = Workload(gpu, kind)
                fake.fail(name, nth, CODES[code])
                survive(workload, fake)
    assert gpu.memory().free == gpu.capacity


@pytest.mark.parametrize("kind", KINDS)
def test_calls_fail_at_random(fake: FakeDriver, gpu: Gpu, kind: str) -> None:
    """One in thirty, of any name, for longer than any retry lasts."""
    for seed in range(6):
        random_ = random.Random(seed)
        workload = Workload(gpu, kind)
        for _ in range(10):
            fake.fail("*", random_.randrange(1, 300), random_.choice([2, 999]), times=random_.randrange(1, 4))
        survive(workload, fake)


@pytest.mark.parametrize("kind", ["stream_ordered", "direct"])
def test_what_a_lost_device_does_not_take_back_is_offered_now_and_then(
    fake: FakeDriver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Neither the worker nor a thread that asks for it tries again at once, for ever."""
    pool = AsyncMemoryPool(gpu, limit=LIMIT, segments=kind, min_free=0, stall_after=None)
    offered = []
    offer = Executor._give_back
    monkeypatch.setattr(Executor, "_give_back", lambda *args: (offered.append(1), offer(*args)))
    buffer = pool.allocate(MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what the worker meets and nobody waits for
        fake.lose()
        buffer.free()
        pool.limit = MIB // 2
        for _ in range(2):
            with suppress(DeviceError):  # unless the worker is about to offer it
                pool.empty_cache()
        time.sleep(0.1)
        assert len(offered) < 20
        fake.devices(1)  # as no real device does, it comes back
        until = time.monotonic() + 60
        while pool.stats().reserved_bytes and time.monotonic() < until:
            with suppress(DeviceError):
                pool.empty_cache()
    assert pool.stats().reserved_bytes == 0
    pool.close()


@pytest.mark.parametrize("kind", ["paged", "stream_ordered"])
def test_a_pool_closes_though_new_memory_cannot_be_set_to_zero(fake: FakeDriver, gpu: Gpu, kind: str) -> None:
    """Nobody gets that memory any more, and it goes back as it is."""
    pool = AsyncMemoryPool(gpu, limit=LIMIT, segments=kind, min_free=0, stall_after=None, zero_segments=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what the worker meets
        fake.fail("cuMemsetD8Async", 1, CODES["unknown"], 10**9)
        with pytest.raises((DeviceError, PoolTimeout)):
            pool.allocate(MIB, timeout=1)
        pool.close()
    fake.clear_faults()
    assert pool.stats().reserved_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_device_fails_every_request_and_holds_up_nobody(fake: FakeDriver, gpu: Gpu, kind: str) -> None:
    """Requests fail with the loss by name, and closing ends, with an error where memory could not go back."""
    workload = Workload(gpu, kind)
    workload.run()
    workload.pool.empty_cache()
    held = workload.pool.allocate(MIB, stream=workload.streams[0])
    assert workload.errors == {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what the worker meets, perhaps at once, and nobody waits for
        fake.lose()
        with pytest.raises(DeviceError, match=r"(?i)illegal_?address"):
            workload.pool.allocate(LIMIT // 2, timeout=10)
        workload.run()
        assert workload.errors["DeviceError"]
        held.free()
        with pytest.raises(DeviceError, match=r"(?i)illegal_?address"):
            workload.pool.close()
        for _ in range(3):  # what was under way when it closed has the rest given back once more, which fails too
            workload.pool._opened.run(lambda: None).block(10)
    fake.devices(1)  # as no real device does, it comes back, and what the pool still has can be given back
    gpu.record_all().block()
    workload.pool._opened.release()
