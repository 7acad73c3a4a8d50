"""A buffer goes to another process without a copy, and comes back when that has let go of it or has ended."""

import asyncio
import contextlib
import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, InvalidRequest, share
from asyncmem.devices import Fence
from asyncmem.errors import DeviceError, ReaderLost, StaleDescriptor
from asyncmem.share import exports, imports
from asyncmem.share.broker import Connection, name_of, new_socket
from asyncmem.share.exports import process
from asyncmem.share.messages import DESCRIPTOR, Kind, pack

from .clock import Clock
from .peer import Peer, Peers

SIZE = 1 << 20
pytestmark = pytest.mark.may_block  # the synchronous calls block, which is what they are for

SOON = 1.0
"""Seconds within which memory of a process that has ended must be back."""


def filled(pool: AsyncMemoryPool, value: int, nbytes: int = SIZE) -> asyncmem.Array:
    array = pool.allocate(nbytes).view()
    array.numpy()[:] = value
    return array


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> float:
    """Look until it holds, and return the seconds that this took, less those for which the machine held it up."""
    end = time.monotonic() + seconds
    with Clock() as clock:
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)  # another process is waited for
    return clock.seconds


# -- the way of an item ------------------------------------------------------------------------------------------------


def test_an_array_goes_to_another_process_as_it_is(pool: AsyncMemoryPool, peer: Peer) -> None:
    """The other process sees the type, the shape and the bytes."""
    with pool.allocate(SIZE).view("int16", (2, 3, 5), offset=512) as array:
        array.numpy()[:] = np.arange(30).reshape(2, 3, 5)
        with share.export(array) as exported:
            assert len(exported.descriptor) < 200
            kind, shape, content = peer.ask("attach", exported.descriptor)
            assert (kind, shape) == ("int16", (2, 3, 5))
            assert content == np.arange(30, dtype=np.int16).tobytes()
            peer.ask("free")


def test_both_have_the_same_memory(pool: AsyncMemoryPool, peer: Peer) -> None:
    """What one writes the other sees: nothing is copied."""
    array = filled(pool, 1)
    exported = share.export(array)
    peer.ask("attach", exported.descriptor)
    peer.ask("write", 2)
    assert set(array.numpy().tolist()) == {2}
    array.numpy()[:] = 3
    assert peer.ask("read") == {3}
    peer.ask("free")
    exported.block(30)
    array.free()


def test_a_reader_has_no_copy(pool: AsyncMemoryPool, peer: Peer) -> None:
    """Seen from outside: what it has read is memory of both, and it has no more of its own."""
    nbytes = 32 * SIZE
    first, array = filled(pool, 1), filled(pool, 3, nbytes)
    peer.ask("open", share.export(first).descriptor)  # the first needs more than the others
    before = resident(peer.pid, "Anon")
    assert resident(peer.pid, "Shmem") < nbytes
    peer.ask("open", share.export(array).descriptor)
    assert peer.ask("total") == 3 * nbytes
    assert resident(peer.pid, "Shmem") >= nbytes
    assert resident(peer.pid, "Anon") < before + 4 * SIZE
    array.free()
    first.free()


def test_a_fast_producer_is_held_to_its_limit(peer: Peer) -> None:
    """Seen from outside: of 40 items of 8 MiB for a slow reader, the producer never has more than 64 MiB."""
    peer.tell("produce", 40, 8 * SIZE)
    shared, own = [], []
    for number in range(40):
        array = share.attach(peer.connection.recv_bytes(), timeout=30)
        assert array.numpy()[-1] == number
        time.sleep(0.002)  # the reader is slow
        shared.append(resident(peer.pid, "Shmem"))
        own.append(resident(peer.pid, "Anon"))
        array.free()
        del array
    assert max(shared) <= 65 * SIZE
    assert max(own) - min(own) < 8 * SIZE


def resident(pid: int, kind: str) -> int:
    """The bytes of a process that are in memory: "Anon", its own, or "Shmem", which others may have, too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"Rss{kind}:"))


def test_nothing_but_the_reader_holds_what_it_opened(pool: AsyncMemoryPool, peer: Peer) -> None:
    """It is let go of at once, also where the process ends before the thread that has brought it runs again."""
    exported = share.export(filled(pool, 1))
    peer.ask("attach_and_free", exported.descriptor)
    exported.block(30)
    peer.ask("set_off")


def test_other_libraries_use_what_was_opened(pool: AsyncMemoryPool) -> None:
    """By DLPack, without a copy; the memory is held for as long as they have it."""
    exported = share.export(filled(pool, 5))
    array = share.attach(exported.descriptor)
    theirs = np.from_dlpack(array)
    assert theirs.ctypes.data == array.address
    array.free()
    del array
    with pytest.raises(TimeoutError):
        exported.block(0.05)
    assert set(theirs.tolist()) == {5}
    del theirs
    exported.block(30)


def test_short_floats_go_too(pool: AsyncMemoryPool) -> None:
    """An array of elements that numpy does not know arrives as such."""
    with pool.allocate(SIZE).view("bfloat16", (4, 4)) as array, share.export(array) as exported:
        other = share.attach(exported.descriptor)
        assert (other.dtype, other.shape) == ("bfloat16", (4, 4))
        other.free()


def test_an_empty_array_goes_too(pool: AsyncMemoryPool, peer: Peer) -> None:
    """Zero bytes are memory like any other."""
    with pool.allocate(0) as buffer, share.export(buffer) as exported:
        assert peer.ask("attach", exported.descriptor) == ("uint8", (0,), b"")
        peer.ask("free")


def test_memory_is_held_for_its_reader(pool: AsyncMemoryPool, peer: Peer) -> None:
    """Freeing the buffer, closing the pool and forgetting the export take nothing from those who have it open."""
    array = filled(pool, 5)
    descriptor = share.export(array).descriptor
    array.free()
    gc.collect()
    peer.ask("attach", descriptor)
    overwriting = [filled(pool, 6) for _ in range(32)]
    assert peer.ask("read") == {5}
    assert pool.stats().pinned_bytes == SIZE
    peer.ask("free")
    wait_until(lambda: pool.stats().pinned_bytes == 0)
    assert len(overwriting) == 32


def test_readers_are_counted(pool: AsyncMemoryPool, peers: Peers) -> None:
    """An export ends when as many have let go of it as may open it; more may not."""
    array = filled(pool, 5)
    exported = share.export(array, readers=2)
    first, second, third = (peers.new() for _ in range(3))
    first.ask("attach", exported.descriptor)
    first.ask("free")
    second.ask("attach", exported.descriptor)
    with pytest.raises(StaleDescriptor):
        third.ask("attach", exported.descriptor)
    with pytest.raises(TimeoutError, match="let go"):
        exported.block(0.01)
    second.ask("free")
    exported.block(30)


def test_an_export_for_any_number_ends_when_it_is_closed(pool: AsyncMemoryPool, peer: Peer) -> None:
    """Without a count it can be opened until it is closed."""
    array = filled(pool, 5)
    exported = share.export(array, readers=None)
    for _ in range(5):
        peer.ask("attach", exported.descriptor)
        peer.ask("free")
    peer.ask("attach", exported.descriptor)
    exported.close()
    with pytest.raises(StaleDescriptor):
        share.attach(exported.descriptor)
    assert peer.ask("read") == {5}
    peer.ask("free")
    exported.block(30)


def test_only_the_named_process_may_open_it(pool: AsyncMemoryPool, peers: Peers) -> None:
    """A descriptor that another process got hold of is refused there, and stays good for the right one."""
    array = filled(pool, 5)
    right, wrong = peers.new(), peers.new()
    exported = share.export(array, pid=right.pid)
    with pytest.raises(StaleDescriptor, match=f"for process {right.pid}, not {wrong.pid}"):
        wrong.ask("attach", exported.descriptor)
    right.ask("attach", exported.descriptor)
    right.ask("free")
    exported.block(30)


@pytest.mark.asyncio
async def test_tasks_share_without_blocking_their_loop(pool: AsyncMemoryPool, peer: Peer) -> None:
    """An export's block ends when its reader has let go; the loop runs meanwhile."""
    await asyncio.to_thread(peer.ask, "live")
    async with pool.empty((256, 1024), "float32") as array:
        array.numpy()[:] = 0.5
        async with share.export(array) as exported, share.attach_async(exported.descriptor) as other:
            assert float(other.numpy()[-1, -1]) == 0.5
    assert pool.stats().pinned_bytes == 0


@pytest.mark.anyio
async def test_trio_shares_too(pool: AsyncMemoryPool) -> None:
    """It all works on trio."""
    async with pool.empty(1000, "float32") as array, share.export(array) as exported:
        other = await share.attach_async(exported.descriptor)
        other.free()


@pytest.mark.asyncio
async def test_a_cancelled_attachment_holds_nothing(pool: AsyncMemoryPool) -> None:
    """Memory that arrives after its task was cancelled goes back by itself."""
    array = filled(pool, 5)
    for _ in range(20):
        exported = share.export(array)
        task = asyncio.ensure_future(share.attach_async(exported.descriptor)._wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # it was faster
            task.result().free()
        await asyncio.wait_for(exported.wait(), 30)


@pytest.mark.asyncio
async def test_an_export_whose_block_fails_is_closed(pool: AsyncMemoryPool) -> None:
    """Nobody is waited for then, and nobody can open it any more."""
    array = filled(pool, 5)
    with pytest.raises(ZeroDivisionError):
        async with share.export(array) as exported:
            raise ZeroDivisionError
    await exported.wait()
    with pytest.raises(StaleDescriptor):
        await share.attach_async(exported.descriptor)


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_reader_sees_what_streams_had_to_do(peer: Peer) -> None:
    """Opening waits for the work that the home stream had when the memory was exported."""
    descriptor = peer.ask("export", SIZE, 7, False, {})
    with pytest.raises(TimeoutError, match="has not answered"):
        share.attach(descriptor, timeout=0.01)
    peer.ask("set_off")
    wait_until(lambda: peer.ask("live") == 0)  # the one that came too late has been given back
    descriptor = peer.ask("export", SIZE, 7, True, {})
    assert set(share.attach(descriptor).numpy().tolist()) == {7}


def test_memory_comes_back_behind_its_readers_work(pool: AsyncMemoryPool, peer: Peer) -> None:
    """A reader that frees while its streams still work keeps the memory until they have done that."""
    array = filled(pool, 5)
    exported = share.export(array)
    array.free()
    peer.ask("attach", exported.descriptor)
    peer.ask("free_behind_work")
    with pytest.raises(TimeoutError):
        exported.block(0.05)
    assert pool.stats().pinned_bytes == SIZE
    peer.ask("set_off")
    exported.block(30)


@pytest.mark.parametrize(("code", "tries"), [(DeviceError.CAPTURE_UNSUPPORTED, 3), (700, 1)])
def test_memory_comes_back_where_no_fence_can_be_had(pool: AsyncMemoryPool, code: int, tries: int) -> None:
    """After the end of a graph's capture, and at once from a device that is lost."""

    class Refusing(asyncmem.Host):
        asked = 0

        def record_all(self) -> Fence:
            self.asked += 1
            if self.asked <= 2:
                raise DeviceError("cuCtxRecordEvent", code=code, code_name="REFUSED")
            return super().record_all()

    device = Refusing()
    exported = share.export(filled(pool, 5))
    share.attach(exported.descriptor, stream=device.default_stream).free()
    exported.block(30)
    assert device.asked == tries
    device.close()


# -- the end of a process ----------------------------------------------------------------------------------------------


def _not_yet(peer: Peer, descriptor: bytes) -> None:
    """It has the descriptor, and has not opened it."""


def _asks(peer: Peer, descriptor: bytes) -> None:
    peer.tell("attach", descriptor)


def _holds(peer: Peer, descriptor: bytes) -> None:
    peer.ask("attach", descriptor)


def _writes(peer: Peer, descriptor: bytes) -> None:
    peer.ask("attach", descriptor)
    peer.tell("write", 5)


def _frees(peer: Peer, descriptor: bytes) -> None:
    peer.ask("attach", descriptor)
    peer.tell("free")


def _works(peer: Peer, descriptor: bytes) -> None:
    peer.ask("attach", descriptor)
    peer.ask("free_behind_work")


def _has_forked(peer: Peer, descriptor: bytes) -> None:
    peer.ask("attach", descriptor)
    peer.ask("fork")


@pytest.mark.parametrize("step", [_not_yet, _asks, _holds, _writes, _frees, _works, _has_forked])
def test_a_reader_that_is_killed_gives_all_back(
    pool: AsyncMemoryPool, peers: Peers, step: Callable[[Peer, bytes], None]
) -> None:
    """Whatever it was about to do, its memory is back within a second, unharmed, and others do not notice."""
    array, bystander = filled(pool, 5), filled(pool, 6)
    doomed, other = peers.new(), peers.new()
    exported, others = share.export(array, pid=doomed.pid), share.export(bystander)
    other.ask("attach", others.descriptor)
    array.free()
    step(doomed, exported.descriptor)
    doomed.kill()
    took = wait_until(lambda: exported._ended.done)
    assert took < SOON
    if step is not _frees:
        with pytest.raises(ReaderLost, match=str(doomed.pid)) if step is not _asks else _either():
            exported.block(30)
    assert pool.stats().pinned_bytes == SIZE  # the other's
    assert other.ask("read") == {6}
    other.ask("free")
    others.block(30)


class _either:  # noqa: N801  # a context
    """Let pass that the reader was faster than its end."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is None or issubclass(kind, ReaderLost)


@pytest.mark.parametrize("ready", [True, False])
def test_an_exporter_that_is_killed_fails_who_asks(peer: Peer, ready: bool) -> None:
    """A descriptor of a process that has ended is refused at once, also where its answer is being waited for."""
    descriptor = peer.ask("export", SIZE, 7, ready, {"readers": None})
    if ready:
        array = share.attach(descriptor)
        peer.kill()
        wait_until(lambda: not Path(f"/proc/{peer.pid}").exists())
        assert set(array.numpy().tolist()) == {7}  # what is open stays
    else:
        task = share.attach_async(descriptor)
        peer.kill()
        with pytest.raises(StaleDescriptor, match="has ended"):
            task.block(SOON)
    with pytest.raises(StaleDescriptor, match="has ended"):
        share.attach(descriptor, timeout=SOON)


def test_an_exporter_that_hangs_up_fails_who_asks_and_takes_the_next(pool: AsyncMemoryPool) -> None:
    """A connection that is over, while the other process goes on, is waited at by nobody, and is made anew."""
    array, go = filled(pool, 5), threading.Event()
    array.buffer.stream.run(go.wait)
    exported = share.export(array, readers=2)  # which is answered behind that work
    task = share.attach_async(exported.descriptor)
    wait_until(lambda: process.broker.token in imports._sources)
    imports._sources[process.broker.token].send(b"nonsense")
    with pytest.raises(StaleDescriptor, match="has ended"):
        task.block(30)
    go.set()
    share.attach(exported.descriptor, timeout=30).free()
    exported.close()
    array.free()


def test_a_file_that_cannot_be_opened_at_first_comes_again(
    pool: AsyncMemoryPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks first has an error, and the next ask anew."""

    def fail(fd: int) -> None:
        os.close(fd)
        raise OSError("no addresses are left")

    array = filled(pool, 5)
    with monkeypatch.context() as patch:
        patch.setattr(imports, "open_mapping", fail)
        with pytest.raises(StaleDescriptor, match="no addresses are left"):
            share.attach(share.export(array).descriptor, timeout=30)
    share.attach(share.export(array).descriptor, timeout=30).free()
    array.free()


def test_what_is_being_read_stays_open_after_its_owner_has_ended(pool: AsyncMemoryPool, peer: Peer) -> None:
    """Let go of while work on it waits, it is unmapped behind that, and not under it."""
    descriptor, go = peer.ask("export", SIZE, 7, True, {}), threading.Event()
    array = share.attach(descriptor)
    address = array.address
    with pool.allocate(SIZE) as target:
        array.buffer.stream.run(go.wait)
        copy = target.copy_from(array, stream=array.buffer.stream)
        peer.kill()
        wait_until(lambda: imports._sources[descriptor[4:20]].ended)
        array.free()
        del array
        gc.collect()
        assert is_shared(address)
        go.set()
        copy.block(30)
        assert set(target.view().numpy().tolist()) == {7}
        wait_until(lambda: not is_shared(address))


def is_shared(address: int) -> bool:
    """Whether shared memory is mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if start <= address < end:
            return "memfd:asyncmem" in line
    return False


def test_no_kill_at_any_moment_loses_memory(pool: AsyncMemoryPool, peers: Peers) -> None:
    """Readers that are killed in the midst of passing items on leave nothing, and harm nobody else's items."""
    moments = random.Random(7)
    steady = peers.new()
    steady.tell("keep_passing_on")
    for _ in range(12):
        doomed = peers.new()
        doomed.tell("keep_passing_on")
        end = time.monotonic() + moments.uniform(0, 0.02)
        while time.monotonic() < end:
            with filled(pool, 1, 4096) as theirs:
                doomed.connection.send_bytes(share.export(theirs, pid=doomed.pid).descriptor)
            with filled(pool, 1, 4096) as ours:
                exported = share.export(ours, pid=steady.pid)
                steady.connection.send_bytes(exported.descriptor)
                assert steady.connection.recv_bytes() == b"done"
                exported.block(30)
                assert set(ours.numpy().tolist()) == {2}
        doomed.kill()
        assert wait_until(lambda: pool.stats().pinned_bytes == 0) < SOON
    pool.check()


def test_nothing_is_left_of_processes_that_were_killed(pool: AsyncMemoryPool, peers: Peers) -> None:
    """No socket, file or memory outlives them, and the sockets have names that nobody can guess."""
    doomed = [peers.new() for _ in range(3)]
    mine = [share.export(filled(pool, 1), pid=one.pid) for one in doomed]
    theirs = [one.ask("export", SIZE, 1, True, {}) for one in doomed]
    for one, exported in zip(doomed, mine, strict=True):
        one.ask("attach", exported.descriptor)
    kept = [share.attach(one) for one in theirs]
    tokens = [one[4:20].hex() for one in theirs]
    assert left_of(tokens) == {f"@asyncmem-{token}" for token in tokens}
    before = mapped()
    for one in doomed:
        one.kill()
    for exported in mine:
        with pytest.raises(ReaderLost):
            exported.block(30)
    assert all(set(one.numpy().tolist()) == {1} for one in kept)
    del kept
    gc.collect()
    wait_until(lambda: not left_of(tokens) and mapped() <= before - 3)


def test_a_reader_lets_go_of_memory_whose_pool_is_closed(peer: Peer) -> None:
    """It keeps no mapping, and its owner no note, of pools that come one after the other."""
    gc.disable()  # it waits for nobody's garbage
    try:
        for _ in range(5):
            with (
                AsyncMemoryPool("host", share_limit="64 MiB") as outer,
                filled(outer.shared, 1) as array,
                share.export(array) as exported,
            ):
                peer.ask("attach", exported.descriptor)
                peer.ask("free")
            wait_until(lambda: mapped(peer.pid) == 0)
            (connection,) = (one for one in readers() if one.pid == peer.pid)
            wait_until(partial(dict.__eq__, connection._sent, {}))
    finally:
        gc.enable()


def test_readers_that_come_and_go_leave_nothing_with_memory_that_stays(pool: AsyncMemoryPool, peers: Peers) -> None:
    """A connection that is over is forgotten while the pool goes on."""
    array = filled(pool, 1)
    for _ in range(3):
        peer = peers.new()
        peer.ask("attach", share.export(array).descriptor)
        peer.kill()

        def is_forgotten(pid: int = peer.pid) -> bool:
            gc.collect()
            return pid not in [one.pid for one in readers()]

        wait_until(is_forgotten)
    array.free()


def readers() -> list[exports.ReaderConnection]:
    """The connections to those who open memory of this process."""
    return [one for one in gc.get_objects() if isinstance(one, exports.ReaderConnection)]


def left_of(tokens: list[str]) -> set[str]:
    """What has their names: sockets, and files in the folder of shared memory."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    names += [str(path) for path in Path("/dev/shm").iterdir()]  # noqa: S108  # only looked at
    return {name for name in names if any(token in name for token in tokens)}


def mapped(pid: int = os.getpid()) -> int:
    """How many files of shared memory a process has."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:asyncmem")


def test_a_forked_child_has_neither_memory_nor_sockets(pool: AsyncMemoryPool, peer: Peer) -> None:
    """What a reader forks keeps nothing of it alive, and cannot write to memory that others have by then."""
    exported = share.export(filled(pool, 5))
    peer.ask("attach", exported.descriptor)
    child = peer.ask("fork")
    wait_until(lambda: "memfd:asyncmem" not in Path(f"/proc/{child}/maps").read_text())
    wait_until(lambda: not any("memfd" in link for link in links(child)))
    peer.kill()
    with Clock() as clock, pytest.raises(ReaderLost):
        exported.block(30)
    assert clock.seconds < SOON
    assert Path(f"/proc/{child}").exists()
    os.kill(child, 9)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def links(pid: int) -> list[str]:
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(str(one.readlink()))
    return found


# -- who may ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_get_nothing(pool: AsyncMemoryPool, peers: Peers) -> None:
    """The kernel says whose process it is: another user's has no answer, and would take none from this one."""
    exported = share.export(filled(pool, 5))
    _, token, key = DESCRIPTOR.unpack(exported.descriptor)
    message = pack(Kind.OPEN, 1, key)
    friend, stranger = peers.new(), peers.new()
    stranger.ask("become", 65534)
    assert stranger.ask("knock", name_of(token), message) == b""
    with pytest.raises(StaleDescriptor, match="belongs to user 0"):
        stranger.ask("attach", exported.descriptor)
    assert friend.ask("knock", name_of(token), message)[0] == Kind.OPENED
    friend.kill()
    with pytest.raises(ReaderLost):
        exported.block(30)


def test_what_a_process_said_before_its_end_is_heard() -> None:
    """Also where its end is seen at once with that, or sooner: a message that was lost would be waited for."""
    name = b"\0asyncmem-test-" + os.urandom(16).hex().encode()
    heard: list[bytes] = []
    lost = threading.Event()

    class Listener(Connection):
        def receive(self, message: bytes, fds: list[int]) -> None:  # noqa: ARG002  # as its base
            heard.append(message)

        def lost(self) -> None:
            lost.set()

    speak = f"from socket import *; s = socket(AF_UNIX, SOCK_SEQPACKET); s.connect({name!r}); s.send(b'last words')"
    with new_socket() as listening:
        listening.bind(name)
        listening.listen()
        subprocess.run([sys.executable, "-c", speak], check=True)
        end, _ = listening.accept()
    end.setblocking(False)
    connection = Listener(process.broker, end)
    process.broker.post(connection.open)  # its process is gone by now
    assert lost.wait(30)
    assert heard == [b"last words"]


def test_a_process_may_end_as_it_is_watched_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are seen in one round: then nobody is told of its end."""
    reported: list[BaseException] = []
    told: list[None] = []
    blocked, go_on, done = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr("asyncmem.share.broker.report", reported.append)
    broker, tell = process.broker, partial(told.append, None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        broker.post(partial(broker.watch, program.pid, tell))
        broker.post(partial(broker.later, 0, lambda: (blocked.set(), go_on.wait(30))))
        assert blocked.wait(30)
        broker.post(partial(broker.unwatch, program.pid, tell))
        program.kill()
    go_on.set()
    broker.post(partial(broker.later, 0, done.set))
    assert done.wait(30)
    assert (told, reported) == ([], [])


def test_files_that_nobody_asked_for_are_closed(pool: AsyncMemoryPool) -> None:
    """A process cannot be filled with the files of another."""
    share.attach(share.export(filled(pool, 1)).descriptor).free()  # this process is watched from now on, by a file
    exported = share.export(filled(pool, 5))
    before = open_files()
    with new_socket() as end, Path(os.devnull).open() as file:
        end.connect(name_of(DESCRIPTOR.unpack(exported.descriptor)[1]))
        for number in range(20):
            socket.send_fds(end, [pack(Kind.OPEN, number, bytes(16))], [file.fileno()])
    wait_until(lambda: open_files() <= before)
    exported.close()
    exported.block(30)


def test_two_requests_of_one_number_open_one(pool: AsyncMemoryPool) -> None:
    """What a reader has open is known by that number, and comes back with its connection."""
    exported = share.export(filled(pool, 5), readers=None)
    _, token, key = DESCRIPTOR.unpack(exported.descriptor)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.connect(name_of(token))
        for _ in range(2):
            end.send(pack(Kind.OPEN, 1, key))
        assert [end.recv(4096)[0] for _ in range(2)] == [Kind.OPENED, Kind.REFUSED]
        end.send(pack(Kind.FREE, 1))
        exported.close()
        exported.block(30)


@pytest.mark.parametrize("seed", range(4))
def test_no_message_harms_anybody(pool: AsyncMemoryPool, peer: Peer, seed: int) -> None:
    """Whatever a process of the user sends ends its own connection at most."""
    exported = share.export(filled(pool, 5), readers=None)
    _, token, key = DESCRIPTOR.unpack(exported.descriptor)
    chance = random.Random(seed)
    for _ in range(50):
        message = bytearray(chance.choice((pack(Kind.OPEN, 1, key), pack(Kind.FREE, 1), b"A" * 13)))
        for _ in range(chance.randrange(4)):
            message[chance.randrange(len(message))] = chance.randrange(256)
        peer.ask("knock", name_of(token), bytes(message[: chance.randint(1, len(message))]))
    with contextlib.closing(exported):
        share.attach(exported.descriptor, timeout=30).free()
    peer.kill()
    with contextlib.suppress(ReaderLost):  # some of them opened it
        exported.block(30)


# -- wrong use ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptor", [b"", b"x" * 36, "text", None, b"\xa5am\x02" + bytes(32)])
def test_what_is_no_descriptor_is_an_invalid_request(descriptor: object) -> None:
    """Bytes of another length or version, and what is no bytes, are refused at the call."""
    with pytest.raises(InvalidRequest, match="descriptor"):
        share.attach(descriptor)  # type: ignore[arg-type]  # what is asked


@pytest.mark.parametrize("place", [4, 19, 20, 35])
def test_a_forged_descriptor_opens_nothing(pool: AsyncMemoryPool, place: int) -> None:
    """Whoever does not know all of it has nothing."""
    exported = share.export(filled(pool, 5))
    forged = bytearray(exported.descriptor)
    forged[place] ^= 1
    with pytest.raises(StaleDescriptor, match="opens no memory"):
        share.attach(bytes(forged), timeout=30)
    share.attach(exported.descriptor).free()
    exported.block(30)


def test_other_memory_cannot_be_exported(pool: AsyncMemoryPool) -> None:
    """Only memory that others can open can be exported, and only while it lives."""
    with AsyncMemoryPool("host") as plain, plain.allocate(10) as buffer, pytest.raises(InvalidRequest, match="shared"):
        share.export(buffer)
    with pytest.raises(InvalidRequest, match="shared"):
        share.export(np.zeros(3))  # type: ignore[arg-type]  # what is asked
    array = filled(pool, 1)
    array.free()
    with pytest.raises(asyncmem.BufferReleased):
        share.export(array)


@pytest.mark.parametrize("settings", [{"readers": 0}, {"readers": -1}, {"readers": True}, {"pid": 0}, {"pid": "1"}])
def test_wrong_settings_are_refused(pool: AsyncMemoryPool, settings: dict[str, int]) -> None:
    """They are named, and nothing is held."""
    with pool.allocate(10) as buffer:
        with pytest.raises(InvalidRequest, match=next(iter(settings))):
            share.export(buffer, **settings)
        assert pool.stats().pinned_bytes == 0


def test_a_device_without_shareable_memory_says_so() -> None:
    """The simulated device's memory is its process's own."""
    with AsyncMemoryPool("simulated") as pool, pytest.raises(InvalidRequest, match="other processes"):
        _ = pool.shared
