"""What a buffer promises to whoever holds it."""

import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest

from asyncmem.core import Buffer
from asyncmem.errors import BufferReleased

from .support import FakePool, FakeStream, Missed, assert_all_free, ranges


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


def test_buffer_says_what_it_is(pool: FakePool) -> None:
    """Address, bytes, stream, tag and place can be read off it, and one line of repr has them."""
    buffer = pool.allocate(5000, tag="weights")
    assert (buffer.nbytes, buffer._block_bytes, len(buffer), buffer.tag) == (5000, 5120, 5000, "weights")
    assert buffer.location == "host"
    assert buffer.device is pool.core.device
    assert buffer.stream is pool.core.stream_objects[0]
    assert buffer.address % 512 == 0
    assert repr(buffer) == f"<Buffer 5000 B at {buffer.address:#x} on fake tag='weights'>"
    assert pool.core.tag_bytes() == {"weights": 5000}
    buffer.free()
    assert "freed" in repr(buffer)
    assert pool.core.tag_bytes() == {}


def test_dropping_a_buffer_gives_its_memory_back(pool: FakePool) -> None:
    """The last reference is the owner: without it nothing stays live."""
    buffer = pool.allocate(4096)
    assert pool.core.live() == 4096
    del buffer
    assert_all_free(pool)


def test_freeing_twice_does_nothing(pool: FakePool) -> None:
    """free() composes: a second one, or the destructor after it, gives nothing back again."""
    buffer = pool.allocate(4096)
    other = pool.allocate(4096)
    buffer.free()
    buffer.free()
    del buffer
    assert pool.core.live() == other._block_bytes
    other.free()
    assert_all_free(pool)


USES: dict[str, Callable[[Buffer], object]] = {
    "address": lambda b: b.address,
    "view": lambda b: b.view(),
    "memoryview": memoryview,
    "array_interface": lambda b: b.__array_interface__,
    "dlpack": lambda b: b.__dlpack__(),
    "use_on": lambda b: b.use_on(None),
    "hand_over": lambda b: b.hand_over(None),
    "with": lambda b: b.__enter__(),
    "async with": lambda b: b.__aenter__(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_of_a_freed_buffer_raises_by_name(pool: FakePool, use: Callable[[Buffer], object]) -> None:
    """Nothing that needs the memory works on a freed buffer, and the error says its size and tag."""
    buffer = pool.allocate(4096, tag="gone")
    buffer.free()
    with pytest.raises(BufferReleased, match=r"4\.00 KiB|4096|4 KiB") as caught:
        use(buffer)
    assert caught.value.tag == "gone"
    assert (buffer.nbytes, buffer.tag, buffer.alive) == (4096, "gone", False)


def test_an_export_keeps_the_block_after_free(pool: FakePool) -> None:
    """free() under a memoryview kills the buffer at once; the block comes back when the view dies."""
    buffer = pool.allocate(4096)
    view = memoryview(buffer)
    buffer.free()
    assert not buffer.alive
    assert (pool.core.exported_bytes, pool.core.live()) == (4096, 4096)
    view[0] = 7
    view.release()
    assert (pool.core.exported_bytes, pool.core.live()) == (0, 0)


def test_a_noted_buffer_under_export_is_ordered_when_the_export_dies(pool: FakePool) -> None:
    """Streams named at free() are ordered when the last export dies, not before: the consumer may still be at work."""
    buffer = pool.allocate(4096)
    view = memoryview(buffer)
    stream = FakeStream()
    buffer.free(stream)
    assert stream.records == 0
    view.release()
    assert stream.records == 1
    assert_all_free(pool)


def test_freeing_on_another_stream_records_a_fence_there(pool: FakePool) -> None:
    """The memory waits for a stream named at free(); the buffer's own needs nothing."""
    pool.allocate(4096).free(pool.device.default_stream)
    assert pool.device.default_stream.records == 0
    stream = FakeStream()
    pool.allocate(4096).free(stream)
    assert stream.records == 1
    assert_all_free(pool)


def test_a_refused_stream_loses_nothing(pool: FakePool) -> None:
    """When the device refuses the stream of a free(), the buffer is alive as before and can be freed rightly."""
    buffer = pool.allocate(4096)
    with pytest.raises(ValueError, match="not a stream"):
        buffer.free(object())
    assert buffer.alive
    buffer.free()
    assert_all_free(pool)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_noted_buffer_that_cannot_be_ordered_waits_for_every_stream(
    pool: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A destructor cannot raise: the error is reported, and the block owes every stream's open epoch."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: unraisable.append(report.exc_value))
    stream = FakeStream()
    buffer = pool.allocate(4096)
    address = buffer.address
    buffer.use_on(stream)
    stream.broken = ValueError("no fence")
    del buffer
    assert [str(error) for error in unraisable] == ["no fence"]
    assert next(b.entries for b in pool.core.blocks() if b.address == address) == ((0, 2), (1, 2))
    assert pool.core.live() == 0


def test_a_forgotten_buffer_is_told_to_the_pool(pool: FakePool) -> None:
    """A buffer whose place of birth is noted and that was never freed is reported; one that was freed is not."""
    for free in (False, True):
        buffer = pool.allocate(4096)
        buffer._noted().site = "here.py:1"
        if free:
            buffer.free()
        del buffer
    assert pool.forgotten == [4096]
    assert_all_free(pool)


def test_with_blocks_note_the_owner_and_free(pool: FakePool) -> None:
    """Whoever enters holds it, and leaving frees; leaving a freed buffer is quiet."""
    pool.serve()
    with pool.allocate(4096) as buffer:
        assert pool.held() == [4096]
    assert not buffer.alive
    with pool.allocate(100) as other:
        other.free()
        assert pool.held() == []
    assert_all_free(pool)


def test_weak_references_see_a_buffer_die(pool: FakePool) -> None:
    """Buffers can be referred to weakly, and recycled ones have no references of their predecessors."""
    buffer = pool.allocate(4096)
    died: list[str] = []
    weak = weakref.ref(buffer, lambda _: died.append("first"))
    del buffer
    assert weak() is None
    assert died == ["first"]
    assert weakref.getweakrefcount(pool.allocate(4096)) == 0


def test_dead_buffers_are_recycled_clean(pool: FakePool) -> None:
    """Whatever a buffer had carried, the next one made from its body starts empty."""
    buffer = pool.allocate(4096, tag="a")
    buffer._noted().site = "here.py:1"
    buffer.free()
    del buffer
    fresh = pool.allocate(4096)
    assert (fresh.tag, fresh._notes, fresh.alive, fresh._home) == (None, None, True, 0)


def test_no_references_are_lost_or_leaked(pool: FakePool) -> None:
    """Many lives and deaths leave the reference counts of core, tag and None where they were."""
    tag, core = str(id(pool)), pool.core
    pool.allocate(4096, tag=tag)
    before = sys.getrefcount(core), sys.getrefcount(tag)
    for _ in range(2000):
        pool.allocate(4096, tag=tag).free()
        pool.allocate(4096)
        pool.allocate(100).view("float32")
    assert (sys.getrefcount(core), sys.getrefcount(tag)) == before


def test_buffers_outlive_the_pool_that_made_them() -> None:
    """A buffer keeps its core alive: using and freeing it needs nothing of the pool's owner."""
    pool = FakePool()
    buffer, memory, core = pool.allocate(4096), pool.device.memory, pool.core
    core.pool = None
    del pool
    gc.collect()
    memoryview(buffer)[:3] = b"abc"
    assert bytes(memoryview(buffer)[:3]) == b"abc"
    buffer.free()
    assert core.live() == 0
    assert memory.size


def test_threads_allocate_and_free_at_once(pool: FakePool) -> None:
    """Threads that allocate, free and drop at the same time never share a byte and lose nothing."""
    kept: list[Buffer] = []

    def work(seed: int) -> None:
        mine: list[Buffer] = []
        for i in range(2000):
            mine.append(pool.allocate(512 * (1 + (i * seed) % 7)))
            if len(mine) > 20:
                mine.pop(i % 20).free()
        kept.extend(mine)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 5, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = ranges(kept)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    kept.clear()
    assert_all_free(pool)


def test_the_collector_at_its_busiest_changes_nothing(pool: FakePool) -> None:
    """With a collection at every allocation of a container, buffers in cycles still come back."""
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            cycle: list[object] = [pool.allocate(4096), pool.allocate_batch([512, 1024])]
            cycle.append(cycle)
            del cycle
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert_all_free(pool)


def test_a_traced_program_runs_the_same(pool: FakePool) -> None:
    """Tracing sees no difference and breaks nothing."""
    sys.settrace(lambda *_: None)
    try:
        pool.allocate(4096)
    finally:
        sys.settrace(None)
    assert_all_free(pool)


def test_signals_of_a_free_reach_the_pool_even_from_a_destructor(pool: FakePool) -> None:
    """A free behind a closed gate signals that somebody waits, and an exception under way survives it."""
    pool.serve()
    buffer = pool.allocate(4096)
    pool.core.set_gate(0, True)
    with pytest.raises(KeyError, match="under way"):
        _raise_with(buffer_holder=[buffer])
    del buffer
    gc.collect()
    assert pool.core.scheduler.gauges()["progress"] == 1


def _raise_with(buffer_holder: list[Buffer]) -> None:
    _held = buffer_holder.pop()
    raise KeyError("under way")


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_touches_nothing(pool: FakePool) -> None:
    """In a fork's child the doors miss and frees only mark the object: the memory is its parent's."""
    freed, dropped = pool.allocate(4096), [pool.allocate(4096)]
    child = os.fork()
    if child == 0:
        before = pool.core.live()
        freed.free()
        dropped.clear()
        sound = pool.core.forked and not freed.alive and pool.core.live() == before
        with suppress(Missed):
            pool.allocate(4096)
            sound = False
        os._exit(0 if sound else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert freed.alive
    assert isinstance(pool.allocate(4096), Buffer)
