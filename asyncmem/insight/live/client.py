"""Ask a process what its pools are doing."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final, cast

from asyncmem.insight.live.look import FORMAT
from asyncmem.insight.live.place import connect, sockets

if TYPE_CHECKING:
    from pathlib import Path

    from asyncmem.insight.live.look import ProcessLook

_MOST: Final = 16 << 20
"""Bytes of an answer."""


class NotServing(OSError):
    """The process shows nothing: it has ended, or was not started so."""


def serving(timeout: float = 5.0) -> list[ProcessLook]:
    """Answer what all processes of this user say that show something, by their numbers."""
    found = []
    for _, path in sockets():
        try:
            found.append(_ask(path, timeout))
        except OSError:
            continue
    return sorted(found, key=lambda one: one["process"])


def ask(process: int, timeout: float = 5.0) -> ProcessLook:
    """Answer what a process says.

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
    return _read(bytes(found), path)


def _read(answer: bytes, path: Path) -> ProcessLook:
    if not answer:
        raise ConnectionResetError(f"{path} gave no answer")
    try:
        found = json.loads(answer)
    except (RecursionError, ValueError) as error:
        raise OSError(f"{path} answers something else: {error}") from error
    if isinstance(found, dict) and "error" in found:
        raise OSError(f"{path} could not look at its pools: {found['error']}")
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise OSError(f"{path} is of another version of asyncmem")
    return cast("ProcessLook", found)
