"""The awaitable that an allocation returns when it has to wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, final

from asyncmem.core import Ticket
from asyncmem.errors import BufferReleased, InvalidRequest, RequestCancelled
from asyncmem.pool.alarm import report
from asyncmem.pool.blocking import ThreadSleeper

if TYPE_CHECKING:
    from types import TracebackType

    from asyncmem.core import Batch, Buffer
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.waiting import Waiting

T = TypeVar("T", bound="Buffer | Batch")


@final
class Request(Ticket[T], Coroutine[Any, Any, T], Generic[T]):
    """An allocation under way: await it, or use it with ``async with``.

    It has started when it is made. It is a coroutine to `asyncio.create_task`, `gather`, `wait_for`, task groups and
    trio alike, and it may be awaited more than once: every await and `result` give the same buffer.

    Ownership: until the first hand-out the request owns the memory; afterwards it only knows it, weakly. A request
    that is dropped before gives back its memory, or its place in the queue.

    Cancellation: cancelling the task that awaits it means that nothing happened, also when the grant had just come.
    `cancel` ends the request itself; whoever awaits it gets `RequestCancelled`.
    """

    __slots__ = ("_driver", "_entered")

    if TYPE_CHECKING:
        _flow: Flow
        _waiting: Waiting
        _handed: weakref.ref[T] | None
        _driver: Generator[Any, Any, T]

    def __repr__(self) -> str:
        waiting = self._waiting
        state = "waiting" if not waiting.done else "failed" if waiting.error is not None else "granted"
        return f"<asyncmem.Request of {waiting.nbytes} bytes: {state}>"

    def done(self) -> bool:
        """Say whether it has been granted or has failed."""
        return self._waiting.done

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread (blocks) for its end; False when `timeout` seconds passed first, and it goes on.

        For threads that want to wait as a task does, until another one calls `cancel`. It never blocks beyond the
        request's own deadline.
        """
        waiting = self._waiting
        sleeper = ThreadSleeper()
        bounds = [bound for bound in (timeout, waiting.remaining) if bound is not None]
        if waiting.admit(sleeper):
            sleeper.sleep(min(bounds, default=None))
        if waiting.overdue:
            waiting.expire()
        return waiting.done

    def cancelled(self) -> bool:
        """Say whether it ended by `cancel`."""
        return isinstance(self._waiting.error, RequestCancelled)

    def result(self) -> T:
        """Answer the buffer, or raise the error, of a request that is done.

        Raises:
            InvalidRequest: It is not done.
            BufferReleased: Its buffer was handed out before and is gone.
        """
        waiting = self._waiting
        if not waiting.done:
            raise InvalidRequest("result()", self, "a request that is done; await it, or test done() first")
        if waiting.error is not None:
            raise waiting.error
        if self._handed is None:
            found = cast("T", waiting.result)
            waiting.result = None
            self._handed = weakref.ref(found)
            return found
        known = self._handed()
        if known is None:
            raise BufferReleased(waiting.nbytes, tag=waiting.tag, action="result()")
        return known

    def cancel(self) -> bool:
        """End a request that is not done: it gives its place back, and awaiting it raises `RequestCancelled`.

        Returns:
            Whether it did; False for a request that was done already, whose buffer stays valid.
        """
        with self._flow.turn:
            if self._waiting.done:
                return False
            self._flow.withdraw(self._waiting, None)
        return True

    def add_done_callback(self, callback: Callable[[Request[T]], object]) -> None:
        """Have `callback` called with this request once it is done: on the loop's thread where it was made on one.

        An error that it raises is reported by `sys.unraisablehook`, as nobody is there to handle it.
        """
        if not self._waiting.when_done(partial(_call, callback, self)):
            callback(self)

    def _wait(self) -> Generator[Any, Any, T]:
        # Every await that is not plain: see `Ticket.__await__`.
        waiting = self._waiting
        if not waiting.done:
            try:
                home = self._flow.bind(waiting)
            except InvalidRequest as refused:
                with self._flow.turn:
                    self._flow.withdraw(waiting, refused)
            else:
                waiting.awaited += 1
                try:
                    yield from home.park(waiting)
                finally:
                    waiting.awaited -= 1
        elif self._polite:
            yield from self._flow.yield_once(waiting)
        return self.result()

    def send(self, value: Any) -> Any:  # noqa: ANN401 -- the coroutine protocol carries the loop's own values
        """Drive it as a coroutine: for event loops."""
        return self._driven().send(value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 -- the coroutine protocol has two signatures
        """Raise inside it as a coroutine: for event loops."""
        if not hasattr(self, "_driver"):  # cancelled before its task began: the body never ran, which would clean up
            self.cancel()
        return self._driven().throw(*error)

    def close(self) -> None:
        """End it as a coroutine: for event loops."""
        if hasattr(self, "_driver"):
            self._driver.close()
        self.cancel()

    def _driven(self) -> Generator[Any, Any, T]:
        if not hasattr(self, "_driver"):
            self._driver = self.__await__()
        return self._driver

    async def __aenter__(self) -> T:
        """Wait for the memory and hold it until the block ends; the current task counts as its owner."""
        self._entered = await self
        await self._entered.__aenter__()
        return self._entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free what the block held."""
        found = self._entered
        del self._entered
        await found.__aexit__(kind, error, trace)


def _call(callback: Callable[[Request[T]], object], request: Request[T]) -> None:
    try:
        callback(request)
    except Exception as error:  # noqa: BLE001 -- others are woken after it
        report(error)
