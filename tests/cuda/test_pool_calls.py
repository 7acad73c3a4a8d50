"""What a pool asks of the driver once it has the memory it needs: nothing that blocks, and little at all."""

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Cuda

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20
POOLED = ("virtual", "stream_ordered")
ROUNDS = 20

# Fences, and the calls that put a thread's context and capture mode in place around them.
QUICK = {
    "cuCtxGetCurrent",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuCtxRecordEvent",
    "cuEventCreate",
    "cuEventQuery",
    "cuEventRecord",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
}


@pytest.mark.parametrize("kind", POOLED)
def test_memory_that_goes_between_streams_makes_no_call_that_blocks(fake: FakeDriver, cuda: Cuda, kind: str) -> None:
    """Producer and consumer, with the card behind the host all the time: the host waits for nothing."""
    a, b = cuda.create_stream("producer"), cuda.create_stream("consumer")
    with AsyncMemoryPool(cuda, limit=64 * MIB, segment_size=32 * MIB, segments=kind, min_free=0) as pool:

        def send() -> None:
            buffer = pool.allocate(MIB, stream=a)
            fake.launch(a.handle, 50_000, writes=[(buffer.address, buffer.size)])
            buffer.use_on(b)
            fake.launch(b.handle, 50_000, reads=[(buffer.address, buffer.size)])
            buffer.free()

        for _ in range(ROUNDS):
            send()
        before = fake.counts()
        for _ in range(ROUNDS):
            send()
        after = fake.counts()
        made = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
        assert set(made) <= QUICK
        assert made["cuEventRecord"] <= 4 * ROUNDS
        for stream in (a, b):
            stream.synchronize_blocking()


@pytest.mark.parametrize("kind", POOLED)
def test_a_stream_that_takes_what_it_freed_makes_no_call(fake: FakeDriver, cuda: Cuda, kind: str) -> None:
    """However many sizes: home hits need no fence."""
    stream = cuda.create_stream()
    with AsyncMemoryPool(cuda, limit=64 * MIB, segment_size=32 * MIB, segments=kind, min_free=0) as pool:

        def play() -> None:
            for nbytes in (512, 4096, MIB, 3 * MIB, 100):
                with pool.allocate(nbytes, stream=stream) as buffer:
                    fake.launch(stream.handle, writes=[(buffer.address, nbytes)])

        play()
        before = fake.calls()
        for _ in range(ROUNDS):
            play()
        assert fake.calls() == before
