"""What a pool asks of the driver once it has the memory it needs: nothing that blocks, and little at all."""

import pytest

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Cuda, GpuStream

from .fake import FakeDriver

pytestmark = pytest.mark.fake_only

MIB = 1 << 20
ROUNDS = 20
SIZES = (512, 4096, MIB, 3 * MIB, 100)

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


@pytest.mark.parametrize(("kind", "rounds"), [("paged", 6 * ROUNDS), ("stream_ordered", ROUNDS)])
def test_memory_that_goes_between_streams_makes_no_call_that_blocks(
    fake: FakeDriver, cuda: Cuda, kind: str, rounds: int
) -> None:
    """Producer and consumer, with a card that does nothing meanwhile: the host waits for nothing.

    After so many rounds what is of use has come: pages come one by one, a segment is larger than all.
    """
    a, b = cuda.create_stream("producer"), cuda.create_stream("consumer")
    for stream in (a, b):
        fake.hold(stream.handle)
    with AsyncMemoryPool(cuda, limit=256 * MIB, segment_size=32 * MIB, segments=kind, min_free=0) as pool:

        def send() -> None:
            buffer = pool.allocate(MIB, stream=a)
            fake.launch(a.handle, writes=[(buffer.address, buffer.nbytes)])
            buffer.use_on(b)
            fake.launch(b.handle, reads=[(buffer.address, buffer.nbytes)])
            buffer.free()

        for _ in range(rounds):
            send()
        before = fake.counts()
        for _ in range(ROUNDS):
            send()
        made = new_calls(fake, before)
        fake.release()
        assert set(made) <= QUICK
        assert made["cuEventRecord"] <= 4 * ROUNDS
        for stream in (a, b):
            stream.synchronize_blocking()


def test_a_stream_that_takes_what_it_freed_is_only_asked_whether_it_is_captured(fake: FakeDriver, cuda: Cuda) -> None:
    """However many sizes, home hits need no fence; who names no stream, so that it is the default one, asks nothing.

    Over segments: for pages the worker makes fences meanwhile.
    """
    for stream, asked in ((cuda.create_stream(), ROUNDS * len(SIZES)), (None, 0)):
        # Of its own, for in one where streams have waited for each other large frees have fences of their own.
        size = 32 * MIB
        with AsyncMemoryPool(cuda, limit=64 * MIB, segment_size=size, segments="stream_ordered", min_free=0) as pool:

            def play(stream: GpuStream | None = stream, pool: AsyncMemoryPool = pool) -> None:
                for nbytes in SIZES:
                    with pool.allocate(nbytes, stream=stream) as buffer:
                        fake.launch(cuda.stream_of(stream).handle, writes=[(buffer.address, nbytes)])

            for _ in range(256):  # after growth so many large frees have fences of their own
                play()
            before = fake.counts()
            for _ in range(ROUNDS):
                play()
            made = new_calls(fake, before)
            assert made.pop("cuStreamIsCapturing", 0) <= asked
            assert made == {}


def new_calls(fake: FakeDriver, before: dict[str, int]) -> dict[str, int]:
    """Return how many calls of each name have been made since."""
    return {name: count - before.get(name, 0) for name, count in fake.counts().items() if count > before.get(name, 0)}
