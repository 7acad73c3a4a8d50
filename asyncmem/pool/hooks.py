"""What the compiled core asks of its pool: all that is rare about a buffer or a request."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from asyncmem.core import Batch, Users
from asyncmem.errors import InvalidRequest, LeakWarning
from asyncmem.pool.alarm import alarm_at, caller_site
from asyncmem.pool.copies import Copy, Part
from asyncmem.pool.graph import graph_of, need_uncaptured
from asyncmem.pool.loops import running_loop
from asyncmem.pool.notes import Notes, notes_of
from asyncmem.pool.owners import named_owner
from asyncmem.pool.pins import Pin
from asyncmem.pool.share import Share
from asyncmem.units import format_size

if TYPE_CHECKING:
    from collections.abc import Generator

    from asyncmem.core import Buffer, Request
    from asyncmem.pool.graph import Captured
    from asyncmem.pool.loops import EventLoop


class CoreHooks(Share):
    """The pool's side of the core. Called with the interpreter's lock and no other."""

    _fallback_of: weakref.ref[Share] | None = None
    """The pool that this one stands in for, on the host; None for most."""

    # -- requests ------------------------------------------------------------------------------------------------------

    def _failure(self, request: Request[Any], reason: str, cause: str, level: int, ahead: int) -> Exception:
        return self._opened.failures.of(request, reason, cause, level, ahead)

    def _bind(self, request: Request[Any]) -> None:
        self._opened.bind(request)

    def _wait(self, request: Request[Any]) -> Generator[Any, Any, None]:
        return self._opened.wait(request)

    def _serve(self, request: Request[Any]) -> None:
        self._opened.serve(request)

    def _block(self, request: Request[Any], timeout: float | None) -> None:
        self._opened.block(request, timeout)

    def _on_loop(self) -> bool:
        return self._opened.on_loop()

    def _loop_here(self) -> EventLoop | None:
        return running_loop(self._opened.core.loop)

    def _claims(self) -> list[tuple[int, int, int]]:
        return self._opened.claims()

    def _stream_index(self, stream: object) -> int:
        return self._opened.stream_index(stream)

    def _call_site(self) -> str:
        return caller_site()

    def _capture(self, stream: int) -> Captured:
        return self._opened.captures.admit(stream)

    def _quiet_stream(self) -> int:
        return self._opened.executor.quiet()

    def _reuse(self, request: Request[Any]) -> bool:
        """Serve a request of captured work from what the same capture has freed; return whether there was some."""
        capture = request._capture
        assert capture is not None
        return capture.graph.serve(request, capture)

    def _elsewhere(self, request: Request[Any]) -> Buffer | Batch:
        """Return what the host has given for a request."""
        found: Buffer | Batch = self._opened.executor.elsewhere.pop(id(request))  # type: ignore[assignment]
        return found

    def _note(self, request: Request[Any], found: Buffer | Batch) -> None:
        """Note what there is to note on a buffer that was granted."""
        capture = request._capture
        for buffer in found if isinstance(found, Batch) else [found]:
            if request._site is not None:
                notes_of(buffer).site = request._site
            if capture is not None:
                capture.graph.own(buffer, capture.home)
            self._note_plain(buffer, request._holder)

    def _holder(self) -> int | None:
        """Return the number of who runs here, where `pool.owner(...)` has named it."""
        name = named_owner.get()
        if name is None:
            return None
        self._core.label(name)
        return self._core.owner()

    def _note_plain(self, buffer: Buffer, holder: int | None) -> None:
        checker = self._opened.device.checker
        if holder is not None:
            buffer._hold(holder)
        if checker is not None and buffer.nbytes:
            notes_of(buffer).checked = True
            checker.open_block(buffer.address, buffer.nbytes)

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _free_noted(self, buffer: Buffer, stream: object) -> None:
        opened = self._opened
        notes = buffer.notes
        users = set(notes.users) if isinstance(notes, Users) else set()
        if stream is not None:
            users.add(opened.stream_index(stream))
        users.discard(buffer.home)
        if isinstance(notes, Notes) and notes.checked and opened.device.checker is not None:
            opened.device.checker.close_block(buffer._address)
        graph = graph_of(buffer)
        if graph is not None and not graph.released:
            graph.keep(buffer, users)
            return
        if graph is not None:  # it was launched nobody knows where
            users.add(opened.retire.everywhere())
        buffer._release(opened.retire.entries_for(users, buffer.nbytes) if users else ())

    def _use_on(self, buffer: Buffer, stream: object) -> None:
        opened = self._opened
        index = opened.retire.everywhere() if stream is None else opened.stream_index(stream)
        if stream is not None and index != buffer.home:
            self._need_uncaptured(buffer.home, index)
            opened.retire.use_on(buffer.home, index)
        if index != buffer.home:
            notes_of(buffer).add_user(index)

    def _lend(self, buffer: Buffer, stream: int | None) -> None:
        """Order another library's use: on the stream of that number, or on streams that it does not name."""
        retire = self._opened.retire
        index = None if stream is None else self._opened.stream_index(stream)
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
            index = self._opened.stream_index(stream)
            if index != buffer.home:
                self._need_uncaptured(buffer.home, index)
                self._opened.retire.hand_over(buffer._block, index)
                buffer._set_home(index)

    def _need_uncaptured(self, home: int, other: int) -> None:
        streams = self._core.stream_objects
        need_uncaptured(streams[home])
        need_uncaptured(streams[other], named=True)

    def _copy(self, buffer: Buffer, nbytes: int, other: object, stream: object, into: bool, offset: int) -> Copy:
        copy: Copy = self._opened.copies.start(Part(buffer, nbytes, offset), other, stream, into=into)
        return copy

    def _pin(self, buffer: Buffer) -> Pin:
        return Pin(self._opened.pins, buffer)

    def _forgotten(self, buffer: Buffer) -> None:
        site = buffer.notes.site if isinstance(buffer.notes, Notes) else None
        tag = f" tagged {buffer.tag!r}" if buffer.tag else ""
        text = f"a buffer of {format_size(buffer.nbytes)}{tag} was dropped and never freed; it was made at {site}"
        alarm_at(text, LeakWarning, site or ":0")

    async def _to_device(self, buffer: Buffer) -> Buffer:
        """Copy a buffer that was placed on the host to the device it was asked for, and free the host's."""
        wanted = self._fallback_of() if self._fallback_of is not None else None
        if wanted is None:
            raise InvalidRequest("to_device()", buffer, 'a buffer that fallback="host" placed on the host')
        moved = await wanted.allocate_async(buffer.nbytes, tag=buffer.tag)
        await moved.copy_from(memoryview(buffer))
        buffer.free()
        return moved
