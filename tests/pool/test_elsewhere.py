"""Memory that others take from the same device: growth leaves it theirs, and what is free goes back in time."""

import pytest

from asyncmem import OutOfMemoryError
from asyncmem.devices import Simulated
from asyncmem.testing import SteppedPool, run_steps
from asyncmem.testing.conservation import whole

from .support import MIB, quick_device

pytestmark = pytest.mark.may_block  # the worker's calls are steps of the loop


@pytest.fixture
def device() -> Simulated:
    """A device whose calls take no time."""
    return quick_device()


def test_growth_leaves_others_what_is_theirs(device: Simulated) -> None:
    """Whatever others have taken, `min_free` of the device stays free, and the error says so."""

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segment_size="16 MiB") as pool:
            device.take_elsewhere("32 MiB")
            first = await pool.allocate_async(4 * MIB)
            assert pool.stats().reserved_bytes == 16 * MIB
            second = await pool.allocate_async(16 * MIB, timeout=1) if device.memory().free > 24 * MIB else None
            assert second is None
            device.take_elsewhere("6 MiB")
            first.free()
            with pytest.raises(OutOfMemoryError, match=r"8 MiB stay free for others") as caught:
                await pool.allocate_async(20 * MIB)
            assert caught.value.facts.device_free == 26 * MIB
            assert device.memory().free >= 8 * MIB
            device.give_back_elsewhere("38 MiB")
            (await pool.allocate_async(20 * MIB)).free()
            whole(pool)

    run_steps(main())


def test_less_is_asked_for_where_the_usual_would_leave_too_little(device: Simulated) -> None:
    """The need is met as long as it leaves `min_free`, without the rest of an ordinary segment."""

    async def main() -> None:
        async with SteppedPool(device, min_free="8 MiB", segment_size="32 MiB") as pool:
            device.take_elsewhere("40 MiB")
            async with pool.allocate_async(4 * MIB):
                assert pool.stats().reserved_bytes == 4 * MIB

    run_steps(main())


def test_limit_in_bytes_has_been_thought_about(device: Simulated) -> None:
    """Who names bytes may use them all, unless `min_free` is named too."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB") as pool:
            (await pool.allocate_async(64 * MIB)).free()
        async with SteppedPool(device, limit="64 MiB", min_free="1 MiB") as pool:
            with pytest.raises(OutOfMemoryError):
                await pool.allocate_async(64 * MIB)

    run_steps(main())


def test_idle_pool_gives_back_what_is_free_when_the_driver_says_that_memory_is_short(device: Simulated) -> None:
    """Once a notice; what is held stays."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB", segment_size="1 MiB") as pool:
            held = await pool.allocate_async(8 * MIB)
            (await pool.allocate_async(32 * MIB)).free()
            pool._opened.tick()
            assert pool.stats().reserved_bytes == 40 * MIB
            device.take_elsewhere("32 MiB")
            pool._opened.tick()
            assert pool.stats().reserved_bytes == 8 * MIB
            device.give_back_elsewhere("32 MiB")
            (await pool.allocate_async(32 * MIB)).free()
            pool._opened.tick()
            assert pool.stats().reserved_bytes == 40 * MIB
            held.free()
            whole(pool)

    run_steps(main())


def test_device_that_fails_while_it_takes_back_is_a_warning(device: Simulated) -> None:
    """The pool goes on, and what the device did not take is offered again."""

    async def main() -> None:
        async with SteppedPool(device, limit="64 MiB") as pool:
            (await pool.allocate_async(64 * MIB)).free()
            device.take_elsewhere("1 MiB")
            device.fail("free_segment")
            with pytest.warns(RuntimeWarning, match="free_segment"):
                pool._opened.tick()
            assert await pool.trim() == 64 * MIB
            whole(pool)

    run_steps(main())
