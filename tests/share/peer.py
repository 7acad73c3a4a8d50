"""Other processes that share memory with a test, forked from one that has imported all they need; run as a program."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from typing import Any, Self


class Peer:
    """Another process, which does what a test tells it: see `Actions`."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.connection = connection
        self.pid = pid

    def tell(self, action: str, *details: object) -> None:
        """Have it do something, whose outcome `hear` returns."""
        self.connection.send((action, *details))

    def hear(self) -> Any:  # what an action returns
        """Return the outcome of what it was told first, or raise its error."""
        assert self.connection.poll(30), "the peer does not answer"
        outcome = self.connection.recv()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome  # else an error would keep the frames that keep it, and the memory in them

    def ask(self, action: str, *details: object) -> Any:  # what an action returns
        """Have it do something, and return the outcome."""
        self.tell(action, *details)
        return self.hear()

    def kill(self) -> None:
        """End it by SIGKILL; it may not be gone yet."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Peers:
    """Makes peers, and ends them all."""

    def __init__(self, program: str = __file__) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-W", "ignore::DeprecationWarning", program, str(theirs.fileno())]
            self._program = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._socket = ours
        self._made: list[Peer] = []

    def new(self) -> Peer:
        """Make a peer."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
        peer = Peer(Connection(ours.detach()), int(self._socket.recv(64)))
        self._made.append(peer)
        return peer

    def clear(self) -> None:
        """End those that were made."""
        for peer in self._made:
            peer.kill()
            peer.connection.close()
        self._made.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._socket.close()
        self._program.wait(30)


def shared_limit(group: str, ceiling: int) -> Any:
    """Make a pool whose limit is shared among those of a group."""
    import asyncmem

    class Device(asyncmem.Host):
        identity = group

    device = Device()
    device.capacity = ceiling
    return asyncmem.AsyncMemoryPool(device, limit="shared", fraction=1.0, segment_size="1 MiB", min_free=0)


class Actions:
    """What a peer can do."""

    def __init__(self) -> None:
        import asyncmem

        self.pool = asyncmem.AsyncMemoryPool("host", share_limit="64 MiB")
        self.arrays: list[Any] = []
        self.go = threading.Event()

    def export(self, nbytes: int, value: int, ready: bool, settings: dict[str, int | None]) -> bytes:
        """Export so many bytes of that value; unless they are `ready`, they are written once it is told to go on."""
        from asyncmem import share

        array = self.pool.shared.allocate(nbytes).view()
        if ready:
            array.numpy()[:] = value
        else:
            array.buffer.stream.run(self.go.wait)
            array.buffer.stream.run(array.numpy().fill, value)
        exported = share.export(array, **settings)
        array.free()
        return exported.descriptor

    def total(self) -> int:
        """Return the sum of what was opened last, by blocks, without a copy."""
        return int(self.arrays[-1].numpy().sum(dtype="int64"))

    def produce(self, descriptors: Connection, count: int, nbytes: int) -> None:
        """Give away so many items, as fast as there is memory for them."""
        from asyncmem import share

        for number in range(count):
            with self.pool.shared.allocate(nbytes, timeout=30) as buffer:
                buffer.view().numpy()[:] = number
                descriptors.send_bytes(share.export(buffer).descriptor)

    def set_off(self) -> None:
        """Let the work of streams go on."""
        self.go.set()

    def attach(self, descriptor: bytes) -> tuple[str, tuple[int, ...], bytes]:
        """Open memory, and return what it is and all its bytes."""
        from asyncmem import share

        array = share.attach(descriptor, timeout=30)
        self.arrays.append(array)
        return str(array.dtype), array.shape, array.numpy().tobytes()[:64]

    def attach_and_free(self, descriptor: bytes) -> None:
        """Open memory and let go of it, while the thread that has brought it stands still."""
        from asyncmem import share
        from asyncmem.pool.latch import Latch
        from asyncmem.share import imports

        class Slow(Latch[None]):
            def __call__(latch) -> None:  # noqa: N805  # of another object
                super().__call__()
                self.go.wait()

        imports.Latch = Slow  # type: ignore[assignment, misc]
        share.attach(descriptor, timeout=30).free()

    def open(self, descriptor: bytes) -> None:
        """Open memory, and do not look at it."""
        from asyncmem import share

        self.arrays.append(share.attach(descriptor, timeout=30))

    def write(self, value: int) -> None:
        """Write to what was opened last."""
        self.arrays[-1].numpy()[:] = value

    def read(self) -> set[int]:
        """Return the values in what was opened last."""
        import numpy as np

        return set(np.unique(self.arrays[-1].numpy()).tolist())

    def free(self) -> None:
        """Let go of what was opened last."""
        self.arrays.pop().free()

    def free_behind_work(self) -> None:
        """Let go of what was opened last while work of its home stream waits to be told to go on."""
        array = self.arrays.pop()
        array.buffer.stream.run(self.go.wait)
        array.buffer.stream.run(array.numpy().fill, 9)
        array.free()

    def become(self, user: int) -> None:
        """Be another user."""
        os.setuid(user)

    def knock(self, name: bytes, message: bytes) -> bytes:
        """Send a message to a socket, and return the answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            end.connect(name)
            with suppress(BrokenPipeError):
                end.send(message)
            try:
                return end.recv(4096)
            except ConnectionResetError:
                return b""

    def join(self, group: str, ceiling: int) -> None:
        """Open a pool that agrees on its limit with those of other processes."""
        self.member = shared_limit(group, ceiling)
        self.buffers: list[Any] = []

    def allocate(self, nbytes: int) -> float:
        """Allocate from that pool, and return the seconds that it took."""
        started = time.monotonic()
        self.buffers.append(self.member.allocate(nbytes, timeout=30))
        return time.monotonic() - started

    def allocate_briefly(self, nbytes: int) -> None:
        """Allocate from that pool, and wait for a moment only."""
        self.buffers.append(self.member.allocate(nbytes, timeout=0.05))

    def release(self) -> int:
        """Free all of its buffers, and return what it keeps."""
        while self.buffers:
            self.buffers.pop().free()
        return self.member.stats().reserved_bytes

    def reserved(self) -> int:
        """Return what that pool has."""
        return self.member.stats().reserved_bytes

    def live(self) -> int:
        """Return the bytes that its exports hold."""
        return self.pool.shared.stats().pinned_bytes

    def fork(self) -> int:
        """Fork a child that lives on, and return its number."""
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        return child

    def keep_passing_on(self, descriptors: Connection) -> None:
        """Open what comes by descriptors and let go of it, until it is killed."""
        from asyncmem import share

        while True:
            array = share.attach(descriptors.recv_bytes(), timeout=30)
            array.numpy()[:] += 1
            array.free()
            descriptors.send_bytes(b"done")


def serve(end: socket.socket, actions: Actions) -> None:
    """Be a peer."""
    connection = Connection(end.detach())
    while True:
        try:
            action, *details = connection.recv()
        except EOFError:
            return
        if action in ("keep_passing_on", "produce"):
            getattr(actions, action)(connection, *details)
            continue
        try:
            outcome = getattr(actions, action)(*details)
        except Exception as error:  # noqa: BLE001  # the test's
            outcome = error
        connection.send(outcome)


def main(kind: type[Actions]) -> None:
    """Fork a peer for each socket that comes."""
    import asyncmem.share  # noqa: F401  # once for all

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone at once
    with closing(socket.socket(fileno=int(sys.argv[1]))) as orders:
        while True:
            word, fds, _, _ = socket.recv_fds(orders, 64, 1)
            if not word:
                return
            child = os.fork()
            if not child:
                orders.close()
                serve(socket.socket(fileno=fds[0]), kind())
                os._exit(0)
            os.close(fds[0])
            orders.send(str(child).encode())


if __name__ == "__main__":
    main(Actions)
