"""Calling back from fences: one Python thread a device, which sleeps until the native one has news."""

from __future__ import annotations

import itertools
import select
import threading
from typing import TYPE_CHECKING

from asyncmem.devices.notices import call_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncmem.devices.gpu._calls import Fence, Sink, Watcher


class Notices:
    """Callbacks by fence. The thread starts with the first and knows nothing of the device."""

    def __init__(self, name: str, sink: Sink, watcher: Watcher) -> None:
        """Name the thread; it does not start yet."""
        self._name = name
        self._sink = sink
        self._watcher = watcher
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[], None]] = {}
        # Re-entrant: a finalizer may interrupt the holder on the same thread and ask for a fence.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, fence: Fence, callback: Callable[[], None]) -> int:
        """Call back once the fence is reached, or never will be; return a number to drop it by."""
        with self._lock:
            token = next(self._numbers)
            if self._thread is None:
                self._stopping = False
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._thread = thread
            self._waiting[token] = callback
        try:
            self._watcher.watch(fence, self._sink, token)
        except BaseException:
            self._waiting.pop(token, None)
            raise
        return token

    def drop(self, token: int) -> None:
        """Forget a callback that has not run."""
        if self._waiting.pop(token, None) is not None:
            self._watcher.forget(self._sink, token)
            if self._stopping:
                self._sink.wake()

    def stop(self) -> None:
        """Let the thread end once all callbacks have run."""
        self._stopping = True
        self._sink.wake()

    def join(self) -> None:
        """Wait for the thread of stopped notices to end (blocks), unless this is that thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _serve(self) -> None:
        news = select.poll()
        news.register(self._sink.fileno(), select.POLLIN)
        while not self._finished():
            news.poll()
            due = [self._waiting.pop(token, None) for token, _ in self._sink.take()]
            call_all(callback for callback in due if callback is not None)
            # Not kept while the thread sleeps: they may hold the last reference to anything.
            del due

    def _finished(self) -> bool:
        with self._lock:
            if self._stopping and not self._waiting:
                self._thread = None
                return True
            return False
