"""The fake driver's memory: plain, pooled, mapped and on the host, its accounts, and what is refused."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from .fake import FakeDriver
from .fake.program import (
    MIB,
    PAGE,
    access,
    code,
    enter,
    fill,
    keep,
    mapped,
    ok,
    pool,
    read,
    recorded,
    reserved,
    stream,
    wait,
    wish,
)

pytestmark = pytest.mark.fake_only

INVALID_VALUE, OUT_OF_MEMORY, NOT_READY, ILLEGAL_ADDRESS = 1, 2, 600, 700


@pytest.fixture(autouse=True)
def context(fake: FakeDriver) -> Iterator[Any]:
    yield enter()
    fake.reset()


def free() -> int:
    return int(ok(cuda.cuMemGetInfo())[0])


class TestPlain:
    def test_is_the_devices_and_comes_back_once(self, fake: FakeDriver) -> None:
        """It is accounted for in whole pages, and a second free is refused."""
        before = free()
        address = ok(cuda.cuMemAlloc(3 * MIB))
        assert before - free() == 2 * PAGE == fake.used()
        ok(cuda.cuMemFree(address))
        assert free() == before
        assert code(cuda.cuMemFree(address)) == INVALID_VALUE
        assert code(cuda.cuMemAlloc(0)) == INVALID_VALUE

    def test_small_pieces_start_no_page(self) -> None:
        """As a driver's do, which lie between others."""
        assert int(ok(cuda.cuMemAlloc(100))) % PAGE == 512

    def test_a_part_of_it_is_no_allocation(self) -> None:
        """Only the address that was given out can be given back."""
        address = int(ok(cuda.cuMemAlloc(MIB)))
        assert code(cuda.cuMemFree(address + 512)) == INVALID_VALUE

    def test_all_kinds_share_the_devices_bytes(self, fake: FakeDriver) -> None:
        """What one way took, no other way finds; neither what other processes have."""
        fake.devices(1, 8 * PAGE)
        enter()
        own, made = stream(), pool()
        held = [ok(cuda.cuMemAlloc(2 * PAGE)), ok(cuda.cuMemAllocFromPoolAsync(2 * PAGE, made, own))]
        handle = ok(cuda.cuMemCreate(2 * PAGE, wish(), 0))
        fake.others(PAGE)
        assert free() == PAGE
        for call in (
            lambda: cuda.cuMemAlloc(2 * PAGE),
            lambda: cuda.cuMemAllocFromPoolAsync(2 * PAGE, made, own),
            lambda: cuda.cuMemCreate(2 * PAGE, wish(), 0),
        ):
            assert code(call()) == OUT_OF_MEMORY
        ok(cuda.cuMemRelease(handle))
        held.append(ok(cuda.cuMemAlloc(3 * PAGE)))
        assert free() == 0


class TestPools:
    def test_the_same_stream_gets_a_block_again_at_once(self) -> None:
        """Although the work before the free has not run."""
        own, made = stream(), pool()
        first = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, own))
        ok(cuda.cuMemFreeAsync(first, own))
        assert int(ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, own))) == int(first)

    def test_neighbours_that_one_stream_has_freed_are_one_block_to_it(self, fake: FakeDriver) -> None:
        """With what is new behind them, and before their work has run; another stream gets none of it."""
        own, other, made = stream(), stream(), pool()
        low, high = (ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, own)) for _ in range(2))
        assert int(high) == int(low) + PAGE
        fake.hold(int(own))
        for one in (low, high):
            ok(cuda.cuMemFreeAsync(one, own))
        assert int(ok(cuda.cuMemAllocFromPoolAsync(2 * PAGE, made, other))) != int(low)
        assert int(ok(cuda.cuMemAllocFromPoolAsync(2 * PAGE, made, own))) == int(low)
        assert reserved(made) == 4 * PAGE

    def test_another_stream_gets_it_only_behind_the_free(self, fake: FakeDriver) -> None:
        """By an event, or because the free has run; else the pool grows."""
        a, b, made = stream(), stream(), pool()
        first = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, a))
        fake.hold(int(a))
        fill(first, 1, PAGE, a)
        ok(cuda.cuMemFreeAsync(first, a))
        assert int(ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, b))) != int(first)
        wait(b, a)
        again = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, b))
        assert int(again) == int(first)
        fill(again, 2, PAGE, b)
        fake.release()
        assert read(again, 1, b) == b"\x02"
        assert fake.violations() == []

    def test_where_nothing_is_left_the_new_block_waits_for_the_free(self, fake: FakeDriver) -> None:
        """The stream that gets it then runs behind the one that freed it."""
        fake.devices(1, 2 * PAGE)
        enter()
        a, b, made = stream(), stream(), pool()
        first = ok(cuda.cuMemAllocFromPoolAsync(2 * PAGE, made, a))
        fake.hold(int(a))
        ok(cuda.cuMemFreeAsync(first, a))
        again = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, b))
        assert int(again) == int(first)
        assert code(cuda.cuEventQuery(recorded(b))) == NOT_READY
        fake.release()
        assert code(cuda.cuEventQuery(recorded(b))) == 0

    def test_use_before_the_allocation_is_told(self, fake: FakeDriver) -> None:
        """A block is there in the order of its stream; another one must wait for that."""
        a, b, made = stream(), stream(), pool()
        address = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, a))
        fake.launch(int(b), reads=[(int(address), 1)])
        assert "given out by work of stream" in fake.violations()[0]

    def test_freeing_before_another_streams_work_is_told(self, fake: FakeDriver) -> None:
        """The stream that frees is behind all that used the block."""
        a, b, made = stream(), stream(), pool()
        address = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, a))
        wait(b, a)
        fake.launch(int(b), reads=[(int(address), 1)])
        ok(cuda.cuMemFreeAsync(address, a))
        assert "cuMemFreeAsync on stream" in fake.violations()[0]
        assert code(cuda.cuMemFreeAsync(address, a)) == INVALID_VALUE

    def test_unused_memory_goes_back_when_the_host_waits(self) -> None:
        """Down to the threshold; and trimming ignores that."""
        own, made = stream(), pool()
        for threshold, left in ((0, 0), (PAGE, PAGE)):
            keep(made, threshold)
            blocks = [ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, own)) for _ in range(2)]
            for block in blocks:
                ok(cuda.cuMemFreeAsync(block, own))
            assert reserved(made) == 2 * PAGE
            ok(cuda.cuStreamSynchronize(own))
            assert reserved(made) == left
        ok(cuda.cuMemPoolTrimTo(made, 0))
        assert reserved(made) == 0

    def test_trimming_leaves_what_is_used_or_not_yet_free(self, fake: FakeDriver) -> None:
        """A free that has not run holds its memory."""
        own, made = stream(), pool()
        keep(made, 1 << 40)
        address = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, own))
        ok(cuda.cuMemPoolTrimTo(made, 0))
        assert reserved(made) == PAGE
        fake.hold(int(own))
        ok(cuda.cuMemFreeAsync(address, own))
        ok(cuda.cuMemPoolTrimTo(made, 0))
        assert reserved(made) == PAGE
        fake.release()
        ok(cuda.cuMemPoolTrimTo(made, 0))
        assert reserved(made) == 0

    def test_a_most_is_kept(self) -> None:
        """A pool with a size of its own takes no more."""
        own, made = stream(), pool(most=2 * PAGE)
        ok(cuda.cuMemAllocFromPoolAsync(2 * PAGE, made, own))
        assert code(cuda.cuMemAllocFromPoolAsync(1, made, own)) == OUT_OF_MEMORY

    def test_a_destroyed_pool_lives_until_its_last_block(self, fake: FakeDriver) -> None:
        """Nothing comes from it any more."""
        own, made = stream(), pool()
        address = ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, own))
        ok(cuda.cuMemPoolDestroy(made))
        assert code(cuda.cuMemAllocFromPoolAsync(PAGE, made, own)) == INVALID_VALUE
        assert fake.used() == PAGE
        ok(cuda.cuMemFreeAsync(address, own))
        ok(cuda.cuStreamSynchronize(own))
        assert fake.used() == 0
        assert "pools" not in fake.live()


class TestVirtual:
    def test_is_used_only_once_access_is_given(self, fake: FakeDriver) -> None:
        """A reservation is no memory, and a mapping is not accessible yet."""
        own = stream()
        address = ok(cuda.cuMemAddressReserve(4 * PAGE, 0, 0, 0))
        assert code(cuda.cuMemsetD8Async(address, 1, 1, own)) == INVALID_VALUE
        handle = ok(cuda.cuMemCreate(PAGE, wish(), 0))
        ok(cuda.cuMemMap(address, PAGE, 0, handle, 0))
        assert code(cuda.cuMemsetD8Async(address, 1, 1, own)) == INVALID_VALUE
        ok(cuda.cuMemSetAccess(address, PAGE, [access()], 1))
        fill(address, 1, PAGE, own)
        assert read(int(address) + PAGE - 1, 1, own) == b"\x01"
        fake.launch(int(own), reads=[(int(address), PAGE + 1)])
        assert code(cuda.cuStreamQuery(own)) == ILLEGAL_ADDRESS

    def test_sizes_are_whole_pages(self) -> None:
        """Everything else is refused."""
        assert code(cuda.cuMemAddressReserve(PAGE + 1, 0, 0, 0)) == INVALID_VALUE
        assert code(cuda.cuMemAddressReserve(PAGE, 3, 0, 0)) == INVALID_VALUE
        assert code(cuda.cuMemCreate(MIB, wish(), 0)) == INVALID_VALUE
        address = int(ok(cuda.cuMemAddressReserve(4 * PAGE, 0, 0, 0)))
        handle = ok(cuda.cuMemCreate(2 * PAGE, wish(), 0))
        for where, nbytes, offset in (
            (address + MIB, PAGE, 0),
            (address, MIB, 0),
            (address, 3 * PAGE, 0),
            (address, PAGE, PAGE),
            (address + 3 * PAGE, 2 * PAGE, 0),
        ):
            assert code(cuda.cuMemMap(where, nbytes, offset, handle, 0)) == INVALID_VALUE

    def test_an_address_holds_one_mapping(self) -> None:
        """What is mapped cannot be mapped again."""
        address = ok(cuda.cuMemAddressReserve(2 * PAGE, 0, 0, 0))
        mapped(address)
        handle = ok(cuda.cuMemCreate(PAGE, wish(), 0))
        assert code(cuda.cuMemMap(address, PAGE, 0, handle, 0)) == INVALID_VALUE

    def test_mappings_go_whole(self, fake: FakeDriver) -> None:
        """Several at once are fine, a part or a gap is refused, and so is a reservation with mappings."""
        address = int(ok(cuda.cuMemAddressReserve(8 * PAGE, 0, 0, 0)))
        mapped(address, 2 * PAGE)
        mapped(address + 2 * PAGE)
        mapped(address + 4 * PAGE)
        for where, nbytes in ((address, PAGE), (address + PAGE, PAGE), (address, 5 * PAGE), (address + 5 * PAGE, PAGE)):
            assert code(cuda.cuMemUnmap(where, nbytes)) == INVALID_VALUE
            assert code(cuda.cuMemSetAccess(where, nbytes, [access()], 1)) == INVALID_VALUE
        assert code(cuda.cuMemAddressFree(address, 8 * PAGE)) == INVALID_VALUE
        ok(cuda.cuMemUnmap(address, 3 * PAGE))
        ok(cuda.cuMemUnmap(address + 4 * PAGE, PAGE))
        assert code(cuda.cuMemAddressFree(address, 4 * PAGE)) == INVALID_VALUE
        ok(cuda.cuMemAddressFree(address, 8 * PAGE))
        assert code(cuda.cuMemAddressFree(address, 8 * PAGE)) == INVALID_VALUE
        assert fake.used() == 0

    def test_a_handle_is_released_once_and_its_mappings_keep_the_memory(self, fake: FakeDriver) -> None:
        """The bytes go when both are gone."""
        address = ok(cuda.cuMemAddressReserve(PAGE, 0, 0, 0))
        handle = ok(cuda.cuMemCreate(PAGE, wish(), 0))
        ok(cuda.cuMemMap(address, PAGE, 0, handle, 0))
        ok(cuda.cuMemRelease(handle))
        assert code(cuda.cuMemRelease(handle)) == INVALID_VALUE
        assert fake.used() == PAGE
        ok(cuda.cuMemUnmap(address, PAGE))
        assert fake.used() == 0
        assert code(cuda.cuMemMap(address, PAGE, 0, handle, 0)) == INVALID_VALUE

    def test_two_mappings_of_a_handle_show_the_same_bytes(self) -> None:
        """Memory is the handle's, not the address's."""
        own = stream()
        address = int(ok(cuda.cuMemAddressReserve(2 * PAGE, 0, 0, 0)))
        handle = ok(cuda.cuMemCreate(PAGE, wish(), 0))
        for where in (address, address + PAGE):
            ok(cuda.cuMemMap(where, PAGE, 0, handle, 0))
        ok(cuda.cuMemSetAccess(address, 2 * PAGE, [access()], 1))
        fill(address, 9, 1, own)
        assert read(address + PAGE, 1, own) == b"\x09"

    def test_work_at_a_second_address_is_in_order_with_the_first_or_told(self, fake: FakeDriver) -> None:
        """The memory's uses go with it, and whoever goes on at the first address is told of, too."""
        a, b = stream(), stream()
        address = int(ok(cuda.cuMemAddressReserve(2 * PAGE, 0, 0, 0)))
        handle = ok(cuda.cuMemCreate(PAGE, wish(), 0))
        ok(cuda.cuMemMap(address, PAGE, 0, handle, 0))
        ok(cuda.cuMemSetAccess(address, PAGE, [access()], 1))
        fill(address, 1, PAGE, a)
        ok(cuda.cuMemMap(address + PAGE, PAGE, 0, handle, 0))
        ok(cuda.cuMemSetAccess(address + PAGE, PAGE, [access()], 1))
        fill(address + PAGE, 2, PAGE, a)
        assert fake.violations() == []
        fill(address + PAGE, 3, PAGE, b)
        fill(address, 4, PAGE, a)
        late, moved = fake.violations()
        assert "written by work of stream" in late
        assert "whose memory has moved" in moved

    def test_unmapping_under_work_that_the_host_has_not_seen_done_is_told(self, fake: FakeDriver) -> None:
        """No stream is asked, so a wait of a stream is not enough."""
        a, b = stream(), stream()
        address = int(ok(cuda.cuMemAddressReserve(PAGE, 0, 0, 0)))
        mapped(address)
        fill(address, 1, PAGE, a)
        wait(b, a)
        ok(cuda.cuMemUnmap(address, PAGE))
        assert "cuMemUnmap by the host: written by work of stream" in fake.violations()[0]


class TestCopies:
    def test_locked_host_memory_is_read_when_the_copy_runs(self, fake: FakeDriver) -> None:
        """So changing it before is a mistake that shows; pageable bytes are taken along by the call."""
        own, address = stream(), ok(cuda.cuMemAlloc(MIB))
        locked, pageable = ok(cuda.cuMemHostAlloc(16, 0)), ctypes.create_string_buffer(b"old", 16)
        ctypes.memmove(locked, b"old", 3)
        fake.hold(int(own))
        ok(cuda.cuMemcpyHtoDAsync(address, locked, 16, own))
        ok(cuda.cuMemcpyHtoDAsync(int(address) + 16, ctypes.addressof(pageable), 16, own))
        ctypes.memmove(locked, b"new", 3)
        ctypes.memmove(pageable, b"new", 3)
        fake.release()
        assert read(address, 32, own)[::16] + read(int(address) + 16, 3, own) == b"no" + b"old"
        ok(cuda.cuMemFreeHost(locked))
        assert code(cuda.cuMemFreeHost(locked)) == INVALID_VALUE

    def test_a_copy_that_ends_outside_its_memory_is_refused(self) -> None:
        """Both sides must be there as a whole."""
        own, address = stream(), int(ok(cuda.cuMemAlloc(MIB)))
        target = ctypes.create_string_buffer(MIB)
        assert code(cuda.cuMemcpyDtoHAsync(ctypes.addressof(target), address + 1, MIB, own)) == INVALID_VALUE
        assert code(cuda.cuMemcpyDtoDAsync(address + MIB // 2, address, MIB, own)) == INVALID_VALUE

    def test_an_address_says_what_it_is(self, context: Any) -> None:
        """Kind, device, context, and where its memory starts."""
        which = cuda.CUpointer_attribute
        address, locked = int(ok(cuda.cuMemAlloc(MIB))), ok(cuda.cuMemHostAlloc(16, 0))
        ask = cuda.cuPointerGetAttribute
        assert int(ok(ask(which.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address))) == 2
        assert int(ok(ask(which.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, locked))) == 1
        assert ok(ask(which.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)) == 0
        assert int(ok(ask(which.CU_POINTER_ATTRIBUTE_CONTEXT, address))) == int(context)
        assert int(ok(ask(which.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address + 5))) == address
        unknown = ctypes.create_string_buffer(1)
        assert code(ask(which.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ctypes.addressof(unknown))) == INVALID_VALUE


class TestPeers:
    @pytest.fixture
    def peers(self, fake: FakeDriver) -> tuple[Any, Any]:
        fake.devices(2)
        other = enter(1)
        return enter(0), other

    def test_plain_memory_is_anothers_only_once_enabled(self, fake: FakeDriver, peers: tuple[Any, Any]) -> None:
        """From the context that wants it; twice is refused."""
        home, other = peers
        address = ok(cuda.cuMemAlloc(MIB))
        ok(cuda.cuCtxSetCurrent(other))
        own = stream()
        assert code(cuda.cuMemsetD8Async(address, 1, 1, own)) == INVALID_VALUE
        ok(cuda.cuCtxEnablePeerAccess(home, 0))
        assert code(cuda.cuCtxEnablePeerAccess(home, 0)) == 704
        fill(address, 1, 1, own)
        assert fake.violations() == []

    @pytest.mark.parametrize("granted", [False, True])
    @pytest.mark.parametrize("kind", ["pooled", "mapped"])
    def test_a_kernel_needs_the_grant(self, fake: FakeDriver, peers: tuple[Any, Any], kind: str, granted: bool) -> None:
        """Of the pool, or of each mapping: a kernel elsewhere loses its device without."""
        home = stream()
        if kind == "pooled":
            made = pool()
            address = int(ok(cuda.cuMemAllocFromPoolAsync(PAGE, made, home)))
            if granted:
                ok(cuda.cuMemPoolSetAccess(made, [access(1)], 1))
        else:
            address = int(ok(cuda.cuMemAddressReserve(PAGE, 0, 0, 0)))
            mapped(address)
            if granted:
                ok(cuda.cuMemSetAccess(address, PAGE, [access(1)], 1))
        ok(cuda.cuCtxSetCurrent(peers[1]))
        own = stream()
        wait_for = recorded_on(home, peers[0], peers[1])
        ok(cuda.cuStreamWaitEvent(own, wait_for, 0))
        fake.launch(int(own), writes=[(address, PAGE)])
        assert code(cuda.cuStreamQuery(own)) == (0 if granted else ILLEGAL_ADDRESS)
        assert len(fake.violations()) == (0 if granted else 1)

    def test_bytes_go_over_without_a_grant(self, fake: FakeDriver, peers: tuple[Any, Any]) -> None:
        """A peer copy names both contexts and needs no access of one to the other's memory."""
        own, source = stream(), ok(cuda.cuMemAlloc(MIB))
        ok(cuda.cuCtxSetCurrent(peers[1]))
        target = ok(cuda.cuMemAlloc(MIB))
        ok(cuda.cuCtxSetCurrent(peers[0]))
        fill(source, 3, MIB, own)
        ok(cuda.cuMemcpyPeerAsync(target, peers[1], source, peers[0], MIB, own))
        ok(cuda.cuStreamSynchronize(own))
        assert ctypes.string_at(int(target), MIB) == bytes([3]) * MIB
        assert fake.violations() == []


def recorded_on(home: Any, context: Any, back: Any) -> Any:
    """Record in another context, and come back."""
    ok(cuda.cuCtxSetCurrent(context))
    event = recorded(home)
    ok(cuda.cuCtxSetCurrent(back))
    return event
