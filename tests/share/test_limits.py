"""Pools of several processes that agree on a limit each: what is idle in one is given to another that waits."""

import asyncio
import gc
import random
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest, OutOfMemoryError, Simulated
from asyncmem.share.limits import Grant, Member, State

from .clock import Clock
from .peer import Peer, Peers, shared_limit

MIB = 1 << 20
CEILING = 64 * MIB
SOON = 0.1
"""Seconds within which idle memory must be there."""

pytestmark = pytest.mark.may_block  # the synchronous calls block, which is what they are for


@pytest.fixture
def group() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def member(group: str) -> Iterator[AsyncMemoryPool]:
    """This process's pool."""
    with shared_limit(group, CEILING) as pool:
        yield pool


@pytest.fixture
def other(peers: Peers, group: str) -> Peer:
    """Another process with a pool of the same group."""
    return join(peers, group)


def join(peers: Peers, group: str) -> Peer:
    peer = peers.new()
    peer.ask("join", group, CEILING)
    return peer


@contextmanager
def asked(member: AsyncMemoryPool) -> Iterator[None]:
    """Wait at the end until somebody is in line, by what the block did: then this process is asked for what it has."""
    quota = member._opened.quota
    assert isinstance(quota, Member)
    before, deadline = quota._seen, time.monotonic() + 30
    yield
    while quota._seen == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_process_alone_may_have_all(member: AsyncMemoryPool) -> None:
    """Sharing costs nothing where nobody else is there; what is larger than all fails at once."""
    member.allocate(CEILING).free()
    with pytest.raises(OutOfMemoryError):
        member.allocate(CEILING + 1)


def test_idle_memory_goes_to_who_waits(member: AsyncMemoryPool, other: Peer) -> None:
    """What a process keeps for later is with another that needs it within a tenth of a second, and back again."""
    took: list[float] = []
    while len(took) < 5 or (min(took) >= SOON and len(took) < 100):  # a busy machine holds some of them up
        with member.allocate(48 * MIB):
            pass
        took.append(other.ask("allocate", 48 * MIB))
        assert member.stats().reserved_bytes <= 16 * MIB
        assert other.ask("release") == 48 * MIB
    assert min(took) < SOON


def test_memory_in_use_is_waited_for(member: AsyncMemoryPool, other: Peer) -> None:
    """Nothing is taken from who uses it; a process waits for its neighbours as it does for itself."""
    mine = member.allocate(48 * MIB)
    with asked(member):
        other.tell("allocate", 32 * MIB)
    assert not other.connection.poll(0.15)
    assert mine.alive
    mine.free()
    assert other.hear() > 0.1
    with pytest.raises(asyncmem.PoolTimeout):
        member.allocate(48 * MIB, timeout=0.05)
    other.ask("release")
    member.allocate(48 * MIB, timeout=30).free()


def test_who_comes_first_is_served_first(member: AsyncMemoryPool, peers: Peers, group: str) -> None:
    """A large request is not starved by small ones that come later from others."""
    first, second = join(peers, group), join(peers, group)
    mine = member.allocate(60 * MIB)
    with asked(member):
        first.tell("allocate", 40 * MIB)
    assert not first.connection.poll()
    second.tell("allocate", 32 * MIB)
    assert not second.connection.poll(0.05)
    mine.free()
    first.hear()
    first.ask("release")
    second.hear()


def test_a_process_that_is_killed_gives_its_part_back(member: AsyncMemoryPool, other: Peer) -> None:
    """By SIGKILL, with all of it in use."""
    other.ask("allocate", 60 * MIB)
    with Clock() as clock:
        threading.Timer(0.05, other.kill).start()
        member.allocate(60 * MIB, timeout=30).free()
    assert clock.seconds < 1.05


def test_the_group_outlives_its_keeper(peers: Peers, group: str) -> None:
    """The first process keeps the books; when it is killed, the others go on with what they have, and no more."""
    keeper, second, third = (join(peers, group) for _ in range(3))
    keeper.ask("allocate", MIB)
    second.ask("allocate", 40 * MIB)
    keeper.kill()
    third.tell("allocate", 32 * MIB)
    assert not third.connection.poll(0.15)
    second.ask("release")
    assert third.hear() < 30
    assert second.ask("reserved") + third.ask("reserved") <= CEILING


def test_a_keeper_that_hangs_up_and_lives_is_asked_again(peers: Peers, group: str) -> None:
    """Who gets no answer any more joins once more, and what it had counts once."""
    keeper = join(peers, group)
    with shared_limit(group, CEILING) as pool:
        held = pool.allocate(40 * MIB)
        pool._opened.quota._link.send(b"nonsense")
        pool.allocate(20 * MIB, timeout=30).free()
        held.free()
        for _ in range(2):
            keeper.ask("allocate", 60 * MIB)
            keeper.ask("release")
            pool.allocate(60 * MIB, timeout=30).free()


def test_a_wait_that_is_given_up_takes_nothing(member: AsyncMemoryPool, other: Peer) -> None:
    """A request that times out leaves the memory to the others."""
    with member.allocate(60 * MIB), pytest.raises(asyncmem.PoolTimeout):
        other.ask("allocate_briefly", 32 * MIB)
    time.sleep(0.1)  # as long as a member may wait for what nobody needs
    assert other.ask("reserved") == 0
    member.allocate(60 * MIB, timeout=30).free()


@pytest.mark.asyncio
async def test_tasks_wait_for_neighbours_as_for_each_other(member: AsyncMemoryPool, group: str) -> None:
    """Deadlines and cancellation end such a wait, and the next request is served as soon as there is memory."""
    with shared_limit(group, CEILING) as neighbour:
        held = neighbour.allocate(60 * MIB)
        with pytest.raises(asyncmem.PoolTimeout):
            await member.allocate_async(32 * MIB, timeout=0.05)
        task = asyncio.ensure_future(_allocate(member))
        await asyncio.sleep(0.05)  # it waits
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        task = asyncio.ensure_future(_allocate(member))
        held.free()
        (await asyncio.wait_for(task, 30)).free()


def test_deadlines_hold_in_threads_too(member: AsyncMemoryPool, other: Peer) -> None:
    """A thread that waits for a neighbour's memory gives up in time."""
    other.ask("allocate", 60 * MIB)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(member.allocate, 32 * MIB, timeout=0.05)
        with pytest.raises(asyncmem.PoolTimeout):
            waiting.result(timeout=30)
    other.ask("release")
    member.allocate(60 * MIB, timeout=30).free()


async def _allocate(pool: AsyncMemoryPool) -> asyncmem.Buffer:
    return await pool.allocate_async(32 * MIB)


def test_together_they_never_have_more(member: AsyncMemoryPool, peers: Peers, group: str) -> None:
    """Whatever each of them does and whenever one is killed, the sum stays within the limit."""
    moments = random.Random(3)
    others = [join(peers, group) for _ in range(3)]
    for round_ in range(30):
        one = moments.choice(others)
        one.ask("allocate", moments.randint(1, 20) * MIB)
        assert member.stats().reserved_bytes + sum(peer.ask("reserved") for peer in others) <= CEILING
        moments.choice(others).ask("release")
        one.ask("release")
        with member.allocate(moments.randint(1, 40) * MIB, timeout=30):
            assert member.stats().reserved_bytes + sum(peer.ask("reserved") for peer in others) <= CEILING
        if round_ % 10 == 9:
            others.pop(0).kill()
            others.append(join(peers, group))


def test_each_limit_is_answered(member: AsyncMemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that crosses the next limit does not count, so where nothing changes by that it is said again.

    Else the keeper would ask for ever for memory that was given back long ago.
    """
    quota = member._opened.quota
    said: list[State] = []
    assert isinstance(quota, Member)
    member.allocate(CEILING).free()
    with quota._changed:
        quota._changed.wait_for(lambda: not quota._wants and not quota._promised, timeout=30)
    monkeypatch.setattr(quota._link, "send", lambda message: said.append(State(*struct.unpack("<6Q", message))))
    quota.take(Grant(quota._seen + 1, quota._limit))
    assert [(one.number, one.limit, one.need) for one in said] == [(quota._seen, CEILING, 0)]


def test_closing_a_pool_ends_its_wait(group: str, other: Peer) -> None:
    """A pool that waits for its neighbours can be closed."""
    other.ask("allocate", 60 * MIB)
    with shared_limit(group, CEILING) as pool:
        threading.Timer(0.1, pool.close).start()
        with pytest.raises(asyncmem.PoolClosed):
            pool.allocate(32 * MIB, timeout=30)


def test_a_pool_that_is_gone_leaves_its_part(peers: Peers, group: str) -> None:
    """To the others, also where its process lives."""
    keeper = join(peers, group)
    for _ in range(3):
        pool = shared_limit(group, CEILING)
        with pool:
            pool.allocate(60 * MIB).free()
        del pool
        gc.collect()
        keeper.ask("allocate", 60 * MIB)
        keeper.ask("release")


def test_a_shared_limit_is_for_a_pools_life(member: AsyncMemoryPool) -> None:
    """It cannot be changed into another while the pool is in use, nor the other way round."""
    with pytest.raises(InvalidRequest, match="shared"):
        member.resize(limit="1 MiB")
    with AsyncMemoryPool("host", limit="1 MiB") as pool, pytest.raises(InvalidRequest, match="shared"):
        pool.configure(limit="shared")


def test_pages_are_shared_too(group: str) -> None:
    """Where memory comes by pages, a process gives back those that it does not use."""

    class Device(Simulated):
        identity = group

    first, second = (
        AsyncMemoryPool(Device(CEILING), limit="shared", fraction=1.0, min_free=0, segments="paged") for _ in range(2)
    )
    with first, second:
        first.allocate(48 * MIB).free()
        held = second.allocate(48 * MIB, timeout=30)
        assert first.stats().reserved_bytes + second.stats().reserved_bytes <= CEILING
        with pytest.raises(asyncmem.PoolTimeout):
            first.allocate(48 * MIB, timeout=0.1)
        held.free()
        first.allocate(48 * MIB, timeout=30).free()
