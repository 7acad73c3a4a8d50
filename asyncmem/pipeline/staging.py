"""Data of the host on its way to a device: arrays, how their bytes are copied, and batches of them."""

from __future__ import annotations

import array
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np

from asyncmem.arrays import Layout, element_type
from asyncmem.errors import InvalidRequest
from asyncmem.exchange import asarray
from asyncmem.pipeline.resources import BlockingRequests, BorrowedStreams, pool_of
from asyncmem.pipeline.trees import map_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from asyncmem.core import Buffer, Ready
    from asyncmem.devices import Stream
    from asyncmem.pipeline.resources import Workers
    from asyncmem.pool import AsyncMemoryPool, Budget, Copy, Request


# DLPack's device types of memory that the host reads: plain, and page-locked by CUDA or ROCm.
_HOST: Final = (1, 3, 11)

# Text, objects, records and dates: no device has such elements.
_FOREIGN_KINDS: Final = "OSUVMm"


@dataclass(frozen=True, slots=True)
class HostArray:
    """An array of the host, in row-major order; its bytes keep their owner alive."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] | str
    data: memoryview


def host_array(leaf: object) -> HostArray | None:
    """Return what a leaf is an array of, or a copy of it in row-major order where it lies otherwise.

    Returns:
        None for what is no array of the host, or has elements that no device has.

    Raises:
        InvalidRequest: It has elements in swapped byte order, or such as numpy cannot put in order either.
        BufferError: Its owner does not give it away.
    """
    if isinstance(leaf, np.ndarray):
        return _of_numpy(leaf)
    if isinstance(leaf, bytearray | memoryview | array.array):
        return _of_numpy(np.asarray(memoryview(leaf)))
    if not _is_on_host(leaf):
        return None
    try:
        plain = np.from_dlpack(leaf)  # type: ignore[arg-type]  # it speaks DLPack
    except (BufferError, RuntimeError, TypeError, ValueError):
        found = asarray(leaf)  # it knows more kinds of elements, and says what is wrong
        return HostArray(found.shape, found.dtype, memoryview(found.buffer)[: found.nbytes])
    return _of_numpy(plain)


def _of_numpy(found: np.ndarray[Any, Any]) -> HostArray | None:
    try:
        element_type(found.dtype)
    except InvalidRequest:
        if found.dtype.kind in _FOREIGN_KINDS:
            return None
        raise
    plain = np.asarray(found)
    in_rows = plain if plain.flags.c_contiguous else plain.copy(order="C")
    return HostArray(plain.shape, plain.dtype, in_rows.reshape(-1).view(np.uint8).data)


def _is_on_host(leaf: object) -> bool:
    place = getattr(leaf, "__dlpack_device__", None)
    return place is not None and not isinstance(leaf, type) and place()[0] in _HOST


Piece: TypeAlias = tuple[int, memoryview]
"""Bytes of the host, and where in a buffer they belong."""

AT_ONCE: Final = 4 << 20
"""Bytes that one thread reads before it looks for more: long beside a call, short beside a batch that many read."""


def copying_blocks(pool: AsyncMemoryPool, pieces: Sequence[Piece]) -> bool:
    """Return whether copying these to the device blocks the caller, because they are not page-locked."""
    return any(pool.device.copy_holds_up(source, into=True) for _, source in pieces)


def copy_pieces(target: Buffer, pieces: Sequence[Piece]) -> list[Copy]:
    """Start copying pieces to where they belong, each by the buffer's home stream."""
    # A piece is bytes, and so is the part of the buffer that it goes to.
    return [target._copy(source.nbytes, source, None, True, offset) for offset, source in pieces]


def copy_staged(staging: Buffer, target: Buffer, pieces: Sequence[Piece], workers: Workers) -> Copy:
    """Read pieces into a page-locked buffer of the target's size (blocks), and start one copy of the whole.

    The staging buffer is freed; its memory follows when the copy is done.

    Args:
        staging: The page-locked buffer.
        target: Where the pieces belong.
        pieces: What is read.
        workers: Does the reading together, in parts.
    """
    try:
        whole = staging.view("uint8").numpy(np.uint8)
        workers.run_parts([partial(_read, whole, part) for part in parts_of(pieces)])
        del whole  # an export, which would hold the staging buffer
        return target.copy_from(staging)
    finally:
        staging.free()


def parts_of(pieces: Iterable[Piece], nbytes: int = AT_ONCE) -> Iterator[list[Piece]]:
    """Go through pieces in parts of about so many bytes: long pieces are cut, and short ones come together."""
    part: list[Piece] = []
    length = 0
    for offset, source in pieces:
        for at in range(0, source.nbytes, nbytes):
            cut = source[at : at + nbytes]
            part.append((offset + at, cut))
            length += cut.nbytes
            if length >= nbytes:
                yield part
                part, length = [], 0
    if part:
        yield part


def _read(whole: np.ndarray[Any, np.dtype[np.uint8]], part: Sequence[Piece]) -> None:
    for offset, source in part:
        # By numpy, which lets go of the interpreter meanwhile.
        np.copyto(whole[offset : offset + source.nbytes], np.asarray(source))


@final
class CopyStream:
    """A stream that does nothing but copy batches, one after another.

    Attributes:
        stream: The stream.
        copies: The copies of its latest batch.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.copies: list[Copy] = []

    def wait(self) -> None:
        """Wait until the batch before is there (blocks), so that a consumer that runs ahead of the device is held up.

        Else all that the device has not come to would be kept on the host.
        """
        for copy in self.copies:
            copy.block()


@final
class CopyStreams:
    """Streams that take turns with the batches.

    Each batch has one to itself while it is on its way and while the next ones are: a wait for the home of a
    batch's memory then waits for that batch, and for none of those that were read ahead of it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._copiers: list[CopyStream] = []

    def of(self, pool: AsyncMemoryPool, number: int) -> CopyStream:
        """Return the copy stream of the batch with a number."""
        with self._lock:
            if not self._copiers:
                self._streams = BorrowedStreams(pool)
                self._copiers = [CopyStream(self._streams.stream("prefetch")) for _ in range(self._count)]
            return self._copiers[number % self._count]


@final
class Staging:
    """How the batches of one iteration get to the device."""

    def __init__(
        self,
        share: AsyncMemoryPool | Budget,
        copiers: CopyStreams,
        *,
        pinned: bool,
        timeout: float | None,
        tag: str | None,
    ) -> None:
        self.pool = pool_of(share)
        self.pinned = pinned
        self.tag = tag
        self.requests = BlockingRequests()
        self._share = share
        self._copiers = copiers
        self._timeout = timeout

    def begin(self, item: object, number: int) -> StagedBatch:
        """Take an item in, and wait on this thread (blocks) for its memory."""
        batch = StagedBatch(self, self._copiers.of(self.pool, number), item)
        batch.buffer = self.requests.wait(self._ask(batch))
        return batch

    async def begin_async(self, item: object, number: int) -> StagedBatch:
        """Take an item in, and wait for its memory. Cancelled: it has none."""
        batch = StagedBatch(self, self._copiers.of(self.pool, number), item)
        batch.buffer = await self._ask(batch)
        return batch

    def _ask(self, batch: StagedBatch) -> Ready[Buffer] | Request[Buffer]:
        stream, nbytes = batch.copier.stream, batch.layout.nbytes
        return self._share.allocate_async(nbytes, stream=stream, tag=self.tag, timeout=self._timeout)


@final
class StagedBatch:
    """One batch: its arrays lie in one buffer, one behind the other.

    Attributes:
        copier: What copies it.
        layout: Where the arrays lie.
        buffer: Their memory.
        tree: The batch as the loader had it, with arrays of the device once it is finished.
    """

    def __init__(self, staging: Staging, copier: CopyStream, item: object) -> None:
        self.copier = copier
        self._staging = staging
        self._sources: list[HostArray] = []
        self.tree = map_leaves(item, self._take_out)
        self.layout = Layout.of((source.shape, source.dtype) for source in self._sources)
        self.buffer: Buffer | None = None

    def finish(self, workers: Workers) -> None:
        """Start copying all arrays, for which those that are not page-locked are read by the workers (blocks)."""
        buffer = self.buffer
        assert buffer is not None
        self.copier.wait()
        sources, self._sources = self._sources, []
        pieces = [(place.offset, one.data) for place, one in zip(self.layout.placements, sources, strict=True)]
        pool = self._staging.pool
        if self._staging.pinned and copying_blocks(pool, pieces):
            request = pool.pinned.allocate_async(buffer.nbytes, stream=buffer.stream, tag=self._staging.tag)
            copies = [copy_staged(self._staging.requests.wait(request), buffer, pieces, workers)]
        else:
            copies = copy_pieces(buffer, pieces)
        self.copier.copies = copies
        for copy in copies:
            if not copy.ordered:
                copy.block()
        arrays = iter(self.layout.over(buffer))
        self.tree = map_leaves(self.tree, lambda leaf: next(arrays) if leaf is _TAKEN else leaf)

    def free(self) -> None:
        """Give the memory back; twice is fine."""
        if self.buffer is not None:
            self.buffer.free()

    def _take_out(self, leaf: object) -> object:
        source = host_array(leaf)
        if source is None:
            return leaf
        self._sources.append(source)
        return _TAKEN


_TAKEN = object()
