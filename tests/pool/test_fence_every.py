"""The option `fence_every`: frees on another stream that share a fence cost fewer records, and lose nothing."""

from asyncmem import AsyncMemoryPool
from asyncmem.devices import Simulated

MIB = 1 << 20
FREES = 32


def records(device: Simulated, fence_every: int) -> int:
    """Free on a stream that is not home, and return how many fences that took."""
    home, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit="64 MiB", fence_every=fence_every) as pool:
        before = len(device.calls_of("record"))
        for _ in range(FREES):
            pool.allocate(MIB, stream=home).free(stream=other)
        recorded = len(device.calls_of("record")) - before
        assert pool.stats().allocated_bytes == 0
        pool.allocate("40 MiB", stream=home, timeout=60).free()  # what was freed comes back, its fences recorded
        pool.check()
    return recorded


def test_frees_share_fences_where_that_is_asked_for() -> None:
    """One fence a free is exact; with eight frees a fence there are an eighth of them."""
    device = Simulated("1 GiB")
    assert records(device, 1) == FREES
    assert records(device, 8) == FREES // 8


def test_it_can_be_changed_while_the_pool_is_in_use() -> None:
    """`configure` takes it, and the next frees go by it."""
    device = Simulated("1 GiB")
    home, other = device.create_stream(), device.create_stream()
    with AsyncMemoryPool(device, limit="64 MiB") as pool:
        pool.configure(fence_every=4)
        before = len(device.calls_of("record"))
        for _ in range(8):
            pool.allocate(MIB, stream=home).free(stream=other)
        assert len(device.calls_of("record")) - before == 2
