"""Memory that moves to the host and back: which, when, and in the order of which streams.

Under pressure the buffers that were used the longest ago go first, as many as a request needs: any where the pool is
full, those of a budget or of a lease where only that is. The scheduler decides for which request, from the bytes that
may move in each share; the worker moves them. Each buffer is copied to page-locked memory on a stream of the pool's
own, behind all uses that it has had, and freed behind that copy. Only the streams wait for the copy that come
after it: the memory serves the request at once.

An interrupt could end the notes on all this half-way, and with the lock held: so it comes after them
(`uninterruptible`).

Coming back is a request like any other. A use keeps its memory on the device, so two that move each other out take
turns.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING

from asyncmem.core import Buffer
from asyncmem.errors import DeviceError, InvalidRequest, OutOfMemoryError, PoolClosed, PoolTimeout
from asyncmem.pool.graph import graph_of, is_captured
from asyncmem.pool.handles import HostCopy, Movable, Using
from asyncmem.pool.latch import Latch
from asyncmem.pool.worker import uninterruptible
from asyncmem.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncmem.core import Effect
    from asyncmem.devices import Stream
    from asyncmem.pool.ports import AnyShare, Opened

    After = list[Callable[[], object]]


class Spilling:
    """What of one pool may move to the host. Attributes change under the pool's lock only.

    Attributes:
        opened: The pool.
        nbytes: Bytes that are on the host now, as they were asked for.
        spills: How often memory has moved to the host.
        returns: How often it has come back.
        timeouts: How often it could not be used in time because another use did not bring it back.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.nbytes = self.spills = self.returns = self.timeouts = 0
        self._idle: dict[Movable, None] = {}  # on the device and in no use, used the longest ago first
        self._refused: dict[Movable, None] = {}  # of these, what could not move when it was tried
        self._bound: dict[int, list[Movable]] = {}  # what is about to move, for each effect that is under way
        self._following: dict[Using, None] = {}  # uses that wait for another one to bring the memory back
        self._making = threading.Lock()
        self._stream: Stream | None = None

    @contextmanager
    def _locked(self) -> Iterator[After]:
        """Hold the pool's lock; what is put into the list is called after it, because it may lead to anything."""
        after: After = []
        try:
            with self.opened.lock:
                yield after
        finally:
            for call in after:
                call()
            self.opened.core.carry_out()

    # -- marking -----------------------------------------------------------------------------------------------------

    def movable(self, buffer: Buffer) -> Movable:
        """Return a record of a buffer, which `mark` takes over.

        Raises:
            InvalidRequest: It is no buffer that could move.
            BufferReleased: It has been freed.
        """
        if not isinstance(buffer, Buffer):
            raise InvalidRequest("buffer", buffer, "a buffer")
        _ = buffer.address  # a freed one says so
        opened = self.opened
        if buffer._core is not opened.core or (buffer.nbytes and not buffer._block):
            raise InvalidRequest("buffer", buffer, f"a buffer of pool {quoted(opened.name)}")
        share = opened.share_at(buffer._account)
        if share._laid_out or graph_of(buffer) is not None:
            expected = "memory that may lie anywhere, not where a plan or a captured graph has it"
            raise InvalidRequest("buffer", buffer, expected)
        if not buffer.stream.lasting:
            expected = "a buffer whose home stream is kept alive"
            raise InvalidRequest("buffer", buffer, expected, hint="name streams by their objects, not by numbers")
        return Movable(buffer, share)

    @uninterruptible
    def mark(self, one: Movable) -> None:
        """Take a buffer over from the caller, for a handle.

        Raises:
            InvalidRequest: It is pinned or exported.
        """
        buffer = one.buffer
        one.take_over()
        if buffer is None or buffer.alive:
            raise InvalidRequest("buffer", buffer, "a buffer that is neither pinned nor exported")
        assert one.buffer is not None
        one.buffer._let_go()  # its owner holds it no more: it may go without that owner now
        with self._locked():
            self._enter_idle(one)

    @uninterruptible
    def end(self, one: Movable, stream: object = None) -> None:
        """Free both sides."""
        with self._locked() as after:
            buffer = self._end(one, after)
        if buffer is not None:
            buffer.free(stream)

    @uninterruptible
    def drop(self, one: Movable) -> bool:
        """Free both sides of a handle that was dropped; return False if the lock is held, for finalizers."""
        if not self.opened.lock.acquire(blocking=False):
            return False
        after: After = []
        try:
            buffer = self._end(one, after)
        finally:
            self.opened.lock.release()
        for call in after:
            call()
        del buffer  # it frees itself, behind all streams if there is no other fence
        return True

    def _end(self, one: Movable, after: After) -> Buffer | None:
        buffer, host_copy = one.buffer, one.host_copy
        if buffer is not None:
            one.buffer = None
            self._leave_idle(one)
            self._unbind(one, after)
        if host_copy is not None:
            one.host_copy = None
            self.nbytes -= one.nbytes
            after.append(lambda: self._let_go(host_copy.host))
            self._try_again()
        return buffer

    def idle_bytes(self) -> int:
        """Return the bytes of what is on the device and in no use."""
        with self.opened.lock:
            return sum(one.size for one in self._idle)

    # -- using -------------------------------------------------------------------------------------------------------

    @uninterruptible
    def begin(self, use: Using, *, patient: bool) -> Latch[None] | None:
        """Begin a use, if it is on the device. Whatever comes of it, `end_use` ends it.

        Returns:
            What to wait for before asking again; or None: it has begun, or the caller `fetches` it.
        """
        one = use.one
        with self._locked() as after:
            self._following.pop(use, None)
            one.need()
            if one.moving is not None:
                return one.moving
            if one.buffer is not None:
                self._leave_idle(one)
                use.buffer = one.begin(use.owner)
                return None
            one.share = self._open_share(one.share)
            if one.fetching is None:
                one.fetching, one.patient = Latch(), patient
                use.fetches = True
                return None
            if patient and one.patient:
                self._following[use] = None
                core = self.opened.core
                after.append(lambda: core.scheduler.note_claim(core.time))
            return one.fetching

    def claims(self) -> list[tuple[int, int, int]]:
        """Return the owner, bytes and account of each use that waits for another one to bring the memory back."""
        with self.opened.lock:
            return [(use.owner, use.one.size, use.one.share._account) for use in self._following]

    @uninterruptible
    def bring_back(self, use: Using, buffer: Buffer) -> None:
        """Copy the bytes to a buffer that was granted for them, and begin the use.

        Raises:
            BufferReleased: It has been freed meanwhile.
            DeviceError: The device refuses. The bytes are where they were, as far as the device still has them.
        """
        device, one = self.opened.device, use.one
        with self._locked() as after:
            try:
                one.need()
                host_copy, home = one.host_copy, buffer.stream
                assert host_copy is not None
                home.wait(host_copy.fence)
                host_copy.host._noted().add_user(host_copy.host._core.stream_number(home))
                device.copy_in(buffer.address, memoryview(host_copy.host), home)
                arriving = home.record() if device.host_readable else None
            except BaseException:
                after.append(buffer.free)
                raise
            one.moved_in(buffer, arriving)
            after.append(lambda: self._let_go(host_copy.host))
            self.nbytes -= one.nbytes
            self.returns += 1
            self._try_again()
            use.buffer = one.begin(use.owner)
            self._fetched(use, after)

    def _fetched(self, use: Using, after: After) -> None:
        """Wake the uses that wait for this one to bring the memory back."""
        one = use.one
        if use.fetches and one.fetching is not None:
            after.append(one.fetching)
            one.fetching = None
        use.fetches = False

    @uninterruptible
    def end_use(self, use: Using) -> None:
        """End a use, however far it has come; twice is fine."""
        with self._locked() as after:
            if not use.over:
                use.over = True
                self._following.pop(use, None)
                self._fetched(use, after)
                if use.buffer is not None:
                    use.buffer = None
                    self._leave_use(use.one, use.owner)

    @uninterruptible
    def leave(self, one: Movable, owner: int) -> None:
        """End a use of an owner."""
        with self._locked():
            self._leave_use(one, owner)

    def _leave_use(self, one: Movable, owner: int) -> None:
        if one.end(owner):  # the last one: it may move again
            self._enter_idle(one)

    def need_in_time(self, one: Movable, fetched: Latch[None], timeout: float | None) -> None:
        """Raise `PoolTimeout`, and count it, where it was not brought home in time."""
        opened = self.opened
        if timeout is not None and not fetched.done:
            with opened.lock:
                self.timeouts += 1
            raise PoolTimeout(pool=opened.name, asked=one.nbytes, timeout=timeout, free=opened.core.counts().free)

    # -- moving out --------------------------------------------------------------------------------------------------

    @uninterruptible
    def bind(self, effect: Effect) -> None:
        """Bind what is to move, so that later uses of it come behind the request that it moves for.

        Does not block, for finalizers: where the lock is held, `move_out` does it.
        """
        if self.opened.lock.acquire(blocking=False):
            try:
                self._bound[effect.job] = self._choose(effect.account, effect.nbytes)
            finally:
                self.opened.lock.release()

    def move_out(self, effect: Effect) -> None:
        """Move a share's oldest to the host, as many as hold so many bytes together, for a request (blocks).

        Raises:
            DeviceError: The device refuses; the buffer is where it was.
        """
        with self._locked():
            bound = self._bound.pop(effect.job, None)
            if bound is None:
                bound = self._choose(effect.account, effect.nbytes)
        try:
            for one in bound:
                request = self.opened.core.request(effect.request)
                if request is None or request.done() or not self._move(one):
                    return
        finally:
            with self._locked() as after:
                for one in bound:
                    self._unbind(one, after)

    def _choose(self, account: int, needed: int) -> list[Movable]:
        """Bind a share's oldest that hold so many bytes together, none where all hold less."""
        found: list[Movable] = []
        share = self.opened.shares.get(account)
        for one in self._idle:
            if needed <= 0:
                break
            if share not in one.makes_room:
                continue
            if self._may_move(one):
                found.append(one)
                needed -= one.size
            else:
                self._refuse(one)
        if needed > 0:
            return []
        for one in found:
            self._uncount(one)
            one.moving = Latch()
        return found

    @uninterruptible
    def unbind_all(self) -> None:
        """Unbind all that were to move, because no worker may be left to move them."""
        with self._locked() as after:
            for one in self._idle:
                self._unbind(one, after)

    def _unbind(self, one: Movable, after: After) -> None:
        if one.moving is not None:
            after.append(one.moving)
            one.moving = None
            self._count(one)

    def _move(self, one: Movable) -> bool:
        stream = self._own_stream()
        host = self._host_memory(one, stream)
        if host is None:
            return False
        with self._locked() as after:
            if not one.bound or not self._may_move(one):  # freed meanwhile, or captured
                after.append(host.free)
                return True
            host_copy = self._copy_out(one, host, stream)
        # Memory that the host may touch whatever streams do goes to others once the copy is over.
        over = not self.opened.device.host_readable
        try:
            over = over or host_copy.fence.block()
        finally:
            with self._locked() as after:
                if over and one.bound:
                    self._moved_out(one, host_copy, after)
                else:
                    after.append(host.free)
        return True

    def _own_stream(self) -> Stream:
        with self._making:
            if self._stream is None:
                self._stream = self.opened.device.create_stream("spill")
            return self._stream

    def _host_memory(self, one: Movable, stream: Stream) -> Buffer | None:
        try:
            return self.opened.host_pool("spilled").allocate(one.nbytes, stream=stream, tag=one.tag)
        except (OutOfMemoryError, PoolClosed, InvalidRequest):
            with self._locked():  # nor can what is as large
                for other in self._idle:
                    if other.size >= one.size:
                        self._refuse(other)
            return None

    def _copy_out(self, one: Movable, host: Buffer, stream: Stream) -> HostCopy:
        opened, buffer = self.opened, one.buffer
        assert buffer is not None
        index = opened.core.stream_number(stream)
        try:
            for user in self._users(buffer):
                opened.retire.use_on(user, index)
            buffer._noted().add_user(index)
            opened.device.copy_out(memoryview(host), buffer.address, stream)
            return HostCopy(host, stream.record())
        except BaseException:
            host.free()
            raise

    def _moved_out(self, one: Movable, host_copy: HostCopy, after: After) -> None:
        assert one.buffer is not None
        after.append(one.buffer.free)
        self._leave_idle(one)
        one.moved_out(host_copy)
        self.nbytes += one.nbytes
        self.spills += 1

    def _may_move(self, one: Movable) -> bool:
        # What is being captured can be ordered behind nothing, and what the graph does with it comes later.
        if not one.nbytes or not one.take_over() or one.buffer is None or one.freed:
            return False
        streams = [self.opened.core.stream_objects[user] for user in self._users(one.buffer)]
        return all(stream is None or (stream.lasting and not is_captured(stream)) for stream in streams)

    @staticmethod
    def _users(buffer: Buffer) -> set[int]:
        notes = buffer._notes
        return {buffer._home, *(() if notes is None else notes.users)}

    # -- who may be next ---------------------------------------------------------------------------------------------

    def move_to_parent(self, share: AnyShare) -> None:
        """Count the memory of a lease that has ended in the share that its range was from."""
        if self._idle:  # what comes from now on finds that the lease has ended
            self._move_to_parent(share)

    @uninterruptible
    def _move_to_parent(self, share: AnyShare) -> None:
        with self._locked():
            for one in self._idle:
                if one.share is share and one.makes_room:
                    self._uncount(one)
                    self._count(one)

    @uninterruptible
    def look_again(self) -> bool:
        """Try what could not move before: the host may have more memory by now. Return whether there is any."""
        if not self._refused:
            return False
        with self._locked():
            self._try_again()
            return any(one.makes_room for one in self._idle)

    def _open_share(self, share: AnyShare) -> AnyShare:
        found: AnyShare | None = share
        for one in share._lineage():
            if self.opened.shares.get(one._account) is not one:
                found = one._parent
        return found or self.opened.pool

    def _enter_idle(self, one: Movable) -> None:
        self._idle[one] = None
        self._count(one)

    def _leave_idle(self, one: Movable) -> None:
        self._uncount(one)
        self._idle.pop(one, None)
        self._refused.pop(one, None)

    def _refuse(self, one: Movable) -> None:
        self._uncount(one)
        self._refused[one] = None

    def _try_again(self) -> None:
        refused, self._refused = self._refused, {}
        for one in refused:
            self._count(one)

    def _count(self, one: Movable) -> None:
        """Count it where it would make room: in its own share and those around it, up to the end of a range."""
        if one not in self._idle or one in self._refused or one.moving is not None or one.freed:
            return
        if not self.opened.options.spill_limit or not one.size:
            self._refused[one] = None
            return
        one.share = share = self._open_share(one.share)
        one.makes_room = tuple(takewhile(lambda outer: outer._arena == share._arena, share._lineage()))
        self._report(one, one.size)

    def _uncount(self, one: Movable) -> None:
        self._report(one, -one.size)
        one.makes_room = ()

    def _report(self, one: Movable, nbytes: int) -> None:
        core, shares = self.opened.core, self.opened.shares
        for share in one.makes_room:
            if shares.get(share._account) is share:  # else it is closed, and counts nothing any more
                core.scheduler.add_spillable(share._account, nbytes, core.time)

    @staticmethod
    def _let_go(host: Buffer) -> None:
        with suppress(DeviceError):
            host.free()  # what cannot be freed in order now is freed behind all streams as it is dropped
