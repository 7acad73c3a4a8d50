"""Kernels that need no compiler: the driver reads their text."""

from typing import Any, Final, Protocol

from asyncmem.cli.benchmarks.peers.driver import Driver

NOTHING: Final = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry nothing() { ret; }
\0"""
"""A kernel that ends at once, as text that every driver and every card from compute capability 7.5 on takes."""


class Launches(Protocol):
    """What a ticker does each time besides being resumed."""

    def __call__(self) -> None: ...


def launch_nothing() -> None:
    """Stand in for a launch on a device that has no kernels."""


class EmptyLaunch:
    """Launches an empty kernel on a stream of its own and records a fence behind it, on a card.

    Args:
        index: The device's number. Its primary context becomes current on this thread.
    """

    def __init__(self, index: int) -> None:
        self._driver = driver = Driver(index)
        calls = driver.calls
        self._module = driver.checked(calls.cuModuleLoadData(NOTHING))
        self._kernel = driver.checked(calls.cuModuleGetFunction(self._module, b"nothing"))
        self._stream = driver.checked(calls.cuStreamCreate(1))
        self._fence = driver.checked(calls.cuEventCreate(2))
        self._launch: Any = calls.cuLaunchKernel
        self._record: Any = calls.cuEventRecord

    def __call__(self) -> None:
        """Launch and record; neither waits."""
        self._driver.checked(self._launch(self._kernel, 1, 1, 1, 1, 1, 1, 0, self._stream, 0, 0))
        self._driver.checked(self._record(self._fence, self._stream))

    def close(self) -> None:
        """Wait for the last launch and give everything back (blocks)."""
        driver, calls = self._driver, self._driver.calls
        driver.synchronize()
        driver.checked(calls.cuEventDestroy(self._fence))
        driver.checked(calls.cuStreamDestroy(self._stream))
        driver.checked(calls.cuModuleUnload(self._module))
        driver.close()
