"""The processes of a group, each connected to each, and their messages to each other: JSON, nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from asyncmem.errors import InvalidRequest, RankLost
from asyncmem.pool.latch import Latch
from asyncmem.share.broker import Connection, new_socket
from asyncmem.share.exports import process
from asyncmem.text import to_json

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from asyncmem.share.broker import Broker
    from asyncmem.share.items import Json

HELLO, MESSAGE, LEAVE = range(3)
DONE, FAILED = "done", "failed"
"""The topics of the last message of a rank about what all do together."""
_HEAD: Final = struct.Struct("<BQ")
"""The kind of a message, and a number: of the rank that says hello, else of what all do together."""
_MOST: Final = 60_000
_AHEAD: Final = 10_000
"""By how much that failed, or was given up, one may be ahead of another."""
_AGAIN: Final = 0.02
"""Seconds after which a rank that is not there yet is tried again."""


class Peer(Connection):
    """The connection to another process of the group."""

    def __init__(self, group: Group, broker: Broker, end: socket.socket, rank: int | None = None) -> None:
        """Take a connected socket; one that was accepted names its rank in its first message."""
        super().__init__(broker, end)
        self._group = group
        self.rank = rank

    def receive(self, message: bytes, fds: list[int]) -> None:
        """Take a message."""
        del fds
        kind, number = _HEAD.unpack_from(message)
        if kind == HELLO and self.rank is None:
            self.rank = self._group.admit(self, number)
        elif kind == LEAVE and self.rank is not None:
            self._group.leaves(self.rank, "has left")
        elif kind == MESSAGE and self.rank is not None:
            self._group.take(self.rank, number, json.loads(message[_HEAD.size :]))
        else:
            raise ValueError("no message")

    def lost(self) -> None:
        """Report the end of the process to the group."""
        if self.rank is not None:
            self._group.leaves(self.rank, f"(process {self.pid or 'unknown'}) has ended")

    def hung_up(self) -> None:
        """End; the kernel closes the other end of a process that was killed, too."""
        self.end()


class Group:
    """The processes of a group as one of them sees it.

    What all do together has a number, the next one for each; each message has such a number and a topic.

    Attributes:
        rank: Which of them this is.
        size: How many there are.
    """

    def __init__(self, key: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._key = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._broker = process.broker
        self._peers: dict[int, Peer] = {}
        self._lost: dict[int, str] = {}
        self._ended: dict[tuple[int, int], Json] = {}  # by number and rank: None of one that is done, or how it failed
        self._inbox: dict[tuple[int, int, str], deque[Json]] = {}  # by number, rank and topic
        self._changed: Latch[None] = Latch()
        self._listening: socket.socket | None = None
        self.number = 0  # of what all do together

    # -- joining and leaving -----------------------------------------------------------------------------------------

    async def join(self, timeout: float) -> None:
        """Wait until all are connected.

        Raises:
            TimeoutError: Some did not come; they are named.
            InvalidRequest: Another process has this rank.
        """
        listening = new_socket()
        try:
            listening.bind(self._name(self.rank))
        except OSError:
            listening.close()
            raise InvalidRequest("rank", self.rank, "one that no other process of this key has") from None
        listening.listen(128)
        self._listening = listening
        self._broker.post(partial(self._broker.listen, listening, partial(_accept, self)))
        until = time.monotonic() + timeout
        for other in range(self.rank):
            while not self._connect(other) and time.monotonic() < until:  # noqa: ASYNC110  # another process is asked
                await anyio.sleep(_AGAIN)
        with anyio.move_on_after(max(0.0, until - time.monotonic())):
            await self.until(lambda: len(self._peers) == self.size - 1 or None)
        missing = [other for other in range(self.size) if other != self.rank and other not in self._peers]
        if missing:
            raise TimeoutError(f"rank {', '.join(map(str, missing))} did not come within {timeout:g} s")

    def leave(self) -> None:
        """Tell the others, and close the connections; twice is fine."""
        for peer in self._peers.values():
            peer.send(_HEAD.pack(LEAVE, 0))
            self._broker.post(peer.end)
        if self._listening is not None:
            self._broker.post(partial(_close, self._broker, self._listening))
            self._listening = None

    def _name(self, rank: int) -> bytes:
        return f"\0asyncmem-rank-{self._key}-{rank}".encode()

    def _connect(self, other: int) -> bool:
        end = new_socket()
        try:
            end.connect(self._name(other))
            peer = Peer(self, self._broker, end, other)
        except PermissionError:
            end.close()
            raise
        except OSError:
            end.close()
            return False
        self._peers[other] = peer
        peer.send(_HEAD.pack(HELLO, self.rank))
        self._broker.post(peer.open)
        return True

    # -- on the broker's thread --------------------------------------------------------------------------------------

    def admit(self, peer: Peer, rank: int) -> int:
        """Add a process that has connected."""
        if rank in self._peers or not self.rank < rank < self.size:
            raise ValueError("it has the rank of another one")
        self._peers[rank] = peer
        self._wake()
        return rank

    def leaves(self, rank: int, reason: str) -> None:
        """Note that a process has ended, or left."""
        if self._lost.setdefault(rank, reason) == reason:
            self._wake()

    def take(self, rank: int, number: int, message: Json) -> None:
        """Keep a message about what all do now, or will do."""
        ahead = number - self.number
        if not isinstance(message, list) or len(message) != 2 or not isinstance(message[0], str) or ahead > _AHEAD:
            raise ValueError("no message")
        if number >= self.number:
            if message[0] in (DONE, FAILED):
                self._ended[number, rank] = message[1] if message[0] == FAILED else None
            self._messages(number, rank, message[0]).append(message[1])
            self._wake()

    def _messages(self, number: int, rank: int, topic: str) -> deque[Json]:
        # From two threads: a defaultdict could make two of them, and what was put into the first would be lost.
        return self._inbox.setdefault((number, rank, topic), deque())

    def _wake(self) -> None:
        changed, self._changed = self._changed, Latch()
        changed()

    # -- what all do together ----------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Begin what all do next, and drop the messages about what they did before; return its number."""
        self.number += 1
        for key in [one for one in list(self._inbox) if one[0] < self.number]:
            del self._inbox[key]
        for end in [one for one in list(self._ended) if one[0] < self.number]:
            del self._ended[end]
        return self.number

    def send(self, to: int | None, topic: str, content: object, number: int | None = None) -> None:
        """Send a message to a rank, or to all, about what they do now or what has that number. From any thread.

        Raises:
            InvalidRequest: It is too long.
        """
        message = _HEAD.pack(MESSAGE, self.number if number is None else number) + to_json([topic, content]).encode()
        if len(message) > _MOST:
            raise InvalidRequest("output", f"{len(message)} bytes besides its memory", f"at most {_MOST} bytes")
        for rank in [one for one in range(self.size) if one != self.rank] if to is None else [to]:
            self._peers[rank].send(message)

    async def receive(self, rank: int, topic: str) -> Json:
        """Wait for a message of a rank on a topic.

        Raises:
            RankLost: One of all has failed, ended, or left, and there is no such message.
        """
        messages = self._messages(self.number, rank, topic)

        def look() -> tuple[Json] | None:
            if messages:
                return (messages.popleft(),)
            self._need_no_failure()
            return None

        return (await self.until(look))[0]

    async def receive_all(self, topic: str) -> list[Json]:
        """Wait for a message of each other rank on a topic; None stands for this rank itself."""
        return [None if rank == self.rank else await self.receive(rank, topic) for rank in range(self.size)]

    async def failure(self) -> RankLost:
        """Wait until one of the others has failed, ended, or left before it was done."""
        try:
            await self.until(self._need_no_failure)
        except RankLost as lost:
            return lost
        raise AssertionError("it waits for nothing else")

    def _need_no_failure(self) -> None:
        for (number, rank), how in list(self._ended.items()):
            if number == self.number and how is not None:
                raise RankLost(rank, "has failed", how)
        for rank, reason in list(self._lost.items()):
            if (self.number, rank) not in self._ended:
                raise RankLost(rank, reason)

    def pid(self, rank: int) -> int:
        """Return the number of a rank's process, 0 where it is not visible from here."""
        pid: int = self._peers[rank].pid
        return pid

    async def until(self, look: Callable[[], Any | None]) -> Any:  # noqa: ANN401  # what `look` returns
        """Wait until `look` returns something; it is called again after each change."""
        while True:
            changed = self._changed
            found = look()
            if found is not None:
                return found
            await changed.wait()


def _accept(group: Group, broker: Broker, end: socket.socket) -> Connection:
    return Peer(group, broker, end)


def _close(broker: Broker, listening: socket.socket) -> None:
    broker.forget(listening)
    listening.close()
