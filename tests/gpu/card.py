"""The card under test: kernels that wait, write and compare, and what the host sees of them.

All in words of four bytes. Launches go to the driver as they are, past asyncmem, as those of any other library do.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from asyncmem import AsyncMemoryPool, Buffer

WORD = 4
# Long against any test, short against the test run's own limit: a kernel that nobody lets go ends by itself.
PATIENCE_NS = 8 * 10**9

PoolMaker = Callable[..., AsyncMemoryPool]


def call(answer: tuple[Any, ...]) -> Any:
    """Return a driver call's results; anything but success is an error."""
    code, *rest = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver answered {code!r}")
    return rest[0] if len(rest) == 1 else tuple(rest)


class Number:
    """A number in the host's memory that kernels read and add to."""

    def __init__(self) -> None:
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._host = call(driver.cuMemHostAlloc(WORD, flags))
        self.address = int(call(driver.cuMemHostGetDevicePointer(self._host, 0)))
        self._cell = ctypes.c_uint32.from_address(self._host)
        self._cell.value = 0

    @property
    def value(self) -> int:
        """What it is now."""
        return self._cell.value

    def set(self, value: int) -> None:
        """Change it; kernels that run see that."""
        self._cell.value = value

    def free(self) -> None:
        """Give the memory back."""
        call(driver.cuMemFreeHost(self._host))


class Card:
    """One GPU, with its primary context current on this thread."""

    def __init__(self, index: int = 0) -> None:
        from asyncmem.devices import Cuda

        self.device = Cuda(index)
        self._ordinal = call(driver.cuDeviceGet(index))
        self._context = call(driver.cuDevicePrimaryCtxRetain(self._ordinal))
        self.enter()
        module = call(driver.cuModuleLoadData(Path(__file__).with_name("kernels.ptx").read_bytes() + b"\0"))
        names = ("hold", "fill", "count_others")
        self._kernels = {name: call(driver.cuModuleGetFunction(module, name.encode())) for name in names}
        self._numbers: list[Number] = []
        self._gates: list[Number] = []

    def enter(self) -> None:
        """Make the context current on this thread."""
        call(driver.cuCtxSetCurrent(self._context))

    def number(self) -> Number:
        """A number of the host's, 0 at first."""
        number = Number()
        self._numbers.append(number)
        return number

    def gate(self) -> Number:
        """A number that kernels wait for; it is opened at the latest when the test ends."""
        gate = self.number()
        self._gates.append(gate)
        return gate

    @contextmanager
    def opening(self, gate: Number, after: float) -> Iterator[None]:
        """Open a gate by another thread so many seconds from now, and be done with it at the block's end."""
        timer = threading.Timer(after, gate.set, (1,))
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def hold(self, stream: int, gate: Number, *, limit: int = PATIENCE_NS) -> None:
        """Submit a kernel that runs until the gate is open, or for `limit` nanoseconds."""
        types = (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        self._launch("hold", 1, 1, stream, (gate.address, 1, limit), types)

    def fill(self, stream: int, buffer: Buffer, value: int) -> None:
        """Submit a kernel that writes `value` to all of a buffer."""
        self.write(stream, buffer.address, buffer.nbytes // WORD, value)

    def write(self, stream: int, address: int, words: int, value: int) -> None:
        """Submit a kernel that writes `value` to so many words, whosever they are."""
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        self._launch("fill", 128, 256, stream, (address, words, value), types)

    def compare(self, stream: int, buffer: Buffer, value: int, found: Number) -> None:
        """Submit a kernel that counts in `found` the words of a buffer that are not `value`."""
        self.compare_words(stream, buffer.address, buffer.nbytes // WORD, value, found)

    def compare_words(self, stream: int, address: int, words: int, value: int, found: Number) -> None:
        """Submit a kernel that counts in `found` which of so many words are not `value`, whosever they are."""
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint64)
        self._launch("count_others", 128, 256, stream, (address, words, value, found.address), types)

    def _launch(self, name: str, grid: int, block: int, stream: int, values: tuple[int, ...], types: Any) -> None:
        parameters = (values, types)
        call(driver.cuLaunchKernel(self._kernels[name], grid, 1, 1, block, 1, 1, 0, stream, parameters, 0))

    def idle(self, stream: int) -> bool:
        """Tell whether everything submitted to a stream is complete."""
        (code,) = driver.cuStreamQuery(stream)
        if code not in {driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY}:
            raise RuntimeError(f"the driver answered {code!r}")
        return bool(code == driver.CUresult.CUDA_SUCCESS)

    def synchronize(self) -> None:
        """Wait until the card has nothing to do."""
        call(driver.cuCtxSynchronize())

    def clean_up(self) -> None:
        """Open all gates, wait for the card, and give back what a test took."""
        for gate in self._gates:
            gate.set(2**32 - 1)
        self.synchronize()
        for number in self._numbers:
            number.free()
        self._numbers.clear()
        self._gates.clear()

    def close(self) -> None:
        """Be done with the card."""
        self.clean_up()
        self.device.close()
        call(driver.cuDevicePrimaryCtxRelease(self._ordinal))
