"""Memory that moves to the host and back: which, when, and in the order of which streams.

Under pressure the buffers that were used the longest ago go first, as many as a request needs: any where the pool is
full, those of a budget or of a lease where only that is. Each is copied to
page-locked memory on a stream of the pool's own, behind all uses that it has had, and freed behind that copy. Nobody
waits for the copy but the streams that come after it: the memory serves the request at once.

Coming back is a request like any other. A use keeps its memory at home, so two that bring each other out take turns.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncmem.core import Buffer, Users
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError, PoolClosed, PoolTimeout
from asyncmem.pool.graph import graph_of, is_captured
from asyncmem.pool.latch import Latch
from asyncmem.pool.movable import Away, Movable
from asyncmem.pool.notes import Notes, notes_of
from asyncmem.pool.resting import Idle

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from asyncmem.devices import Stream
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.share import Share
    from asyncmem.pool.waiting import Waiting


class Spilling:
    """What of one pool may move to the host. Attributes change under the pool's turn only.

    Attributes:
        nbytes: Bytes that are on the host now, as they were asked for.
        refused: The smallest size for which the host had no memory since something last changed, or None.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.nbytes = 0
        self.refused: int | None = None
        self._idle = Idle()
        self._claimed: set[Movable] = set()  # at home and about to move
        self._joined: set[Movable] = set()  # those that somebody waits for besides whoever brings them home
        self._making = threading.Lock()
        self._stream: Stream | None = None

    # -- marking -----------------------------------------------------------------------------------------------------

    def mark(self, buffer: Buffer) -> Movable:
        """Take a buffer over.

        Raises:
            InvalidRequest: It is no buffer that could move.
            BufferReleased: It has been freed.
        """
        if not isinstance(buffer, Buffer):
            raise InvalidRequest("buffer", buffer, "a buffer")
        _ = buffer.address  # a freed one says so
        flow = self.flow
        if buffer._core is not flow.core or (buffer.nbytes and not buffer._block):
            raise InvalidRequest("buffer", buffer, f"a buffer of pool {flow.pool.name!r}")
        share = flow.share_of(buffer)
        if getattr(share, "laid_out", False) or graph_of(buffer) is not None:
            expected = "memory that may lie anywhere, not where a plan or a captured graph has it"
            raise InvalidRequest("buffer", buffer, expected)
        if not buffer.stream.lasting:
            expected = "a buffer whose home stream is kept alive"
            raise InvalidRequest("buffer", buffer, expected, hint="name streams by their objects, not by numbers")
        with flow.turn:
            one = Movable(buffer, share)
            one.take_over()
            if buffer.alive:
                raise InvalidRequest("buffer", buffer, "a buffer that is neither pinned nor exported")
            notes = one.buffer.notes if one.buffer is not None else None
            if isinstance(notes, Notes):
                notes.let_go()  # whoever held it: it may be had without that owner now
            self._rest(one)
        return one

    def end(self, one: Movable, stream: object = None) -> None:
        """Free both sides (with the turn held)."""
        if one.buffer is not None:
            one.buffer.free(stream)
            self._stir(one)
            self._unclaim(one)
        if one.away is not None:
            self._let_go(one.away.host)
            self.nbytes -= one.nbytes
            one.away = None
            self._host_has_room()

    def drop(self, one: Movable) -> None:
        """Let go of a handle that was dropped (with the turn held): a buffer that is dropped with it frees itself."""
        one.buffer = None
        self._stir(one)
        self._unclaim(one)
        self.end(one)

    # -- using -------------------------------------------------------------------------------------------------------

    def begin(self, one: Movable, owner: Hashable, *, patient: bool) -> Buffer | Latch[None] | None:
        """Begin a use, if it is at home.

        Returns:
            The buffer; or what to wait for before asking again, and then to `unfollow`; or None: the caller has to
            bring it home, and to call `fetched` whatever comes of it.
        """
        flow = self.flow
        with flow.turn:
            one.need()
            if one.moving is not None:
                return one.moving
            if one.buffer is not None:
                self._stir(one)
                return one.begin(owner)
            one.share = self._open_share(one.share)
            if one.fetching is None:
                one.fetching, one.patient = Latch(_nothing), patient
                return None
            if patient and one.patient:
                one.followers.append(owner)
                self._joined.add(one)
                flow.watch.follows(owner, one.share)
            return one.fetching

    def unfollow(self, one: Movable, owner: Hashable) -> None:
        """Count somebody no more who waited for another one to bring it home."""
        with self.flow.turn:
            if owner in one.followers:
                one.followers.remove(owner)
            if not one.followers:
                self._joined.discard(one)

    def followers(self) -> Iterator[tuple[Hashable, Movable]]:
        """Go through those who wait for others to bring something home (with the turn held)."""
        for one in self._joined:
            for owner in one.followers:
                yield owner, one

    def bring_home(self, one: Movable, buffer: Buffer, owner: Hashable) -> Buffer:
        """Copy the bytes to a buffer that was granted for them, and begin a use.

        Raises:
            BufferReleased: It has been freed meanwhile.
            DeviceError: The device refuses. The bytes are where they were, as far as the device still has them.
        """
        flow, device = self.flow, self.flow.pool.device
        with flow.turn:
            try:
                one.need()
                away, home = one.away, buffer.stream
                assert away is not None
                home.wait(away.fence)
                self._note_reader(away.host, home)
                device.copy_in(buffer.address, memoryview(away.host), home)
                arriving = home.record() if device.host_readable else None
            except BaseException:
                buffer.free()
                raise
            one.come(buffer, arriving)
            self._let_go(away.host)
            self.nbytes -= one.nbytes
            flow.tally.returns += 1
            self._host_has_room()
            return one.begin(owner)

    def fetched(self, one: Movable) -> None:
        """Let those look again who waited for the caller to bring it home."""
        with self.flow.turn:
            latch, one.fetching = one.fetching, None
        if latch is not None:
            latch()

    def leave(self, one: Movable, owner: Hashable) -> None:
        """End a use; after the last one it may move again."""
        with self.flow.turn:
            if one.end(owner):
                self._rest(one)

    def need_in_time(self, one: Movable, fetched: Latch[None], timeout: float | None) -> None:
        """Raise `PoolTimeout`, and count it, where nobody brought it home in time."""
        flow = self.flow
        if timeout is not None and not fetched.done:
            with flow.turn:
                flow.tally.timeouts += 1
            raise PoolTimeout(pool=flow.pool.name, asked=one.nbytes, timeout=timeout, free=flow.core.free_bytes())

    # -- moving out --------------------------------------------------------------------------------------------------

    def claim(self, needed: int, share: Share) -> list[Movable]:
        """Answer a share's oldest that hold so many bytes together, none where all hold less (with the turn held).

        They are bound to move: who comes to use one now stands behind the request that they move for.
        """
        found = self._oldest(needed, share)
        for one in found:
            self._stir(one)
            one.moving = Latch(_nothing)
            self._claimed.add(one)
        return found

    def could_free(self, needed: int, share: Share) -> bool:
        """Say whether as much of a share could move, or some of it is about to (with the turn held)."""
        return bool(self._oldest(needed, share)) or any(share in one.share.lineage() for one in self._claimed)

    def _oldest(self, needed: int, share: Share) -> list[Movable]:
        found: list[Movable] = []
        if self._idle.bytes_of(share) >= needed and self.flow.options.spill_limit:
            for one in self._idle.of(share):
                if (self.refused is None or one.size < self.refused) and self._may_move(one):
                    found.append(one)
                    needed -= one.size
                    if needed <= 0:
                        return found
        return []

    def move(self, claimed: list[Movable], waiting: Waiting) -> None:
        """Move buffers to the host for a request (blocks, where host memory has to be prepared for that).

        Raises:
            DeviceError: The device refuses; the buffer is where it was.
        """
        try:
            for one in claimed:
                if waiting.done or not self._move(one):
                    return
        finally:
            with self.flow.turn:
                for one in reversed(claimed):
                    self._unclaim(one)

    def let_stay(self) -> None:
        """Let all stay that were to move, because nobody may be left to move them (with the turn held)."""
        for one in list(self._claimed):
            self._unclaim(one)

    def _unclaim(self, one: Movable) -> None:
        if one in self._claimed:
            self._claimed.discard(one)
            latch, one.moving = one.moving, None
            if latch is not None:
                self.flow.owe(latch)
            if one.buffer is not None and not one.gone:
                one.share = self._open_share(one.share)
                self._idle.add(one, oldest=True)
            self._look()

    def _move(self, one: Movable) -> bool:
        flow, stream = self.flow, self._own_stream()
        host = self._host_memory(one, stream)
        if host is None:
            return False
        with flow.turn:
            if one not in self._claimed or one.gone or not self._may_move(one):  # freed meanwhile, or captured
                host.free()
                return True
            away = self._copy_out(one, host, stream)
            if not flow.pool.device.host_readable:
                self._leave(one, away)
                return True
        # The host may touch its memory whatever streams do, so there the copy is over before others get it.
        over = False
        try:
            over = away.fence.block()
        finally:
            with flow.turn:
                if over and one in self._claimed and not one.gone:
                    self._leave(one, away)
                else:
                    host.free()
        return True

    def _own_stream(self) -> Stream:
        with self._making:
            if self._stream is None:
                self._stream = self.flow.pool.device.create_stream("spill")
            return self._stream

    def _host_memory(self, one: Movable, stream: Stream) -> Buffer | None:
        pool = self.flow.pool
        try:
            return pool.spilled.of(pool).allocate(one.nbytes, stream=stream, tag=one.tag)
        except (OutOfMemoryError, PoolClosed, InvalidRequest):
            with self.flow.turn:
                self.refused = one.size if self.refused is None else min(one.size, self.refused)
            return None

    def _copy_out(self, one: Movable, host: Buffer, stream: Stream) -> Away:
        flow, buffer = self.flow, one.buffer
        assert buffer is not None
        index = flow.stream_index(stream)
        try:
            for user in self._users(buffer):
                flow.retire.use_on(user, index)
            notes_of(buffer).add_user(index)
            flow.pool.device.copy_out(memoryview(host), buffer.address, stream)
            return Away(host, stream.record())
        except BaseException:
            host.free()
            raise

    def _leave(self, one: Movable, away: Away) -> None:
        assert one.buffer is not None
        try:
            one.buffer.free()
        except BaseException:
            away.host.free()
            raise
        one.leave(away)
        self.nbytes += one.nbytes
        self.flow.tally.spills += 1

    def _may_move(self, one: Movable) -> bool:
        # What is being captured can be ordered behind nothing, and what the graph does with it comes later.
        if not one.nbytes or not one.take_over() or one.buffer is None or one.gone:
            return False
        streams = [self.flow.core.stream_objects[user] for user in self._users(one.buffer)]
        return all(stream is None or (stream.lasting and not is_captured(stream)) for stream in streams)

    @staticmethod
    def _users(buffer: Buffer) -> set[int]:
        noted = buffer.notes
        return {buffer.home, *(noted.users if isinstance(noted, Users) else ())}

    # -- who may be next ---------------------------------------------------------------------------------------------

    def pass_on(self, share: Share) -> None:
        """Hear that a lease has ended: its memory makes room where its range was from (with the turn held)."""
        self._idle.pass_on(share, self._open_share(share))

    def _open_share(self, share: Share) -> Share:
        found: Share | None = share
        for one in share.lineage():
            if self.flow.shares.get(one._account) is not one:
                found = one.parent
        return found or self.flow.pool

    def _rest(self, one: Movable) -> None:
        one.share = self._open_share(one.share)
        self._idle.add(one)
        self._look()

    def _stir(self, one: Movable) -> None:
        self._idle.discard(one)
        self.flow.may_spill = len(self._idle) > 0

    def _look(self) -> None:
        self.flow.may_spill = len(self._idle) > 0
        if self.flow.anyone_waits():
            self.flow.changed()

    def _host_has_room(self) -> None:
        self.refused = None
        self._look()

    def look_again(self) -> None:
        """Ask the host again, which may have more memory by now (with the turn held)."""
        self.refused = None

    @staticmethod
    def _note_reader(host: Buffer, stream: Stream) -> None:
        retire = host._core.retire
        assert retire is not None
        notes_of(host).add_user(retire.register(stream))

    @staticmethod
    def _let_go(host: Buffer) -> None:
        with suppress(DeviceError):
            host.free()  # what cannot be freed in order now is freed behind all streams as it is dropped


def _nothing() -> None:
    """Stand for the call of a latch that only opens."""
