"""A queue of work and the one thread that runs it in order: what a host stream is made of.

Positions are counted: the n-th piece of work submitted is complete once `completed` has reached n. So a fence is a
number, recording one costs no trip through the thread, and a lane that never got work never starts a thread.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from asyncmem.devices.notices import call_all
from asyncmem.errors import InvalidRequest


class Lane:
    """Runs callables one after another on its own daemon thread, started by the first one.

    The stream that owns a lane is not known here, so that a forgotten stream can be collected and end its lane.
    """

    def __init__(self, name: str) -> None:
        """Name the thread; it does not start yet."""
        self.name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self._moved = threading.Condition(threading.RLock())
        self._submitted = 0
        self._completed = 0
        self._callbacks: list[tuple[int, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None
        self._stopped = False

    @property
    def position(self) -> int:
        """How many pieces of work have been submitted."""
        return self._submitted

    def reached(self, position: int) -> bool:
        """Tell whether the first `position` pieces of work are complete."""
        return self._completed >= position

    def submit(self, work: Callable[[], None]) -> int:
        """Queue `work`, which must not raise, and return its position.

        Raises:
            InvalidRequest: The lane has been stopped.
        """
        with self._moved:
            if self._stopped:
                raise InvalidRequest("stream", self.name, "a stream whose device is open")
            self._submitted += 1
            self._queue.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
                self._thread.start()
            return self._submitted

    def block(self, position: int, timeout: float | None) -> bool:
        """Wait on this thread until `position` is reached; False when `timeout` seconds passed first."""
        with self._moved:
            return self._moved.wait_for(lambda: self.reached(position), timeout)

    def notify(self, position: int, callback: Callable[[], None]) -> None:
        """Call back once, now if `position` is reached, else on the lane's thread."""
        with self._moved:
            if not self.reached(position):
                self._callbacks.append((position, callback))
                return
        callback()

    def forget(self, position: int, callback: Callable[[], None]) -> None:
        """Drop a callback that has not run."""
        with self._moved:
            if (position, callback) in self._callbacks:
                self._callbacks.remove((position, callback))

    def stop(self) -> None:
        """Take no more work; the thread ends after what is queued."""
        with self._moved:
            if not self._stopped:
                self._stopped = True
                self._queue.put(None)

    def join(self) -> None:
        """Wait for the thread of a stopped lane to end (blocks), unless this is that thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            # Not kept while the thread idles: it may hold the last reference to an array, or to the stream itself.
            del work
            call_all(self._complete_one())

    def _complete_one(self) -> list[Callable[[], None]]:
        with self._moved:
            self._completed += 1
            due = [callback for position, callback in self._callbacks if self.reached(position)]
            if due:
                self._callbacks = [entry for entry in self._callbacks if not self.reached(entry[0])]
            self._moved.notify_all()
        return due
