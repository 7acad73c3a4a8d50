"""Buffers: real memory, which goes once neither Python nor work needs it."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from .bridge import method, objc_object

if TYPE_CHECKING:
    from .machine import FakeMetal

# Metal promises no alignment.
_SHIFT = 256


class Memory:
    """What a buffer stands for; counted by its machine while anybody refers to it."""

    def __init__(self, machine: FakeMetal, nbytes: int) -> None:
        self.nbytes = nbytes
        self.used_by = 0
        self._machine = machine
        self._pages = mmap.mmap(-1, nbytes + _SHIFT)
        self.bytes = np.frombuffer(self._pages, np.uint8)[_SHIFT:]
        machine.allocated += nbytes
        self._references = 1

    def retain(self) -> None:
        self._references += 1

    def release(self) -> None:
        self._references -= 1
        if not self._references:
            self._machine.allocated -= self.nbytes


class VarList:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def as_buffer(self, count: int, /) -> memoryview:
        return memoryview(self._memory.bytes.data)[:count]


class MTLBuffer(objc_object):
    def __init__(self, machine: FakeMetal, nbytes: int) -> None:
        super().__init__(machine, new=True)
        self.memory = Memory(machine, nbytes)

    @method
    def contents(self) -> VarList:
        return VarList(self.memory)

    @method
    def length(self) -> int:
        return self.memory.nbytes

    def __del__(self) -> None:
        if self.memory.used_by:
            self.machine.note("a buffer was let go of under work that uses it")
        if not self._extra:  # else somebody still seems to own it, and nobody will ever let go
            self.memory.release()
