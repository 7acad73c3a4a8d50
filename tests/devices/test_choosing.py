"""What is there is listed with its room or the reason, and the device that is chosen has what is needed."""

from importlib.util import find_spec

import pytest

from asyncmem import AsyncMemoryPool, BackendUnavailable, InvalidRequest, NoDeviceHasRoom, PoolOptions
from asyncmem.devices import DeviceInfo, Host, OpenCL, Simulated, devices, discovery, select_device_for
from asyncmem.planning import estimate_inference_memory
from tests.cuda.fake import MIB, FakeDriver
from tests.cuda.leftovers import check_nothing_left

ALL = PoolOptions(fraction=1.0, min_free=0)
SMALL = estimate_inference_memory(64, 256, 2, 1000, 4, 2, 32)


@pytest.fixture(autouse=True)
def no_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let hip-python be missing: with it there is a line about ROCm, which `tests/rocm` is about."""
    monkeypatch.setattr(discovery, "find_spec", lambda name: None if name == "hip" else find_spec(name))


@pytest.fixture
def two(fake: FakeDriver) -> FakeDriver:
    """Two GPUs of 4 GiB, the first of which is half used by others."""
    fake.reset()
    fake.devices(2, 4096 * MIB)
    fake.others(2048 * MIB, 0)
    return fake


def test_the_host_is_always_there() -> None:
    """With what it has."""
    host = next(one for one in devices() if one.kind == "host")
    assert (host.name, host.kind, host.usable) == ("host", "host", True)
    assert host.total == Host().capacity
    assert host.free is not None
    assert 0 < host.free <= host.total


@pytest.mark.fake_only
def test_gpus_are_listed_with_what_is_free(two: FakeDriver) -> None:
    """Each is asked for itself, and nothing of it stays open."""
    before = two.live()
    first, second, *_ = devices()
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert first.total == second.total == 4096 * MIB
    assert (second.free or 0) - (first.free or 0) == 2048 * MIB
    check_nothing_left(two, before)


@pytest.mark.fake_only
def test_no_gpu_is_a_line_with_a_reason(fake: FakeDriver) -> None:
    """And no error."""
    fake.devices(0)
    gpu, *_ = devices()
    assert (gpu.name, gpu.usable, gpu.room()) == ("cuda", False, 0)
    assert "no GPU" in (gpu.reason or "")


@pytest.mark.fake_only
def test_a_gpu_that_fails_is_listed_with_its_error(two: FakeDriver) -> None:
    """The other one is still asked."""
    two.fail("cuDevicePrimaryCtxRetain", nth=1, code=46)
    first, second, *_ = devices()
    assert not first.usable
    assert "cuDevicePrimaryCtxRetain" in (first.reason or "")
    assert second.usable


def test_room_is_what_a_pool_may_have() -> None:
    """At most the limit, and what is free but for what is left to others; on the host nothing is left."""
    gpu = DeviceInfo(name="cuda:0", total=4096 * MIB, free=2048 * MIB)
    assert gpu.room() == 1536 * MIB
    assert gpu.room(ALL) == 2048 * MIB
    assert gpu.room(PoolOptions(limit="1 GiB")) == 1024 * MIB
    assert gpu.room(PoolOptions(limit="3 GiB")) == 2048 * MIB
    assert DeviceInfo(name="host", total=4096 * MIB, free=2048 * MIB).room() == 2048 * MIB
    assert DeviceInfo(name="cuda:0", total=4096 * MIB, free=100).room() == 0
    assert DeviceInfo(name="cuda:0", reason="why").room() == 0


@pytest.mark.fake_only
@pytest.mark.usefixtures("two")
def test_the_gpu_with_most_room_is_chosen() -> None:
    """Before the host, whatever that has; and what is preferred comes before both, if it has room."""
    assert select_device_for("1 GiB") == "cuda:1"
    assert select_device_for(SMALL) == "cuda:1"
    assert select_device_for("1 GiB", prefer="cuda:0") == "cuda:0"
    assert select_device_for("1 GiB", prefer=("host", "cuda:0")) == "host"
    assert select_device_for("3 GiB", prefer="cuda:0") == "cuda:1"


@pytest.mark.fake_only
@pytest.mark.usefixtures("two")
def test_where_nothing_has_room_each_says_what_it_lacks() -> None:
    """As facts and as a sentence."""
    with pytest.raises(NoDeviceHasRoom) as refused:
        select_device_for("100 TiB")
    error = refused.value
    assert isinstance(error, MemoryError)
    assert error.need == 100 << 40
    assert [one.device for one in error.shortfalls][:3] == ["cuda:0", "cuda:1", "host"]
    assert all(one.room + one.lacking == error.need for one in error.shortfalls)
    for one in error.shortfalls:
        assert one.describe() in str(error)


@pytest.mark.fake_only
def test_a_device_that_cannot_be_used_says_why_it_was_not_chosen(fake: FakeDriver) -> None:
    """Beside the host's shortfall."""
    fake.devices(0)
    with pytest.raises(NoDeviceHasRoom, match=r"cuda cannot be used: .*no GPU.*host has room for .* and lacks"):
        select_device_for("100 TiB")


@pytest.mark.usefixtures("opencl")
def test_a_processor_by_opencl_comes_after_the_host() -> None:
    """It has no other memory; whoever wants it says so."""
    *_, host, processor = devices()
    assert (host.name, processor.name, processor.is_processor) == ("host", "opencl:0", True)
    assert select_device_for(1) != "opencl:0"
    assert select_device_for(1, prefer="opencl") == "opencl:0"
    assert select_device_for(1, prefer=("opencl:0", "host")) == "opencl:0"


def test_a_gpu_by_opencl_comes_after_one_by_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """And before the host, however much room that has."""
    room = {"total": 64 << 30}
    cuda = DeviceInfo(name="cuda:0", free=8 << 30, **room)
    other = DeviceInfo(name="opencl:0", free=16 << 30, **room)
    host = DeviceInfo(name="host", free=32 << 30, is_processor=True, **room)
    processor = DeviceInfo(name="opencl:1", free=64 << 30, is_processor=True, **room)
    monkeypatch.setattr(discovery, "devices", lambda: (cuda, other, host, processor))
    found = [select_device_for(f"{size} GiB") for size in (4, 12, 24, 48)]
    assert found == ["cuda:0", "opencl:0", "host", "opencl:1"]


@pytest.mark.fake_only
def test_a_card_that_cuda_lists_is_not_listed_twice(
    two: FakeDriver, opencl: OpenCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory would be counted twice; where CUDA cannot use it, OpenCL may."""

    class Card:
        vendor_id = 0x10DE
        type = opencl.driver.cl.device_type.GPU

    monkeypatch.setattr(discovery, "find_devices", lambda _: [Card()])
    assert [one.name for one in devices()] == ["cuda:0", "cuda:1", "host"]
    two.devices(0)
    assert [one.name for one in devices()] == ["cuda", "opencl:0", "host"]


@pytest.mark.usefixtures("opencl")
def test_opencl_without_a_driver_is_a_line_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its package is installed; else nobody has asked for it."""

    def none(device: str) -> None:
        raise BackendUnavailable(device, tried=("the loader",))

    monkeypatch.setattr(discovery, "find_devices", none)
    line = next(one for one in devices() if one.kind == "opencl")
    assert (line.name, line.usable, line.reason) == ("opencl", False, "the loader")
    monkeypatch.setattr(discovery, "find_spec", lambda _: None)
    assert all(one.kind != "opencl" for one in devices())


@pytest.mark.parametrize("wish", ["cuba", "cuda:x", "opencl:x", "host:1", "simulated"])
def test_a_preference_that_is_no_device_is_refused(wish: str) -> None:
    """The simulated one has no memory of its own."""
    with pytest.raises(InvalidRequest, match="prefer"):
        select_device_for(1, prefer=wish)


@pytest.mark.parametrize("need", ["much", -1, 1.5, None])
def test_a_need_that_is_no_size_is_refused(need: object) -> None:
    """And says so by that name."""
    with pytest.raises(InvalidRequest, match="need"):
        select_device_for(need)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(InvalidRequest, match="need"):
        AsyncMemoryPool("host", need=need)  # type: ignore[arg-type]  # likewise


@pytest.mark.fake_only
@pytest.mark.asyncio
async def test_a_pool_finds_the_device_for_its_need(two: FakeDriver) -> None:
    """It opens where there is room, and has it reserved."""
    before = two.live()
    async with AsyncMemoryPool(need="3 GiB") as pool:
        await pool.wait()
        assert pool.device.name == "cuda:1"
        assert pool.stats().reserved_bytes >= 3072 * MIB
    check_nothing_left(two, before)


@pytest.mark.fake_only
@pytest.mark.asyncio
async def test_a_device_that_is_named_must_have_room(two: FakeDriver) -> None:
    """No other is taken in its place, and nothing of it stays open."""
    before = two.live()
    with pytest.raises(NoDeviceHasRoom, match="cuda:0 has room") as refused:
        await AsyncMemoryPool("cuda:0", need="3 GiB").open()
    assert [one.device for one in refused.value.shortfalls] == ["cuda:0"]
    check_nothing_left(two, before)


@pytest.mark.asyncio
async def test_a_pool_has_an_estimate_ready() -> None:
    """All of it is reserved once the pool is ready, so that no request grows."""
    async with AsyncMemoryPool(Simulated(), need=SMALL) as pool:
        await pool.wait()
        assert pool.options.need == SMALL.total
        stats = pool.stats()
        assert stats.reserved_bytes >= SMALL.total
        pool.allocate(SMALL.total).free()
        assert pool.stats().grows == stats.grows


@pytest.mark.asyncio
async def test_a_limit_below_the_need_is_refused() -> None:
    """Before anything is reserved."""
    device = Simulated()
    with pytest.raises(NoDeviceHasRoom, match="lacks 1 MiB"):
        await AsyncMemoryPool(device, need=3 * MIB, limit=2 * MIB).open()
    assert device.reserved == 0


def test_the_environment_may_name_a_need() -> None:
    """As a size."""
    assert PoolOptions.from_environment({"ASYNCMEM_NEED": "2 GiB"}).need == 2048 * MIB


def test_the_larger_of_need_and_pregrow_is_ready() -> None:
    """They do not add up."""
    assert PoolOptions(need=5, pregrow=3).ready == 5
    assert PoolOptions(need=3, pregrow=5).ready == 5
