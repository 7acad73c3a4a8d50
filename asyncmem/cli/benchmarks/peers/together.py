"""asyncmem's pool in torch's place: tensors over its buffers, and torch's own program beside it in the same process."""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from asyncmem import AsyncMemoryPool, Buffer
from asyncmem.arrays import dtype_size
from asyncmem.cli.benchmarks.peers.family import index_of
from asyncmem.cli.benchmarks.peers.ours import Ours
from asyncmem.devices import Device, Stream


@dataclass(slots=True)
class Piece:
    """A tensor and the buffer below it; dropping the piece drops both."""

    tensor: Any  # a torch tensor, which has no type where torch is not installed
    buffer: Buffer


class Tensors:
    """Makes tensors in a pool's memory.

    Args:
        torch: The module.
        pool: Where the memory comes from.
        dtype: What the tensors hold, by its name in NumPy and torch alike.
    """

    def __init__(self, torch: ModuleType, pool: AsyncMemoryPool, dtype: str = "float32") -> None:
        self._torch = torch
        self._pool = pool
        self._dtype = dtype
        self._itemsize = dtype_size(dtype)

    def empty(self, shape: tuple[int, int], stream: Stream) -> Piece:
        """Allocate for a stream, which has to be torch's current one."""
        rows, columns = shape
        buffer = self._pool.allocate(rows * columns * self._itemsize, stream=stream)
        return Piece(self._torch.from_dlpack(buffer.view(self._dtype, shape)), buffer)


class Together(Ours):
    """asyncmem and torch in one process."""

    def __init__(self, spec: str | Device) -> None:
        super().__init__(spec)
        self.torch = import_module("torch")
        self.torch.cuda.set_device(index_of(str(spec) if isinstance(spec, str) else spec.name))
        self.torch.cuda.init()
