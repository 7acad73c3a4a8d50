"""Carrying out the scheduler's effects on the device: all that may take longer than an event loop can wait.

Each handler makes the calls of one effect, on the worker's thread or on that of a synchronous caller, and tells the
scheduler what became of it. An error of the device goes to the request that the effect was for; without one it is a
warning.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncmem.core import Kind
from asyncmem.devices import MemoryInfo
from asyncmem.devices.base import Remapped
from asyncmem.errors import AsyncmemError, DeviceError, OutOfMemoryError
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.pool.alarm import alarm
from asyncmem.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from asyncmem.core import Batch, Buffer, Effect, Request
    from asyncmem.devices import Segment
    from asyncmem.devices.base import Span
    from asyncmem.pool.ports import Opened

_RETRIES: Final = 16
"""How often `on_oom` may ask for another try of one request."""

_FRESH: Final = 0.01
"""For how many seconds the device need not be asked again what it has free, while that is plenty: others may come."""

_PLENTY: Final = 8
"""What is plenty: so many times `min_free`, and so many times what is wanted, stay free."""

_taken: Final = Counter[str]()
"""The bytes that the pools of this process have ever taken, by the device's name."""

_counting: Final = threading.Lock()  # over it


class Executor:
    """Carries out effects for one pool.

    Attributes:
        segments: What the device has given and not taken back, by address; several where it has failed to take one back
            and given the address again, the oldest first.
        memory: What the device had free when it was last asked, less what pools of this process have taken since, as of
            the last growth.
        clock: Tells how long the device's calls take.
        own: What a thread carries out by itself, because it has asked for it; by thread.
        returns: What the worker is to give back, unless another thread does so before.
    """

    def __init__(self, opened: Opened) -> None:
        self.clock: Callable[[], float] = time.perf_counter
        self._pool = opened
        self._core = opened.core
        self._device = opened.device
        self._retire = opened.retire
        self.segments: dict[int, tuple[Segment, ...]] = {}
        self._books = threading.Lock()  # over these
        self.spaces: dict[int, Span] = {}
        self.memory = MemoryInfo(free=self._device.capacity, total=self._device.capacity)
        self._answer = float("-inf"), 0  # when the device was last asked, and what it had free and pools had ever taken
        self._name: str = getattr(self._device, "owner", self._device).name  # whose memory it is
        self.asked: Counter[str] = Counter()
        self._making = threading.Lock()
        self._quiet: int | None = None
        self._unfinished: list[partial[None]] = []  # ends of effects whose memory could not be made ready
        self.own: dict[int, deque[Effect]] = {}
        self.returns: deque[Effect] = deque()
        self._elsewhere: int | None = None  # what others held of the device, when that was looked at last,
        self._least_elsewhere = self.memory.total  # and at least

    def run(self, effect: Effect) -> None:
        """Carry out an effect (blocks), and what follows. A request whose caller waits fails with any error."""
        try:
            getattr(self, f"_{effect.kind}")(effect)
        except DeviceError as error:
            self._failed(effect, error)
        except BaseException as error:
            if not effect.by_caller:
                raise
            self._core.fail(effect.request, error)  # raised again where the request is waited for
        finally:
            self._core.carry_out()

    def trim(self, keep: int) -> int:
        """Give back all that is free but `keep` bytes (blocks); return the bytes.

        Raises:
            DeviceError: The device did not take all of it.
        """
        self._finish_rest()
        before = self.given()
        self._ask_and_run(partial(self._core.scheduler.trim, keep))
        return before - self.given()

    def given(self) -> int:
        """Return the bytes that the device has given and not taken back; some of them may be reserved no more."""
        if self.spaces:
            return sum(handle.nbytes for handle in self._core.handles())
        with self._books:
            return sum(one.nbytes for segments in self.segments.values() for one in segments)

    def others_need(self) -> bool:
        """Look whether others need what is idle here: little is left, or they have come to hold more (blocks).

        What others hold is what neither is free nor was given to this pool. They have come where that is more than half
        of `min_free` above the least that it was, both seen twice: it changes while memory comes and goes.
        """
        given = self._core.reserved() if self.spaces else self.given()
        if given <= self._core.live():
            return False
        free = self._ask()
        now, before = self.memory.total - free - given, self._elsewhere
        self._elsewhere = now
        if before is not None:
            self._least_elsewhere = min(self._least_elsewhere, max(now, before))
        came = before is not None and min(now, before) > self._least_elsewhere + self._pool.min_free // 2
        return came or free < self._pool.min_free

    def grow_ahead(self) -> None:
        """Get what is to be ready ahead of need (blocks).

        Raises:
            OutOfMemoryError: The device has too little.
            DeviceError: The device failed.
        """
        before = -1
        while self._pool.closed is None and before != self._core.reserved():
            before = self._core.reserved()
            self._ask_and_run(self._core.scheduler.grow_ahead)

    def _ask_and_run(self, ask: Callable[[float], None]) -> None:
        """Ask the scheduler for something, and carry it out on this thread, with what is to go back anyway."""
        me = threading.get_ident()
        outer = self.own.get(me)
        own: deque[Effect] = deque()
        self.own[me] = own
        errors: list[DeviceError] = []
        try:
            ask(self._core.time)
            self._core.carry_out()
            while (effect := _first(own) or _first(self.returns)) is not None:
                try:
                    getattr(self, f"_{effect.kind}")(effect)
                except DeviceError as error:
                    errors.append(error)
                self._core.carry_out()
        finally:
            del self.own[me]
            if outer is not None:
                self.own[me] = outer
            for effect in own:  # after an interrupt
                self._pool.worker.submit(partial(self.run, effect))
        if errors:
            raise errors.pop()

    def give_back_next(self) -> None:
        """Give back what has waited longest for it (blocks)."""
        effect = _first(self.returns)
        if effect is not None:
            self.run(effect)

    def quiet(self) -> int:
        """Return the number of a stream that is given no work, whose memory is ready for every stream once it comes."""
        with self._making:
            if self._quiet is None:
                self._quiet = self._retire.register(self._device.create_stream("quiet"))
            return self._quiet

    # -- segments ------------------------------------------------------------------------------------------------------

    def _grow(self, effect: Effect) -> None:
        started = self.clock()
        scheduler = self._core.scheduler
        try:
            if effect.joins:
                segments, stream = self._join(effect)
            else:
                if effect.returns:
                    with suppress(DeviceError):  # what the device does not take is offered again
                        self._trim(effect)
                stream = self._fit_stream(effect.stream)
                segments = self._take(effect.need, effect.nbytes, stream)
        except BaseException:
            scheduler.grow_failed(effect.job, self._core.time)
            raise
        if not segments:
            scheduler.grow_failed(effect.job, self._core.time, out_of_memory=effect.need > 0)
            return
        if self._device.checker is not None:
            for one in segments:
                self._device.checker.open_segment(one.address, one.nbytes)
        self._finish(partial(self._grew, effect, segments, stream, started))

    def _grew(self, effect: Effect, segments: Sequence[Segment], stream: int, started: float) -> None:
        self._make_ready([(one.address, one.nbytes) for one in segments], stream)
        seconds = self.clock() - started
        for one in segments:
            self._core.note(Kind.GREW, 0, one.nbytes, one.address, seconds)  # before anything is had from it
        first, *rest = segments
        self._core.scheduler.grew(
            effect.job, first.address, first.nbytes, stream, self._core.time,
            ready=stream == self._quiet, seconds=seconds, rest=rest[0].address if rest else 0,
        )  # fmt: skip
        if self._pool.captures.open and stream != self._quiet:  # opened meanwhile
            with suppress(DeviceError):
                self._retire.fence(stream)

    def _fit_stream(self, number: int) -> int:
        # What is asked in the order of a captured stream becomes a part of the graph, and the legacy default stream,
        # which cannot even be asked then, draws others' captures in. A mere handle may mean another stream by now, and
        # no other thread can submit to a thread's default stream. In a block any stream may be captured before long.
        stream, in_block = self._retire.streams[number], self._pool.captures.open
        try:
            fit = stream is not None and stream.lasting and not (in_block or stream.of_one_thread or stream.capturing())
        except DeviceError:
            fit = False
        return number if fit else self.quiet()

    def _take(self, need: int, wanted: int, stream: int) -> list[Segment]:
        # Returns as much as is wanted, else as is needed; nothing where the device has less.
        self._finish_rest()
        with self._spare(need, wanted) as granted:
            spare = granted
            for nbytes in sorted({wanted, need}, reverse=True):
                if need <= nbytes <= spare:
                    with suppress(OutOfMemoryError):
                        return [self._allocate(nbytes, stream)]
                    spare = min(spare, self._ask() - self._pool.min_free)
        return []

    def _allocate(self, nbytes: int, stream: int) -> Segment:
        kind = self._pool.options.segments
        segment = self._device.allocate_segment(nbytes, kind, self._retire.streams[stream])
        with self._books:
            self.segments[segment.address] = (*self.segments.get(segment.address, ()), segment)
        self._count(segment.nbytes)
        return segment

    def _join(self, effect: Effect) -> tuple[list[Segment], int]:
        """Have segments side by side as one, or as two: the device joins what goes back in one stream's order."""
        gone = 0
        try:
            stream = self._fit_stream(effect.stream)
            on = self._retire.streams[stream]
            if on is not None and stream == effect.stream:
                for address, nbytes, _ in effect.returns:
                    self._give_back(address, nbytes, partial(self._device.free_segment_behind, stream=on))
                    gone += 1
        finally:
            self._core.scheduler.trimmed(effect.job, gone, self._core.time)
        if gone:
            with suppress(OutOfMemoryError):
                first = self._allocate(effect.nbytes, stream)
                return [first, *self._take_rest(effect.rest, first, stream)], stream
            return [], stream
        return self._take(effect.need, effect.need, stream) if effect.need else [], stream

    def _take_rest(self, nbytes: int, first: Segment, stream: int) -> list[Segment]:
        # Where the device does not give it, it keeps it for what comes next.
        try:
            return [self._allocate(nbytes, stream)] if nbytes else []
        except (DeviceError, OutOfMemoryError):
            return []
        except BaseException:
            self._give_back(first.address, first.nbytes, self._device.free_segment)
            raise

    @contextmanager
    def _spare(self, need: int, wanted: int) -> Iterator[int]:
        """Yield the bytes that may be had, which are this pool's until the block ends."""
        # What others have taken meanwhile counts as much as the limit: some of the device stays free for them.
        quota = self._pool.quota
        with nullcontext(wanted) if quota is None else quota(need, wanted) as granted:
            yield min(granted, self._free(wanted) - self._pool.min_free)

    def _free(self, wanted: int) -> int:
        """Return the bytes that the device has free. It is asked unless the last answer is fresh and leaves plenty."""
        asked, free = self._answer
        free -= _taken[self._name]
        plenty = _PLENTY * max(self._pool.min_free, wanted)
        if self._device.now - asked >= _FRESH or free - wanted < plenty:
            return self._ask()
        self.memory = MemoryInfo(free=free, total=self.memory.total)
        return free

    def _ask(self) -> int:
        now, taken = self._device.now, _taken[self._name]  # what is taken meanwhile may not be in the answer
        self.memory = memory = self._device.memory()
        self._answer = now, memory.free + taken
        return memory.free

    def _count(self, nbytes: int) -> None:
        with _counting:
            _taken[self._name] += nbytes

    def _make_ready(self, spans: Sequence[Span], number: int) -> None:
        """Set memory to zero where that is wanted; what is had on the quiet stream is ready for all then."""
        stream = self._retire.streams[number] or self._device.default_stream
        if self._pool.options.zero_segments and self._pool.closed is None:  # else nobody gets it any more
            for address, nbytes in spans:
                self._device.fill(address, nbytes, 0, stream)
        if number == self._quiet:
            stream.record().block()

    def _trim(self, effect: Effect) -> None:
        given = 0
        try:
            for address, nbytes, uses in effect.returns:
                self._retire.settle(uses)
                self._give_back(address, nbytes, self._device.free_segment)
                given += 1
        finally:
            self._core.scheduler.trimmed(effect.job, given, self._core.time)

    def _give_back(self, address: int, nbytes: int, free: Callable[[Segment], None]) -> None:
        started = self.clock()
        if self._device.checker is not None:
            self._device.checker.close_segment(address)
        # Out of the book first, as another thread may be given its address at once.
        with self._books:
            segment, *others = self.segments.pop(address)
            if others:
                self.segments[address] = tuple(others)
        try:
            free(segment)
        except BaseException:
            with self._books:
                self.segments[address] = (segment, *self.segments.get(address, ()))
            raise
        self._core.note(Kind.TRIMMED, 0, nbytes, address, self.clock() - started)

    def _finish(self, end: partial[None]) -> None:
        """Make new memory ready and tell of it. Where that fails, nobody gets it before it has been tried again."""
        try:
            end()
        except BaseException:
            self._unfinished.append(end)
            self._pool.worker.submit(self.finish)
            raise

    def finish(self) -> None:
        """Try once more to make memory ready where that has failed (blocks)."""
        with suppress(DeviceError):
            self._finish_rest()
        self._core.carry_out()

    def _finish_rest(self) -> None:
        while self._unfinished:
            end = self._unfinished.pop()
            try:
                end()
            except BaseException:
                self._unfinished.append(end)
                raise

    # -- pages ---------------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """Reserve a range of addresses for each of the heap's two arenas.

        Raises:
            OutOfMemoryError: The device has not so many addresses.
            DeviceError: The device failed. Nothing is left in either case.
        """
        try:
            for arena in (0, 1):
                address = self._device.reserve(nbytes)
                self.spaces[self._core.add_space(address, nbytes, arena, self._device.page)] = address, nbytes
        except BaseException:
            self.unreserve()
            raise

    def unreserve(self) -> None:
        """Give the ranges back, if nothing is mapped there.

        Raises:
            DeviceError: The device did not take one back; it and the rest are left for the next time.
        """
        for number, (address, nbytes) in list(self.spaces.items()):
            self._device.unreserve(address, nbytes)
            self._core.remove_space(number)
            del self.spaces[number]

    def _remap(self, effect: Effect) -> None:
        with ExitStack() as room:
            self._remap_within(effect, room)

    def _remap_within(self, effect: Effect, room: ExitStack) -> None:
        started = self.clock()
        done, out_of_memory = Remapped(0, 0, 0), True
        try:
            self._finish_rest()
            if effect.nbytes and room.enter_context(self._spare(effect.need, effect.nbytes)) < effect.nbytes:
                return
            done = self._device.remap(effect.out, effect.into, effect.moves)
            self._count(sum(nbytes for _, nbytes in effect.into[: done.mapped]))
            # No request fails for what is ahead of need: it is tried again without.
            more = done.error is not None and effect.need < effect.nbytes
            out_of_memory = more or isinstance(done.error, OutOfMemoryError)
            if isinstance(done.error, OutOfMemoryError):
                self._ask()  # for the error
        finally:
            self._finish(partial(self._remapped, effect, done, out_of_memory, self.clock() - started))
        # What was only not given back is the device's to try again.
        try:
            whole = len(effect.moves) + len(effect.out) + len(effect.into)
            less = done.moved + done.unmapped + done.mapped < whole
            if isinstance(done.error, DeviceError) and less and not out_of_memory:
                raise done.error
        finally:
            del done  # whose error would keep the frame that keeps it

    def _remapped(self, effect: Effect, done: Remapped, out_of_memory: bool, seconds: float) -> None:
        fresh = effect.into[: done.mapped]
        if fresh and self._pool.options.zero_segments:
            self._make_ready(fresh, self.quiet())
        change = sum(nbytes for _, nbytes in fresh) - sum(
            nbytes for _, nbytes in effect.out[effect.vacated : done.unmapped]
        )
        if change:
            self._core.note(Kind.GREW if change > 0 else Kind.TRIMMED, 0, abs(change), 0, seconds)
        self._core.scheduler.remapped(
            effect.job,
            done.moved,
            done.unmapped,
            done.mapped,
            self._core.time,
            out_of_memory=out_of_memory,
            seconds=seconds,
        )

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self, effect: Effect) -> None:
        seen = False
        timeout = None if effect.seconds == float("inf") else max(0.0, effect.seconds)
        try:
            seen = self._retire.settle(effect.uses, timeout)
        finally:
            self._core.scheduler.waited(effect.job, seen, self._core.time)

    def _settle(self, effect: Effect) -> None:
        try:
            self._pool.captures.settle()
        finally:
            self._core.scheduler.waited(effect.job, True, self._core.time)

    # -- other memory --------------------------------------------------------------------------------------------------

    def _spill(self, effect: Effect) -> None:
        try:
            self._pool.spilling.move_out(effect)
        finally:
            self._core.scheduler.ended(effect.job, self._core.time)

    def _serve_from_host(self, effect: Effect) -> None:
        request, ending = self._core.request(effect.request), "done"
        try:
            if request is not None:
                request._elsewhere = self._on_host(request)
                self._pool.cpu_fallbacks += len(request._sizes)
                ending = "served"
        except AsyncmemError as error:  # the host has too little, too
            self._core.fail(effect.request, error)
        finally:
            self._core.scheduler.ended(effect.job, self._core.time, ending)

    def _on_host(self, request: Request[Any]) -> Buffer | Batch:
        memory, sizes = self._pool.host_pool("on the host"), request._sizes
        if not request._is_batch:
            return memory.allocate(sizes[0], tag=request.tag)
        batch = memory.allocate_batch(sizes, tag=request.tag)
        batch.block()
        return batch.result()

    def _last_resort(self, effect: Effect) -> None:
        """Collect garbage and ask the user, whose errors are the request's."""
        scheduler, options = self._core.scheduler, self._pool.options
        again = False
        tries = effect.level - options.collect
        try:
            again = effect.level == 0 and self._pool.spilling.look_again()  # what could not move before may be able to
            if tries < 0:
                self.asked["collect"] += 1
                gc.collect()
                again = True
            elif not again and options.on_oom is not None and tries < _RETRIES:
                self.asked["ask"] += 1
                facts = self._pool.facts_of(effect.request)
                again = facts is not None and self._ask_user(options.on_oom, facts)
        except BaseException as error:  # noqa: BLE001  # the request fails with it
            self._core.fail(effect.request, error)
        finally:
            scheduler.ended(effect.job, self._core.time, "retry" if again else "refused")

    def _ask_user(self, on_oom: Callable[[OutOfMemoryFacts], object], facts: OutOfMemoryFacts) -> bool:
        """Return whether the user's function has freed something; what waits for memory is refused inside."""
        me = threading.get_ident()
        inside = me in self._core.serving
        self._core.serving.add(me)
        try:
            return bool(on_oom(facts))
        finally:
            if not inside:
                self._core.serving.discard(me)

    # -- what goes wrong, and what is told ---------------------------------------------------------------------------

    def _failed(self, effect: Effect, error: DeviceError) -> None:
        # A capture only puts off what the host waits to see done: the request waits for its end, and such waits too.
        if effect.kind in {"wait", "trim", "remap"} and error.code == DeviceError.CAPTURE_UNSUPPORTED:
            self._core.scheduler.set_capturing(True)
        elif effect.request:
            self._core.fail(effect.request, error)
        else:
            alarm(f"pool {quoted(self._pool.name)}: {error}", RuntimeWarning)


def _first(effects: deque[Effect]) -> Effect | None:
    try:
        return effects.popleft()
    except IndexError:
        return None
