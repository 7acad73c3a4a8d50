"""`serve_live`: a thread that tells programs of the same user what this process's pools are doing."""

from __future__ import annotations

import atexit
import os
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, Self, final

from asyncmem.insight.live.client import (
    FORMAT,
    Holder,
    PoolLook,
    ProcessLook,
    connect,
    is_same_user,
    make_path,
    sockets,
)
from asyncmem.pool.holders import held_by_site, held_by_tag
from asyncmem.pool.open_pool import OpenPool, open_pools
from asyncmem.pool.snapshot import waiter_infos
from asyncmem.text import printable, to_json

_SHOWN: Final = 10
_MANY: Final = 10_000
"""Holders are left out for more buffers: to go through them would hold the pool up for milliseconds."""

_TIMEOUT: Final = 1.0
"""Seconds in which a client must have taken its answer."""

_starting = threading.Lock()
_server: LiveServer | None = None


def serve_live() -> LiveServer:
    """Show this process's pools to `asyncmem top`, until the server is closed or the process ends.

    A thread answers through a socket that only processes of the same user can open: with `pool.stats()`, the waiting
    requests, and, while pools are recorded, the holders; it takes no orders. No client can hold up a pool or a loop. If
    this process serves already, that server is returned.

    Raises:
        OSError: There are no Unix sockets here, or there is no folder for one.
    """
    global _server  # noqa: PLW0603 -- one a process
    with _starting:
        if _server is None or not _server.alive:
            _server = LiveServer()
        return _server


@final
class LiveServer:
    """Returns those who look at this process. Made by `serve_live`; closed by `close()`, or by leaving its block.

    Attributes:
        path: Where the socket is.
    """

    def __init__(self) -> None:
        _sweep()
        self._process = os.getpid()
        self.path = make_path(f"{self._process}.sock")
        self._listener = _listen(self.path)
        self._waker, self._woken = socket.socketpair()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="asyncmem live", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<asyncmem.insight.LiveServer at {printable(str(self.path))}: {'serving' if self.alive else 'closed'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it serves: not after it was closed, and not in a process that was forked from this one."""
        return os.getpid() == self._process and not self._closed.is_set()

    def close(self) -> None:
        """End it, and remove the socket; once is enough."""
        if not self.alive:
            return
        self._closed.set()
        self.path.unlink(missing_ok=True)
        self._waker.close()
        self._thread.join()
        atexit.unregister(self.close)

    def _work(self) -> None:
        with self._listener, self._woken, selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            ready.register(self._woken, selectors.EVENT_READ)
            while ready.select() and not self._closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except BlockingIOError:
                    continue  # who wanted to ask has gone
                except OSError:
                    self._closed.wait(_TIMEOUT)  # the process has too many files open, which may pass
                    continue
                with connection:
                    _answer(connection)

    def _forked(self) -> None:
        # The thread is the parent's alone; a listener kept here would let clients wait for an answer after its end.
        self._listener.close()
        self._waker.close()
        self._woken.close()


def _listen(path: Path) -> socket.socket:
    # It gets its name once it listens: a socket that refuses is known to be left over.
    early = path.with_name(f"{path.name}~")
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        early.unlink(missing_ok=True)
        listener.bind(str(early))
        early.chmod(0o600)
        listener.listen()
        early.replace(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _answer(connection: socket.socket) -> None:
    with suppress(OSError):  # a client that does not take an answer gets none
        connection.settimeout(_TIMEOUT)
        if is_same_user(connection):
            connection.sendall(said().encode())


def said() -> str:
    """Return what this process says of its pools, as text that any encoding can hold."""
    try:
        return to_json(look())
    except Exception as error:  # noqa: BLE001 -- a defect, which is not to end the thread
        return to_json({"error": repr(error)})


def look() -> ProcessLook:
    """Look at all pools of this process, by their names. None is held up for longer than about a millisecond."""
    from asyncmem import __version__

    found = sorted(open_pools(), key=lambda opened: opened.name)
    return {
        "format": FORMAT,
        "process": os.getpid(),
        "program": list(sys.argv),
        "asyncmem": __version__,
        "time": time.time(),
        "pools": [_look_at(opened) for opened in found],
    }


def _look_at(opened: OpenPool) -> PoolLook:
    core = opened.core
    stats = opened.pool.stats()
    few = stats.active_buffers <= _MANY
    return {
        "closed": opened.closed is not None,
        "stats": stats.as_dict(),
        "budgets": [one.as_dict() for one in islice(opened.budget_stats(), _SHOWN)],
        "waiters": [
            {
                "owner": one.owner,
                "nbytes": one.nbytes,
                "age": one.age,
                "tag": one.tag,
                "growing": one.growing,
                "share": one.share,
            }
            for one in islice(waiter_infos(opened.pool), _SHOWN)
        ],
        "tags": _holders(held_by_tag(core, _SHOWN) if few else []),
        "sites": _holders(held_by_site(core, _SHOWN) if few else []),
    }


def _holders(held: list[tuple[str, int]]) -> list[Holder]:
    return [{"name": name, "nbytes": nbytes} for name, nbytes in held]


def _sweep() -> None:
    """Remove what processes have left that could not do it themselves."""
    for process, path in sockets():
        if process != os.getpid():
            with suppress(OSError):
                connect(path, _TIMEOUT).close()


def _forked() -> None:
    global _starting  # noqa: PLW0603 -- its holder is not in this process
    _starting = threading.Lock()
    if _server is not None:
        _server._forked()


os.register_at_fork(after_in_child=_forked)
