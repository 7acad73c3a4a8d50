"""The stand-in does what Metal does, and does not forgive what Metal would not."""

import contextlib

import numpy as np
import pytest

from tests.metal.fake import FakeMetal, bridge, work

SOON = 60


@pytest.fixture
def gpu() -> object:
    machine = FakeMetal(knows_who_owns=True)
    yield machine.gpus[0]
    machine.stop()


@pytest.fixture(autouse=True)
def pool() -> object:
    with bridge.autorelease_pool():
        yield


def ended(one: work.MTLCommandBuffer) -> int:
    machine = one.machine
    machine.wait(lambda: one.status() in (work.COMPLETED, work.FAILED))
    return one.status()


def view(buffer: object) -> np.ndarray:
    return np.frombuffer(buffer.contents().as_buffer(buffer.length()), np.uint8)


def test_work_is_done_in_order_and_not_before(gpu: object) -> None:
    """A queue waits for an event; what is behind it, in whichever command buffer, waits with it."""
    queue, event, buffer = gpu.newCommandQueue(), gpu.newSharedEvent(), gpu.newBufferWithLength_options_(64, 0)
    first, second = queue.commandBuffer(), queue.commandBuffer()
    first.encodeWaitForEvent_value_(event, 3)
    for number, one in enumerate((first, second)):
        blit = one.blitCommandEncoder()
        blit.fillBuffer_range_value_(buffer, (4 * number, 8), number - 2)
        blit.endEncoding()
    second.encodeSignalEvent_value_(event, 5)
    first.commit()
    second.commit()
    event.setSignaledValue_(2)
    assert (first.status(), second.status(), view(buffer).any()) == (work.COMMITTED, work.COMMITTED, False)
    event.setSignaledValue_(3)
    assert ended(second) == first.status() == work.COMPLETED
    assert list(view(buffer)[:16]) == [254] * 4 + [255] * 8 + [0] * 4
    assert event.signaledValue() == 5
    event.setSignaledValue_(4)
    assert event.signaledValue() == 5
    assert not gpu.machine.wrong


def test_work_that_fails_does_and_signals_nothing(gpu: object) -> None:
    """Later work runs nevertheless."""
    queue, event = gpu.newCommandQueue(), gpu.newSharedEvent()
    gpu.machine.fail_work()
    for value in (1, 2):
        one = queue.commandBuffer()
        one.encodeSignalEvent_value_(event, value)
        one.commit()
        assert ended(one) == (work.FAILED if value == 1 else work.COMPLETED)
        assert event.signaledValue() == (0 if value == 1 else 2)
        assert (one.error() is not None) == (value == 1)
    assert not gpu.machine.wrong


def test_memory_lives_as_long_as_python_or_work_needs_it(gpu: object) -> None:
    """The reference that is new is somebody's: one who does not know it never lets go."""
    machine = gpu.machine
    buffer = gpu.newBufferWithLength_options_(4096, 0)
    assert gpu.currentAllocatedSize() == 4096
    del buffer
    assert gpu.currentAllocatedSize() == 0
    machine.knows_who_owns = False
    buffer = gpu.newBufferWithLength_options_(4096, 0)
    del buffer
    assert gpu.currentAllocatedSize() == 4096


def breaches(gpu: object) -> dict[str, object]:
    """What may not be done, by what is said of it."""
    queue, event, buffer = gpu.newCommandQueue(), gpu.newSharedEvent(), gpu.newBufferWithLength_options_(64, 0)

    def fill(start: int, count: int, *, end: bool = True) -> work.MTLCommandBuffer:
        one = queue.commandBuffer()
        blit = one.blitCommandEncoder()
        blit.fillBuffer_range_value_(buffer, (start, count), 1)
        if end:
            blit.endEncoding()
        return one

    def commit_twice() -> None:
        one = fill(0, 4)
        one.commit()
        one.commit()

    def let_go_of_memory() -> None:
        nonlocal buffer
        one = queue.commandBuffer()
        one.encodeWaitForEvent_value_(event, 1)
        blit = one.blitCommandEncoder()
        blit.fillBuffer_range_value_(buffer, (0, 4), 1)
        blit.endEncoding()
        one.commit()
        del blit
        buffer = None

    def go_back() -> None:
        event.setSignaledValue_(5)
        one = queue.commandBuffer()
        one.encodeSignalEvent_value_(event, 4)
        one.commit()
        ended(one)

    def without_a_pool() -> None:
        with contextlib.ExitStack() as stack:
            bridge.autorelease_pool().__exit__()
            stack.callback(bridge.autorelease_pool().__enter__)
            queue.commandBuffer()

    return {
        "no whole words": lambda: fill(1, 4),
        "not all in a buffer": lambda: fill(60, 8),
        "was committed": commit_twice,
        "is being encoded": lambda: fill(0, 4, end=False).commit(),
        "let go of before its end": lambda: fill(0, 4, end=False),
        "let go of under work": let_go_of_memory,
        "went back": go_back,
        "released once too often": buffer.release,
        "no pool is there": without_a_pool,
    }


@pytest.mark.parametrize("what", breaches(FakeMetal().gpus[0]))
def test_a_breach_of_the_rules_is_noted(gpu: object, what: str) -> None:
    """Metal would have ended the process, or done something else than was meant."""
    breaches(gpu)[what]()
    assert any(what in note for note in gpu.machine.wrong), gpu.machine.wrong


def test_bytes_are_signed_and_colons_take_arguments(gpu: object) -> None:
    """As PyObjC has it."""
    buffer, one = gpu.newBufferWithLength_options_(64, 0), gpu.newCommandQueue().commandBuffer()
    blit = one.blitCommandEncoder()
    with pytest.raises(ValueError, match="200"):
        blit.fillBuffer_range_value_(buffer, (0, 4), 200)
    with pytest.raises(TypeError, match="3 arguments"):
        blit.fillBuffer_range_value_(buffer, (0, 4))
    blit.endEncoding()
