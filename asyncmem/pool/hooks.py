"""What the compiled core asks of its pool: all that is rare about a buffer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from asyncmem.core import Users
from asyncmem.errors import InvalidRequest, LeakWarning
from asyncmem.pool.alarm import alarm
from asyncmem.pool.copies import Copy, Part, start
from asyncmem.pool.graph import graph_of, need_uncaptured
from asyncmem.pool.holdings import current_owner
from asyncmem.pool.home import running_home
from asyncmem.pool.notes import Notes, notes_of
from asyncmem.pool.pins import Pin
from asyncmem.pool.share import Share
from asyncmem.units import format_size

if TYPE_CHECKING:
    from asyncmem.core import Buffer


class Hooks(Share):
    """The pool's side of the core's hooks. Called with the interpreter's lock and no other."""

    fallback_of: weakref.ref[Share] | None = None
    """The pool that this one stands in for, on the host; None for most."""

    def _signal(self, flags: int) -> None:
        flow = self._flow
        if flow is not None:
            flow.notice(flags)

    def _entered(self, buffer: Buffer) -> None:
        notes = notes_of(buffer)
        if notes.owner is None:
            with self.flow.turn:
                notes.hold(self.flow.share_of(buffer), current_owner(running_home(self.flow.home)), _place(buffer))

    def _left(self, buffer: Buffer) -> None:
        """Hear that a block ends; the buffer is freed next, which ends the hold."""

    def _free_noted(self, buffer: Buffer, stream: object) -> None:
        flow = self.flow
        notes = buffer.notes
        users = set(notes.users) if isinstance(notes, Users) else set()
        if stream is not None:
            users.add(flow.stream_index(stream))
        users.discard(buffer.home)
        checker = flow.core.device.checker
        if checker is not None and buffer.nbytes:
            checker.close_block(buffer._address)
        graph = graph_of(buffer)
        if graph is not None and not graph.released:
            graph.keep(buffer, users)
        else:
            if graph is not None:  # it was launched nobody knows where
                users.add(flow.retire.everywhere())
            buffer._release(flow.retire.entries_for(users, buffer.nbytes) if users else ())
        if isinstance(notes, Notes) and notes.owner is not None:
            flow.turn.post(notes.let_go)
        if flow.supply.direct:
            flow.turn.post(flow.upkeep.give_back_soon)

    def _use_on(self, buffer: Buffer, stream: object) -> None:
        flow = self.flow
        index = flow.retire.everywhere() if stream is None else flow.stream_index(stream)
        if stream is not None and index != buffer.home:
            self._need_uncaptured(buffer.home, index)
            flow.retire.use_on(buffer.home, index)
        if index != buffer.home:
            notes_of(buffer).add_user(index)

    def _lend(self, buffer: Buffer, stream: int | None) -> None:
        """Order another library's use: on the stream of that number, or on streams that it does not name."""
        retire = self.flow.retire
        index = None if stream is None else self.flow.stream_index(stream)
        if index == buffer.home:
            return
        if index is not None:
            self._need_uncaptured(buffer.home, index)
            retire.use_on(buffer.home, index)
            known = retire.streams[index]
            # Who consumes an export may end its stream before it lets go: then nothing can be asked of the mere number.
            index = index if known is None or known.lasting else None
        notes_of(buffer).add_user(retire.everywhere() if index is None else index)

    def _hand_over(self, buffer: Buffer, stream: object) -> None:
        if buffer._block:
            index = self.flow.stream_index(stream)
            if index != buffer.home:
                self._need_uncaptured(buffer.home, index)
                self.flow.retire.hand_over(buffer._block, index)
                buffer._set_home(index)

    def _need_uncaptured(self, home: int, other: int) -> None:
        streams = self._core.stream_objects
        need_uncaptured(streams[home])
        need_uncaptured(streams[other], named=True)

    def _copy(self, buffer: Buffer, nbytes: int, other: object, stream: object, into: bool, offset: int) -> Copy:
        return start(self.flow, Part(buffer, nbytes, offset), other, stream, into=into)

    def _pin(self, buffer: Buffer) -> Pin:
        return Pin(self.flow.pins, buffer)

    def _forgotten(self, buffer: Buffer) -> None:
        site = buffer.notes.site if isinstance(buffer.notes, Notes) else None
        tag = f" tagged {buffer.tag!r}" if buffer.tag else ""
        alarm(
            f"a buffer of {format_size(buffer.nbytes)}{tag} was dropped and never freed; it was made at {site}",
            LeakWarning,
        )

    async def _to_device(self, buffer: Buffer) -> Buffer:
        """Copy a buffer that was placed on the host to the device it was asked for, and free the host's."""
        wanted = self.fallback_of() if self.fallback_of is not None else None
        if wanted is None:
            raise InvalidRequest("to_device()", buffer, 'a buffer that fallback="host" placed on the host')
        moved = await wanted.allocate_async(buffer.nbytes, tag=buffer.tag)
        await moved.copy_from(memoryview(buffer))
        buffer.free()
        return moved


def _place(buffer: Buffer) -> tuple[int, int]:
    return buffer.address, buffer.size
