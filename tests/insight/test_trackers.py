"""Profiles and trackers answer for a block of a program: its peak, what is live in it, what it leaves behind."""

import asyncio
import copy
import io
import pickle
import time

import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest, LeakWarning, PoolClosed, profile_memory, tag
from asyncmem.insight import AllocationTracker, MemoryTracker, Recording

from .support import MIB


@pytest.mark.asyncio
async def test_a_profile_is_of_its_block() -> None:
    """Peak, counters and records begin with the block and end with it."""
    async with AsyncMemoryPool("simulated") as pool:
        before = await pool.allocate_async(MIB)
        (await pool.allocate_async(50 * MIB)).free()
        async with profile_memory(pool) as profile:
            with tag("attention"):
                first = await pool.allocate_async(2 * MIB)
            second = await pool.allocate_async(3 * MIB)
            second.free()
            first.free()
            assert profile.peak_memory() == 6 * MIB
        for _ in range(5):
            (await pool.allocate_async(20 * MIB)).free()
        before.free()
        assert profile.peak_memory() == 6 * MIB
        assert profile.stats.num_allocations == profile.stats.num_frees == 2
        summary = profile.memory_summary()
    assert "6 MiB live" in summary
    assert "attention" in summary
    assert f"{__file__}:" in summary
    assert "5 MiB in 2 allocations" in summary


def test_the_pool_itself_gives_a_profile() -> None:
    """`performance_context` is the same in synchronous code; profiles lie in one another."""
    with AsyncMemoryPool("simulated") as pool, pool.performance_context() as outer:
        with pool.performance_context(frames=4) as inner:
            pool.allocate(MIB).free()
        pool.allocate(2 * MIB).free()
    assert inner.peak_memory() == MIB
    assert outer.peak_memory() == 2 * MIB
    with pytest.raises(InvalidRequest, match="has begun"):
        _ = profile_memory(pool).stats
    with pytest.raises(PoolClosed), profile_memory(pool):
        pass


def test_a_memory_tracker_prints_where_memory_went() -> None:
    """Of all pools, those that open inside the block too."""
    out = io.StringIO()
    with MemoryTracker() as tracker, AsyncMemoryPool("simulated", name="inside") as pool, tag("weights"):
        pool.allocate(7 * MIB).free()
    tracker.print_summary(out)
    text = out.getvalue()
    assert "inside on simulated:0" in text
    assert "7 MiB live" in text
    assert "weights" in text
    assert tracker.summary() + "\n" == text


@pytest.mark.asyncio
async def test_a_tracker_knows_what_is_live_and_whose_it_is() -> None:
    """Buffers by id, with tag, task, age and line; those of before by their size; those freed are gone."""

    async def work() -> None:
        await asyncio.sleep(0)  # a task that begins eagerly gets its name after its first step on some Pythons
        with tag("kept"):
            kept.append(await pool.allocate_async(200))

    kept = []
    async with AsyncMemoryPool("simulated") as pool:
        early = await pool.allocate_async(100)
        async with AllocationTracker(pool, warn=False) as tracker:
            await asyncio.create_task(work(), name="worker")
            (await pool.allocate_async(300)).free()
            old, new = tracker.live()
            assert (old.nbytes, old.site, old.tag) == (100, None, None)
            assert (new.nbytes, new.tag, new.task) == (200, "kept", "worker")
            assert new.site is not None
            assert new.site.function.endswith("work")
            assert new.address == kept[0].address
            assert (tracker.count, tracker.nbytes) == (2, 300)
            assert [one.nbytes for one in tracker.leaks] == [200]
            assert [(group.name, group.nbytes) for group in tracker.by("tag")] == [("kept", 200), ("?", 100)]
            assert tracker.live()[1].id == new.id
            kept.clear()
            assert [one.nbytes for one in tracker.live()] == [100]
            assert not tracker.leaks
        early.free()
        assert [one.nbytes for one in tracker.live()] == [100], "what was live at the end stays known"


def test_old_buffers_are_found() -> None:
    """By their age; a younger one is not among them."""
    with AsyncMemoryPool("simulated") as pool, AllocationTracker(pool, warn=False) as tracker:
        old = pool.allocate(10)
        time.sleep(0.05)
        young = pool.allocate(20)
        first, second = tracker.live()
        assert first.age >= second.age + 0.05
        border = (first.age + second.age) / 2 + 0.0
        assert 10 in [one.nbytes for one in tracker.find_old(border)]
        assert not tracker.find_old(3600)
        assert [one.nbytes for one in tracker.find_old(0)] == [10, 20]
        old.free()
        young.free()


def test_leaks_are_warned_of_with_their_lines() -> None:
    """At the end of the block, largest first; what is freed in time is none."""
    with AsyncMemoryPool("simulated", name="mine") as pool:
        tracker = AllocationTracker(pool).__enter__()
        with tag("forgotten"):
            kept = [pool.allocate(1024), pool.allocate(2049)]
        pool.allocate(5000).free()
        with pytest.warns(LeakWarning, match=r"'mine': 2 buffers of 3\.00 KiB still held") as found:
            tracker.__exit__(None, None, None)
        text = str(found[0].message)
        assert text.index("2.00 KiB tagged 'forgotten'") < text.index("1 KiB tagged 'forgotten'")
        assert text.count(f"made at {__file__}:") == 2
        kept.clear()
        with AllocationTracker(pool) as tracker:
            pool.allocate(10).free()
        assert tracker.report() == "pool 'mine': nothing that was allocated is still held"
        with pytest.raises(InvalidRequest, match="not used before"):
            tracker.__enter__()
        with pytest.raises(InvalidRequest, match="has begun"):
            AllocationTracker(pool).live()


def test_a_planted_leak_among_many_is_named() -> None:
    """One buffer that is kept among a hundred thousand that are not, by its line."""
    with AsyncMemoryPool("simulated") as pool:
        with AllocationTracker(pool, warn=False) as tracker:
            for number in range(100_000):
                buffer = pool.allocate(4096)
                if number == 54_321:
                    leak = buffer
        (found,) = (one for one in tracker.leaks if one.address == leak.address)
        assert found.id == 54_321
        assert found.site is not None
        assert found.site.file == __file__
        del leak, buffer


def test_a_recording_is_neither_copied_nor_pickled() -> None:
    """A copy would end it a second time."""
    with AsyncMemoryPool("host", limit="1 MiB") as pool:
        for kind in (Recording, profile_memory, AllocationTracker, MemoryTracker):
            for clone in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match="cannot copy or pickle"):
                    clone(kind(pool))
