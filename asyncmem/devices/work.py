"""Fences of a lane, and work whose value or error can be asked for."""

import warnings
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from asyncmem.devices.awaiting import wait_until_done
from asyncmem.devices.base import Fence
from asyncmem.devices.lane import Lane
from asyncmem.errors import AsyncmemWarning

T = TypeVar("T")


class LaneFence(Fence):
    """The point behind the first `position` pieces of work of a lane."""

    def __init__(self, lane: Lane, position: int) -> None:
        """Take a position that has been submitted."""
        self.lane = lane
        self.position = position

    def done(self) -> bool:
        """Tell whether the lane has come this far."""
        return self.lane.reached(self.position)

    def block(self, timeout: float | None = None) -> bool:
        """Wait on this thread; False when `timeout` seconds passed first."""
        return self.done() or self.lane.block(self.position, timeout)

    def notify(self, callback: Callable[[], None]) -> None:
        """Call back once: now, or on the lane's thread."""
        self.lane.notify(self.position, callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        self.lane.forget(self.position, callback)


class Work(LaneFence, Generic[T]):
    """A fence behind one call that a stream runs, and what came of the call.

    As a fence it is only a point in the stream: `block()` and another stream's `wait()` do not mind an error, which is
    for whoever awaits the work or asks for its `result()`.
    """

    def __init__(self, lane: Lane, call: Callable[[], T]) -> None:
        """Use `HostStream.run` instead."""
        super().__init__(lane, 0)
        self._call: Callable[[], T] | None = call
        self._values: list[T] = []
        self._unseen = False
        self.error: BaseException | None = None

    def submit(self) -> None:
        """Queue the call."""
        self.position = self.lane.submit(self._run)

    def result(self, timeout: float | None = None) -> T:
        """Wait on this thread (**blocks**) and return the call's value or raise its error.

        Raises:
            TimeoutError: `timeout` seconds passed first; the call goes on.
        """
        if not self.block(timeout):
            raise TimeoutError(f"the stream has not come to this work within {timeout} s")
        return self._outcome()

    def __await__(self) -> Generator[object, object, T]:
        """Wait for the call and return its value or raise its error. Cancelling the wait does not stop the call."""
        yield from wait_until_done(self)
        return self._outcome()

    def _outcome(self) -> T:
        if self.error is not None:
            self._unseen = False
            raise self.error
        return self._values[0]

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._values.append(call())
        except BaseException as error:  # noqa: BLE001  # it belongs to whoever asked for the call, not to this thread
            # Without this frame, which would tie the error, its traceback and this object into a cycle.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
            self._unseen = True
        finally:
            del call  # the error's frames know this one as their caller, and would keep the arguments

    def __del__(self) -> None:
        if self._unseen:
            warnings.warn(f"work on a stream failed and nobody asked: {self.error!r}", AsyncmemWarning, stacklevel=1)
