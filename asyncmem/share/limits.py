"""One limit for the pools of several processes: what is idle in one of them goes to another that waits for memory.

Each pool has a part of the device, and asks for more before it grows. One of the processes keeps the books; if it ends,
the others find a new one among them and tell it what they have.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncmem.errors import AsyncmemError, BackendUnavailable
from asyncmem.share.broker import Broker, Connection, new_socket
from asyncmem.share.exports import process

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from asyncmem.pool.open_pool import OpenPool

_AGAIN: Final = 0.02
"""Seconds after which a process that waits has the others look once more for what they do not use."""
_SETTLED: Final = 0.03
"""Seconds in which the members of a group find a new keeper; it gives nothing before."""
_IN_VAIN: Final = 0.1
"""The most seconds to wait for memory that no request needs."""
_DYING: Final = 1.0
"""Seconds in which a process has died that has hung up, if it dies."""


class State(NamedTuple):
    """What a member says of itself, in bytes.

    Attributes:
        number: That of the last `Grant` it has seen.
        ceiling: The most that all members together should have, as it sees it; 0 from one that leaves.
        limit: What it may have.
        given: What it has from the device, and is about to get.
        need: What it lacks, 0 for nothing.
        wanted: What it would take if there is more.
    """

    number: int
    ceiling: int
    limit: int
    given: int
    need: int
    wanted: int


class Grant(NamedTuple):
    """What a member may have from now on."""

    number: int
    limit: int


_STATE: Final = struct.Struct("<6Q")
_GRANT: Final = struct.Struct("<2Q")


class _Membership(Connection):
    """One end of a member's connection to its keeper."""

    def hung_up(self) -> None:
        """End, also where the other process lives on; after a second, in which one that dies gives back what it has."""
        self.broker.later(_DYING, self.end)


class Seat(_Membership):
    """A member, as the keeper sees it."""

    def __init__(self, keeper: Keeper, broker: Broker, end: socket.socket) -> None:
        """Take what was accepted."""
        super().__init__(broker, end)
        self._keeper = keeper
        self.state = State(0, 1 << 63, 0, 0, 0, 0)
        self._sent = 0
        self.turn = 0  # when it began to wait, in the order of all

    @property
    def used(self) -> int:
        """Bytes that are others' no more."""
        return max(self.state.limit, self.state.given)

    def receive(self, message: bytes, fds: list[int]) -> None:
        """Take its state. A limit from before the last grant is not its limit any more."""
        del fds
        said = State(*_STATE.unpack(message))
        if not said.ceiling:
            self.end()
            return
        if said.number != self._sent:
            said = said._replace(limit=self.state.limit)
        if said.need and not self.turn:
            self.turn = self._keeper.next_turn()
        elif not said.need:
            self.turn = 0
        self.state = said
        self._keeper.balance()

    def grant(self, limit: int) -> None:
        """Raise its limit."""
        self.state = self.state._replace(limit=limit, need=0)
        self.turn = 0
        self.ask(limit)

    def ask(self, limit: int) -> None:
        """Tell it a limit; a lower one counts once it says that it has given the rest back."""
        self._sent += 1
        self.send(_GRANT.pack(*Grant(self._sent, limit)))

    def lost(self) -> None:
        """Have all it had go to the others."""
        self._keeper.seats.discard(self)
        self._keeper.balance()


class Keeper:
    """Keeps the books of a group: first come, first served. On its broker's thread."""

    def __init__(self, broker: Broker, listening: socket.socket) -> None:
        """Take a socket that is bound to the group's name."""
        self.seats: set[Seat] = set()
        self._broker = broker
        self._turns = itertools.count(1)
        self._settled = self._looking = False
        broker.listen(listening, self._admit)
        broker.later(_SETTLED, self._settle)

    def next_turn(self) -> int:
        """Return the next number of who begins to wait."""
        return next(self._turns)

    def balance(self) -> None:
        """Give what is free to those who wait, and have the others give back what they do not use."""
        waiting = sorted((one for one in self.seats if one.turn), key=lambda one: one.turn)
        while waiting and self._settled:
            first = waiting.pop(0)
            free = min(one.state.ceiling for one in self.seats) - sum(one.used for one in self.seats)
            lacks = first.state.need - free
            if lacks > 0:
                self._collect(first, lacks)
                return
            first.grant(first.used + max(first.state.need, min(free, first.state.wanted)))

    def _collect(self, first: Seat, lacks: int) -> None:
        if self._looking:
            return
        self._looking = True
        for one in self.seats - {first}:
            if one.used:
                one.ask(max(0, one.used - lacks))
        self._broker.later(_AGAIN, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        self.balance()

    def _settle(self) -> None:
        self._settled = True
        self.balance()

    def _admit(self, broker: Broker, end: socket.socket) -> Connection:
        seat = Seat(self, broker, end)
        self.seats.add(seat)
        return seat


class Member:
    """A pool's place in the group of those that share its device, and the part that it may have.

    Call it before the pool grows: ``with member(need, wanted) as granted``.
    """

    def __init__(self, opened: OpenPool) -> None:
        """Join the group.

        Raises:
            BackendUnavailable: It cannot be joined here.
        """
        self._pool = weakref.ref(opened)
        self._broker = process.broker
        self._name = f"\0asyncmem-limit-{os.geteuid()}-{opened.device.identity}".encode()
        self._ceiling = opened.limit
        self._changed = threading.Condition()
        self._limit = 0
        self._promised = 0  # to growth that is under way
        self._wants: dict[int, tuple[int, int]] = {}  # what threads lack, by thread
        self._seen = 0
        self._yielding = False
        self._link: Link | None = None
        try:
            self._join()
        except PermissionError as error:
            raise BackendUnavailable('limit="shared"', tried=(str(error),)) from None
        weakref.finalize(opened, self._leave).atexit = False

    @contextlib.contextmanager
    def __call__(self, need: int, wanted: int) -> Iterator[int]:
        """Wait on this thread until the pool may have `need` more bytes, up to `wanted`; 0 where that never comes.

        The others get nothing of them as long as the block lasts.
        """
        granted = self._await(need, wanted)
        try:
            yield granted
        finally:
            with self._changed:
                self._promised -= granted

    def _await(self, need: int, wanted: int) -> int:
        me, waited = threading.get_ident(), 0.0
        requested = need > 0 and self._requests() > 0
        with self._changed:
            try:
                while (room := self._limit - self._given()) < max(need, 1):
                    if self._hopeless(need, waited):
                        break
                    self._wants[me] = max(need, 1) - room, wanted - room
                    self._tell()
                    self._changed.wait(_IN_VAIN / 2)
                    waited += _IN_VAIN / 2
                    if requested and not self._requests():  # all of them have given up
                        return 0
            finally:
                if self._wants.pop(me, None) is not None:
                    self._tell()
            granted = max(0, min(room, wanted)) if room >= need else 0
            self._promised += granted
        return granted

    def _hopeless(self, need: int, waited: float) -> bool:
        opened = self._pool()
        if opened is None or opened.closed is not None or need > self._ceiling:
            return True
        return waited >= _IN_VAIN and (not need or not self._requests())

    def _requests(self) -> int:
        opened = self._pool()
        gauges = {} if opened is None else opened.core.scheduler.gauges()
        return sum(gauges.get(one, 0) for one in ("growing", "waiting"))

    def _given(self) -> int:
        opened = self._pool()
        return self._promised + (0 if opened is None else opened.executor.given())

    def _tell(self) -> None:
        need, wanted = max(self._wants.values(), default=(0, 0))
        if self._link is not None:
            ceiling = 0 if self._pool() is None else self._ceiling
            said = State(self._seen, ceiling, self._limit, self._given(), need, max(wanted, 0))
            self._link.send(_STATE.pack(*said))

    # -- on the broker's thread, but for the first time ----------------------------------------------------------------

    def take(self, grant: Grant) -> None:
        """Take a limit: what is more at once, what is less once that is given back."""
        with self._changed:
            self._seen = grant.number
            if grant.limit >= self._limit:
                self._limit = grant.limit
                self._changed.notify_all()
                if not self._wants:  # else who waits says it
                    self._tell()  # what it said before may have crossed this, and did not count
            elif not self._yielding:
                self._yielding = True
                threading.Thread(target=self._give_back, args=(grant.limit,), name="asyncmem gives back").start()

    def _give_back(self, limit: int) -> None:
        # The device's calls block, which the broker must not.
        opened = self._pool()
        try:
            if opened is not None:
                with contextlib.suppress(AsyncmemError):  # what the device does not take is offered again
                    opened.executor.trim(limit)
                    if self._given() > limit:  # a segment is given back as a whole, and one may be larger than the rest
                        opened.executor.trim(0)
        finally:
            del opened
            with self._changed:
                self._yielding = False
                self._limit = min(self._limit, max(limit, self._given()))
                self._tell()

    def rejoin(self) -> None:
        """Find the new keeper, after the old one has ended."""
        self._link = None
        if self._pool() is not None:
            try:
                self._join()
            except PermissionError:
                self._broker.later(_IN_VAIN, self.rejoin)

    def _join(self) -> None:
        end, listening = new_socket(), new_socket()
        try:
            listening.bind(self._name)
            listening.listen(128)
        except OSError:
            listening.close()
        else:
            self._broker.post(partial(Keeper, self._broker, listening))
        try:
            end.connect(self._name)
            link = Link(self, self._broker, end)
        except PermissionError:
            end.close()
            raise
        except OSError:  # the keeper ends, or many join at once
            end.close()
            self._broker.post(partial(self._broker.later, _AGAIN, self.rejoin))
            return
        self._broker.post(partial(self._enter, link))

    def _enter(self, link: Link) -> None:
        link.open()
        with self._changed:
            self._link, self._seen = link, 0
            self._tell()

    def _leave(self) -> None:
        if self._link is not None:
            self._tell()
            self._broker.post(self._link.end)


class Link(_Membership):
    """The connection of a member to its keeper."""

    def __init__(self, member: Member, broker: Broker, end: socket.socket) -> None:
        """Take a connected socket."""
        super().__init__(broker, end)
        self._member = member

    def receive(self, message: bytes, fds: list[int]) -> None:
        """Take a grant."""
        del fds
        self._member.take(Grant(*_GRANT.unpack(message)))

    def lost(self) -> None:
        """Find another keeper."""
        self._member.rejoin()
