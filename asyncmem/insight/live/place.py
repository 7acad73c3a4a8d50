"""Where a process and those who look at it meet: a socket by its number, in a folder that only its user can enter."""

from __future__ import annotations

import os
import socket
import stat
import struct
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST: Final = 103
"""Bytes of a socket's path: 104 with its end on macOS, four more on Linux."""

_LOCAL_PEERCRED: Final = 1  # of macOS


def folders() -> list[Path]:
    """Answer where sockets may lie, the best first: programs of one user need not have the same environment."""
    if not hasattr(socket, "AF_UNIX"):
        return []
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    found = [Path(tempfile.gettempdir()) / f"asyncmem-{os.geteuid()}"]
    return [Path(runtime) / "asyncmem", *found] if runtime else found


def is_ours(folder: Path) -> bool:
    """Say whether a folder is there, and its user's alone; not where a link leads."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def make_place(name: str) -> Path:
    """Answer the path of a socket of that name, in the first folder that will do.

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


def path_of(process: int) -> str:
    """Name the socket of a process."""
    return f"{process}.sock"


def sockets() -> Iterator[tuple[int, Path]]:
    """Go through the sockets there are, each with the number of its process, living or not."""
    for folder in filter(is_ours, folders()):
        for path in sorted(folder.glob("*.sock")):
            if path.stem.isdecimal():
                yield int(path.stem), path


def connect(path: Path, timeout: float) -> socket.socket:
    """Connect to a socket.

    Raises:
        ConnectionRefusedError: Nobody listens any more; the socket is removed.
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
    """Say whether who is at the other end runs as this process's user."""
    return peer_user(connection) == os.geteuid()


def peer_user(connection: socket.socket) -> int:
    """Answer the number of the user at the other end."""
    if sys.platform == "linux":
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    else:  # macOS and other BSDs: a version, and the user
        _, user = struct.unpack("2I", connection.getsockopt(0, _LOCAL_PEERCRED, 76)[:8])
    return int(user)
