"""Ask a process what its pools are doing, through its Unix socket.

A socket is named by the number of its process, and lies in a folder that only its user can enter.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NotRequired, TypedDict, cast, final

from asyncmem.files import parse_json
from asyncmem.stats import Figure

FORMAT: Final = 1
"""Of an answer; another one is refused."""

_LONGEST: Final = 103  # bytes of a socket's path: 104 with its end on macOS, four more on Linux
_LOCAL_PEERCRED: Final = 1  # of macOS
_MOST: Final = 16 << 20  # bytes of an answer
_LARGEST: Final = 1 << 60
_LATEST: Final = 1 << 36  # seconds since 1970: calendars end in the year 9999


class WaiterLook(TypedDict):
    """A request that waits: `age` in seconds, whether it is `growing`, and the `share` it is in, as in `WaiterInfo`."""

    owner: str
    nbytes: int
    age: float
    tag: str | None
    growing: bool
    share: NotRequired[str]  # which an older process does not say


class Holder(TypedDict):
    """What a tag or a line holds."""

    name: str
    nbytes: int


class PoolLook(TypedDict):
    """A pool that has memory.

    A closed pool only goes on for the buffers that are held. `stats` are those of the pool and `budgets` those of its
    budgets, as `PoolStats.as_dict` has them. The longest waits come first; tags and lines ("sites") that hold most are
    there as far as they are recorded. A pool of a cluster has its worker's address, and when that was asked.
    """

    closed: bool
    stats: dict[str, Figure]
    budgets: list[dict[str, Figure]]
    waiters: list[WaiterLook]
    tags: list[Holder]
    sites: list[Holder]
    worker: NotRequired[str]
    time: NotRequired[float]


class Look(TypedDict):
    """Pools, and the time since 1970 when they were looked at."""

    time: float
    pools: list[PoolLook]


@final
class ProcessLook(Look):
    """What a process says: its number, its arguments, the version of asyncmem, and its pools."""

    format: int
    process: int
    program: list[str]
    asyncmem: str


@final
class ClusterLook(Look):
    """What a scheduler knows: the addresses of the workers that show their pools, and of those that do not."""

    scheduler: str
    workers: list[str]
    silent: list[str]


_HOLDERS: Final = [{"name": str, "nbytes": int}]
_STATS: Final = {
    "name": str, "device": str, "limit": int, "pressure": str, "allocated_bytes": int, "reserved_bytes": int,
    "waiting": int, "waiting_bytes": int, "growing": int, "num_allocations": int, "cache_hit_rate": int | float,
}  # fmt: skip
_LOOK: Final = {
    "process": int, "program": [str], "time": float,
    "pools": [{
        "closed": bool, "waiters": [{"owner": str, "nbytes": int, "age": int | float, "growing": bool}],
        "tags": _HOLDERS, "sites": _HOLDERS, "stats": _STATS, "budgets": [_STATS],
    }],
}  # fmt: skip
"""What is shown of an answer."""


class NotServing(OSError):
    """The process shows nothing: it has ended, or was not started so."""


def serving(timeout: float = 5.0) -> list[ProcessLook]:
    """Return what all processes of this user say that show something, by their numbers."""
    found = []
    for _, path in sockets():
        try:
            found.append(_ask(path, timeout))
        except OSError:
            continue
    return sorted(found, key=lambda one: one["process"])


def ask(process: int, timeout: float = 5.0) -> ProcessLook:
    """Return what a process says.

    Raises:
        NotServing: It shows nothing.
        OSError: It does not answer in time, or what it answers cannot be read.
    """
    for number, path in sockets():
        if number == process:
            try:
                return _ask(path, timeout)
            except (ConnectionError, FileNotFoundError):
                break
    raise NotServing(f"process {process} shows nothing")


def _ask(path: Path, timeout: float) -> ProcessLook:
    end = time.monotonic() + timeout
    found = bytearray()
    with connect(path, timeout) as connection:
        while True:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            part = connection.recv(1 << 16)
            if not part:
                break
            found += part
            if len(found) > _MOST:
                raise OSError(f"{path} answers without end")
    if not found:
        raise ConnectionResetError(f"{path} gave no answer")
    return read_look(bytes(found), path)


def read_look(answer: bytes | str, path: object) -> ProcessLook:
    """Read what a process says.

    Raises:
        OSError: It is something else; the text names `path`.
    """
    try:
        found = parse_json(answer)
    except ValueError as error:
        raise OSError(f"{path} answers something else: {error}") from error
    if isinstance(found, dict) and "error" in found:
        raise OSError(f"{path} could not look at its pools: {found['error']}")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OSError(f"{path} is of another version of asyncmem")
    if not _fits(found, _LOOK) or found["time"] > _LATEST:
        raise OSError(f"{path} answers something else: not what a process says of its pools")
    return cast("ProcessLook", found)


def _fits(value: object, shape: object) -> bool:
    """Whether plain data has the keys and types of a shape, and numbers that can be printed."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(name in value and _fits(value[name], one) for name, one in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(one, shape[0]) for one in value)
    if not isinstance(value, shape):  # type: ignore[arg-type]  # a type or types
        return False
    return 0 <= value < _LARGEST if isinstance(value, int | float) else True


def folders() -> list[Path]:
    """Return where sockets may lie, the best first: programs of one user need not have the same environment."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(tempfile.gettempdir()) / f"asyncmem-{os.geteuid()}"]
    return [Path(runtime) / "asyncmem", *found] if runtime else found


def is_ours(folder: Path) -> bool:
    """Return whether a folder is there, and its user's alone; not where a link leads."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def make_path(name: str) -> Path:
    """Return the path of a socket of that name, in the first folder that will do.

    Raises:
        OSError: There is none; the text says why each will not.
    """
    reasons = []
    for folder in folders():
        path = folder / name
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        if not is_ours(folder):
            reasons.append(f"{folder} is not yours alone")
        elif len(os.fsencode(path)) > _LONGEST:
            reasons.append(f"{folder} is too long a name for a socket")
        else:
            return path
    raise OSError(f"there is no folder for a socket: {'; '.join(reasons)}")


def sockets() -> Iterator[tuple[int, Path]]:
    """Return the sockets there are, each with the number of its process, alive or not."""
    for folder in filter(is_ours, folders()):
        for path in sorted(folder.glob("*.sock")):
            if path.stem.isdecimal():
                yield int(path.stem), path


def connect(path: Path, timeout: float) -> socket.socket:
    """Connect to a socket.

    Raises:
        ConnectionRefusedError: No server listens any more; the socket is removed.
        PermissionError: Another user listens there.
        OSError: It is not there, or does not answer in time.
    """
    with ExitStack() as unless_connected:
        connection = unless_connected.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(timeout)
        try:
            connection.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            raise
        if not is_same_user(connection):
            raise PermissionError(f"{path} is another user's")
        unless_connected.pop_all()
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Return whether who is at the other end runs as this process's user."""
    return peer_user(connection) == os.geteuid()


def peer_user(connection: socket.socket) -> int:
    """Return the number of the user at the other end."""
    if sys.platform == "linux":
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    else:  # macOS and other BSDs: a version, and the user
        _, user = struct.unpack("2I", connection.getsockopt(0, _LOCAL_PEERCRED, 76)[:8])
    return int(user)
