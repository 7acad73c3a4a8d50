"""The process's own pool for each device, and how to run a program on the fastest loop there is."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from typing import TypeVar

from asyncmem.errors import InvalidRequest
from asyncmem.pool import AsyncMemoryPool
from asyncmem.pool.loops import running_loop
from asyncmem.stats import PoolStats
from asyncmem.text import quoted

T = TypeVar("T")

_devices: dict[str, RuntimeDevice] = {}
_making = threading.Lock()


class RuntimeDevice:
    """A device with the pool that the whole process shares. Made by `asyncmem.device(...)`.

    The pool opens at its first use with the options of the environment, survives the end of an event loop, and is
    closed when the process ends.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: AsyncMemoryPool | None = None

    def __repr__(self) -> str:
        return f"<asyncmem.device {quoted(self._name)}>"

    @property
    def pool(self) -> AsyncMemoryPool:
        """The process's pool on this device; opened here the first time."""
        with _making:
            if self._pool is None:
                self._pool = AsyncMemoryPool(self._name, name=f"runtime {self._name}")
                atexit.register(self._pool.close)
        return self._pool

    def memory_allocated(self) -> int:
        """Return the bytes that buffers hold."""
        return self._stats().allocated_bytes

    def memory_cached(self) -> int:
        """Return the bytes that are reserved and held by no buffer."""
        return self._stats().cached_bytes

    def memory_reserved(self) -> int:
        """Return the bytes taken from the driver."""
        return self._stats().reserved_bytes

    def max_memory_allocated(self) -> int:
        """Return the highest `memory_allocated` since the last reset."""
        return self._stats().peak_allocated

    def max_memory_cached(self) -> int:
        """Return the highest `memory_cached` since the last reset."""
        return self._stats().peak_cached

    def max_memory_reserved(self) -> int:
        """Return the highest `memory_reserved` since the last reset."""
        return self._stats().peak_reserved

    def memory_stats(self) -> dict[str, object]:
        """Return all figures of the pool by their names, those of `PoolStats`."""
        return dict(self._stats().as_dict())

    def memory_summary(self) -> str:
        """Return the figures as text for one screen."""
        return self.pool.summary()

    def empty_cache(self) -> None:
        """Give unused memory back to the driver."""
        self.pool.empty_cache()

    def reset_memory_stats(self) -> None:
        """Start counters and peaks again."""
        self.pool.reset_stats()

    def _stats(self) -> PoolStats:
        return self.pool.stats()


def device(name: str = "auto") -> RuntimeDevice:
    """Return a device by name, the same object each time: "auto", "host", "simulated", "cuda:0".

    Raises:
        BackendUnavailable: At its first use, when it cannot be used here.
    """
    with _making:
        return _devices.setdefault(name, RuntimeDevice(name))


def run(
    main: Callable[[], Coroutine[object, object, T]] | Coroutine[object, object, T], *, debug: bool | None = None
) -> T:
    """Run a program to its end, on uvloop where it is installed, else on asyncio.

    Args:
        main: A coroutine, or a function without arguments that makes one; its result is the answer.
        debug: Whether the loop checks for slow callbacks and forgotten awaits.

    Raises:
        RuntimeError: An event loop runs here already.
    """
    if not (callable(main) or isinstance(main, Coroutine)):
        raise InvalidRequest("main", main, "a coroutine, or a function that makes one")
    if running_loop() is not None:
        if isinstance(main, Coroutine):
            main.close()  # nobody awaits it
        raise RuntimeError("asyncmem.run: an event loop runs here already: `await` the coroutine instead")
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(debug=debug, loop_factory=factory) as runner:
        return runner.run(main if isinstance(main, Coroutine) else main())
