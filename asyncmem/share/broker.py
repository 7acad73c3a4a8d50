"""The thread of a process that talks to other processes of its user, over sockets without a name in any directory.

A peer's death is seen by its process descriptor, which is ready once the process is gone with all that it had open.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

from asyncmem.errors import BackendUnavailable, StaleDescriptor
from asyncmem.pool.alarm import report
from asyncmem.share.messages import TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MESSAGE: Final = 1 << 16
_CREDENTIALS: Final = struct.Struct("3i")


class Connection(ABC):
    """One end of a connection between two processes of a user. Every message arrives whole, or not at all.

    Attributes:
        pid: The other process, 0 where it is not visible from here.
        ended: Whether it is over.
    """

    def __init__(self, broker: Broker, end: socket.socket) -> None:
        """Take a connected socket.

        Raises:
            PermissionError: The other end is another user's.
        """
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            raise PermissionError(f"the other end belongs to user {user}")
        self.broker = broker
        self._socket = end
        self._unsent: deque[tuple[bytes, Sequence[int]]] = deque()
        self.ended = False

    @abstractmethod
    def receive(self, message: bytes, fds: list[int]) -> None:
        """Take a message, and of the files what belongs to it; the rest is closed. What does not fit raises.

        That ends the connection. On the broker's thread, as all below.
        """

    @abstractmethod
    def lost(self) -> None:
        """See that the other process is gone."""

    def open(self) -> None:
        """Begin to read, and to watch the other process."""
        self.broker.serve(self._socket, self._read)
        if self.pid:
            self.broker.watch(self.pid, self._gone)

    def _gone(self) -> None:
        self._read()  # what it has said before it ended
        self.end()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message, now or once there is room. From any thread, and from finalizers."""
        try:
            if not self._unsent:
                socket.send_fds(self._socket, [message], fds)
                return
        except BlockingIOError:
            pass
        except OSError:
            return  # the other end is gone, which will be seen where it is read
        self._unsent.append((message, fds))
        self.broker.post(self._flush)

    def _flush(self) -> None:
        try:
            while self._unsent:
                socket.send_fds(self._socket, [self._unsent[0][0]], self._unsent[0][1])
                self._unsent.popleft()
        except BlockingIOError:
            self.broker.serve(self._socket, self._read, self._flush)
            return
        except OSError:
            self._unsent.clear()
        if not self.closed:
            self.broker.serve(self._socket, self._read)

    def _read(self) -> None:
        try:
            while True:
                message, fds, flags, _ = socket.recv_fds(self._socket, _MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
                if not message or flags & socket.MSG_TRUNC:
                    break
                try:
                    self.receive(message, fds)
                finally:
                    while fds:
                        os.close(fds.pop())
        except BlockingIOError:
            return
        except (LookupError, OSError, ValueError, struct.error):  # whatever others send ends only their own connection
            pass
        self._hang_up()
        self.hung_up()

    def hung_up(self) -> None:
        """See that nothing more comes: end where the other process cannot be watched."""
        if not self.pid:  # else what it holds comes back once it is gone, and its GPU work with it
            self.end()

    @property
    def closed(self) -> bool:
        """Whether this end is closed; the other process may still be there."""
        return self._socket.fileno() < 0

    def _hang_up(self) -> None:
        self.broker.forget(self._socket)
        self._socket.close()
        self._unsent.clear()

    def end(self) -> None:
        """Close this end; twice is fine."""
        if not self.ended:
            self.ended = True
            self._hang_up()
            self.broker.unwatch(self.pid, self._gone)
            self.lost()


class Broker:
    """Serves the sockets of this process, on a thread that is started with it and ends with the process.

    Attributes:
        token: The name of this process's own socket, where others ask for its memory.
    """

    def __init__(self, accept: Callable[[Broker, socket.socket], Connection]) -> None:
        """Listen; `accept` makes the connections."""
        self.token = secrets.token_bytes(TOKEN)
        self._timers: list[tuple[float, int, Callable[[], object]]] = []  # a heap
        self._numbers = itertools.count()
        self._jobs: deque[Callable[[], object]] = deque()
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watched: dict[int, tuple[int, set[Callable[[], None]]]] = {}
        listening = new_socket()
        listening.bind(name_of(self.token))
        listening.listen(128)
        self.serve(self._wake, self._work)
        self.listen(listening, accept)
        self.thread = threading.Thread(target=self._serve, name="asyncmem share", daemon=True)
        self.thread.start()

    # -- from any thread -----------------------------------------------------------------------------------------------

    def post(self, job: Callable[[], object]) -> None:
        """Have the thread make a call soon. From finalizers too."""
        self._jobs.append(job)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def serve(
        self, file: socket.socket | int, read: Callable[[], None], write: Callable[[], None] | None = None
    ) -> None:
        """Call `read` when there is something to read, and `write` when there is room to write."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        if file in self._selector.get_map():
            self._selector.modify(file, events, (read, write))
        else:
            self._selector.register(file, events, (read, write))

    def listen(self, listening: socket.socket, accept: Callable[[Broker, socket.socket], Connection]) -> None:
        """Accept connections."""
        self.serve(listening, partial(self._admit, listening, accept))

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Make a call after so many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), call))

    def forget(self, file: socket.socket | int) -> None:
        """Serve a file no more."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def watch(self, pid: int, gone: Callable[[], None]) -> None:
        """Call `gone` when a process has ended, at once if there is none."""
        if pid not in self._watched:
            try:
                process = os.pidfd_open(pid)
            except ProcessLookupError:
                gone()
                return
            self._watched[pid] = process, set()
            self.serve(process, partial(self._gone, pid))
        self._watched[pid][1].add(gone)

    def unwatch(self, pid: int, gone: Callable[[], None]) -> None:
        """Call it no more."""
        if pid in self._watched:
            self._watched[pid][1].discard(gone)
            if not self._watched[pid][1]:
                self._close(self._watched.pop(pid)[0])

    def _gone(self, pid: int) -> None:
        if pid not in self._watched:  # what was seen just before has ended the watch
            return
        process, told = self._watched.pop(pid)
        self._close(process)
        for one in told:
            one()

    def _close(self, process: int) -> None:
        self.forget(process)
        os.close(process)

    def _serve(self) -> None:
        while True:
            while self._timers and self._timers[0][0] <= time.monotonic():
                _guarded(heapq.heappop(self._timers)[2])
            pause = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, events in self._selector.select(pause):
                read, write = key.data
                for call in (read, write if events & selectors.EVENT_WRITE else None):
                    if call is not None:
                        _guarded(call)

    def _work(self) -> None:
        os.eventfd_read(self._wake)
        while self._jobs:
            _guarded(self._jobs.popleft())

    def _admit(self, listening: socket.socket, accept: Callable[[Broker, socket.socket], Connection]) -> None:
        try:
            end, _ = listening.accept()
        except OSError:  # no more files: whoever asks waits until some are closed
            time.sleep(0.01)
            return
        end.setblocking(False)
        try:
            accept(self, end).open()
        except OSError:
            end.close()

    # -- after a fork --------------------------------------------------------------------------------------------------

    def close_in_child(self) -> None:
        """Close a forked child's copies of all files, so that none of them outlives the parent."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            else:
                os.close(key.fd)
        self._selector.close()
        self._wake = -1


def _guarded(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the others are served nevertheless
        report(error)


def new_socket() -> socket.socket:
    """Make a socket that never blocks and keeps messages apart."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    return end


def name_of(token: bytes) -> bytes:
    """Return the socket name of a process, which is in no directory: nothing is left of it when the process ends."""
    return b"\0asyncmem-" + token.hex().encode()


def connect(token: bytes) -> socket.socket:
    """Connect to the socket of a process.

    Raises:
        StaleDescriptor: There is none any more.
    """
    end = new_socket()
    for _ in range(100):
        try:
            end.connect(name_of(token))
        except BlockingIOError:  # too many connect at once
            time.sleep(0.001)
        except OSError:
            break
        else:
            return end
    end.close()
    raise StaleDescriptor("the process that shared it has ended")


class Process:
    """What a process has of this: its broker, made at the first need and anew in a forked child."""

    def __init__(self, accept: Callable[[Broker, socket.socket], Connection]) -> None:
        self._accept = accept
        self._broker: Broker | None = None
        self._making = threading.Lock()
        if sys.platform == "linux":
            os.register_at_fork(after_in_child=self._after_fork)

    @property
    def broker(self) -> Broker:
        """The broker.

        Raises:
            BackendUnavailable: This system has not what it needs.
        """
        if self._broker is None:
            with self._making:
                if self._broker is None:
                    if sys.platform != "linux":
                        raise BackendUnavailable("share", tried=(f"sockets of {sys.platform}",), install="Use Linux")
                    self._broker = Broker(self._accept)
        return self._broker

    def _after_fork(self) -> None:
        broker, self._broker = self._broker, None
        self._making = threading.Lock()
        if broker is not None:
            broker.close_in_child()
