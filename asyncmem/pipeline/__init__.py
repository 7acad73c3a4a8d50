"""Feed a device: buffers that are filled while it works, and loaders that are read ahead of it."""

from asyncmem.pipeline.double_buffer import DoubleBuffer
from asyncmem.pipeline.passes import AsyncBatches, Batches
from asyncmem.pipeline.prefetch import Prefetched, Prefetcher
from asyncmem.pipeline.transfer import Transfer

__all__ = ["AsyncBatches", "Batches", "DoubleBuffer", "Prefetched", "Prefetcher", "Transfer"]
