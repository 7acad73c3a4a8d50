"""The processes of a group, each connected to each, and what they say to each other: JSON, nothing is unpickled."""

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

HELLO, SAY, LEAVE = range(3)
DONE, FAILED = "done", "failed"
"""The topics of the last that a rank says of what all do together."""
_HEAD: Final = struct.Struct("<BQ")
"""What a message is, and the number: of the rank that says hello, else of what all do together."""
_MOST: Final = 60_000
_AHEAD: Final = 10_000
"""By how much that failed, or was given up, one may be ahead of another."""
_AGAIN: Final = 0.02
"""Seconds after which a rank that is not there yet is tried again."""


class Peer(Connection):
    """The connection to another process of the group."""

    def __init__(self, group: Group, broker: Broker, end: socket.socket, rank: int | None = None) -> None:
        """Take a connected socket; of one that was accepted the rank is said by its first message."""
        super().__init__(broker, end)
        self._group = group
        self.rank = rank

    def receive(self, message: bytes, fds: list[int]) -> None:
        """Take what it says."""
        del fds
        kind, number = _HEAD.unpack_from(message)
        if kind == HELLO and self.rank is None:
            self.rank = self._group.admit(self, number)
        elif kind == LEAVE and self.rank is not None:
            self._group.leaves(self.rank, "has left")
        elif kind == SAY and self.rank is not None:
            self._group.take(self.rank, number, json.loads(message[_HEAD.size :]))
        else:
            raise ValueError("no message")

    def lost(self) -> None:
        """Have the group know."""
        if self.rank is not None:
            self._group.leaves(self.rank, f"(process {self.pid or 'unknown'}) has ended")

    def hung_up(self) -> None:
        """End: the kernel closes the other end of a process that was killed, too."""
        self.end()


class Group:
    """The processes of a group as one of them sees it.

    What all do together has a number, the next one for each; what is said belongs to a number and to a topic.

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
        self._said: dict[tuple[int, int, str], deque[Json]] = {}  # by number, rank and topic
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
        """Let the others know; twice is fine."""
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
        """Take in one that has connected."""
        if rank in self._peers or not self.rank < rank < self.size:
            raise ValueError("it has the rank of another one")
        self._peers[rank] = peer
        self._tell()
        return rank

    def leaves(self, rank: int, reason: str) -> None:
        """Note that one has ended, or left."""
        if self._lost.setdefault(rank, reason) == reason:
            self._tell()

    def take(self, rank: int, number: int, said: Json) -> None:
        """Keep what one says of what all do now, or will do."""
        ahead = number - self.number
        if not isinstance(said, list) or len(said) != 2 or not isinstance(said[0], str) or ahead > _AHEAD:
            raise ValueError("no message")
        if number >= self.number:
            if said[0] in (DONE, FAILED):
                self._ended[number, rank] = said[1] if said[0] == FAILED else None
            self._said_of(number, rank, said[0]).append(said[1])
            self._tell()

    def _said_of(self, number: int, rank: int, topic: str) -> deque[Json]:
        # From two threads: a defaultdict could make two of them, and what was put into the first would be lost.
        return self._said.setdefault((number, rank, topic), deque())

    def _tell(self) -> None:
        changed, self._changed = self._changed, Latch()
        changed()

    # -- what all do together ----------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Go on to what all do next, and forget what was said before; return its number."""
        self.number += 1
        for said in [one for one in list(self._said) if one[0] < self.number]:
            del self._said[said]
        for ended in [one for one in list(self._ended) if one[0] < self.number]:
            del self._ended[ended]
        return self.number

    def say(self, to: int | None, topic: str, what: object, number: int | None = None) -> None:
        """Say something to a rank, or to all, of what they do now or of what has that number. From any thread.

        Raises:
            InvalidRequest: It is too long.
        """
        message = _HEAD.pack(SAY, self.number if number is None else number) + to_json([topic, what]).encode()
        if len(message) > _MOST:
            raise InvalidRequest("output", f"{len(message)} bytes besides its memory", f"at most {_MOST} bytes")
        for rank in [one for one in range(self.size) if one != self.rank] if to is None else [to]:
            self._peers[rank].send(message)

    async def hear(self, rank: int, topic: str) -> Json:
        """Wait for what a rank says of a topic.

        Raises:
            RankLost: One of all has failed, ended, or left, and that was not said.
        """
        said = self._said_of(self.number, rank, topic)

        def look() -> tuple[Json] | None:
            if said:
                return (said.popleft(),)
            self._need_no_failure()
            return None

        return (await self.until(look))[0]

    async def hear_all(self, topic: str) -> list[Json]:
        """Wait for what all others say of a topic; None stands for this rank itself."""
        return [None if rank == self.rank else await self.hear(rank, topic) for rank in range(self.size)]

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
