"""How the memory of an item goes to a neighbour: by memory that both have open, or by NCCL."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import anyio
from anyio.to_thread import run_sync

from asyncmem import share
from asyncmem.arrays import Array
from asyncmem.core import Buffer
from asyncmem.devices import Cuda
from asyncmem.errors import BackendUnavailable, InvalidRequest
from asyncmem.pipeline.stage import granules
from asyncmem.share.exports import export_ahead
from asyncmem.share.items import PLAIN, bytes_of, flatten, leaf_of, row_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from asyncmem.arrays._dlpack import CapsuleType
    from asyncmem.devices import Device, Fence, Stream
    from asyncmem.errors import RankLost
    from asyncmem.pipeline.parallel.link import Sending
    from asyncmem.pool import AsyncMemoryPool
    from asyncmem.ranks.peers import Group
    from asyncmem.share.items import Json, Leaf

T = TypeVar("T")


class Packed(NamedTuple):
    """An item for another process.

    Attributes:
        form: All but the memory, as JSON has it.
        arrays: The memory, in order.
        offsets: Where each array begins among the bytes of all.
        nbytes: The bytes of all, each array from a multiple of 512 on.
    """

    form: Json
    arrays: list[Array]
    offsets: list[int]
    nbytes: int


def pack(item: object) -> Packed:
    """Take an item apart.

    Raises:
        InvalidRequest: It has other parts than buffers, arrays, plain values, and tuples, lists and dicts of them.
    """
    tree, parts = flatten(item)
    arrays: list[Array] = []
    rows: list[Json] = []
    for part in parts:
        leaf = cast("Leaf", leaf_of(part))
        if isinstance(part, Array | Buffer):
            arrays.append(part.view() if isinstance(part, Buffer) else part)
        elif leaf.kind not in PLAIN:
            raise InvalidRequest("item", part, "arrays of a pool, to go to another process")
        else:
            leaf = replace(leaf, inline=bytes(bytes_of(part)))
        rows.append(row_of(leaf))
    *offsets, nbytes = places_of(arrays)
    return Packed([tree, rows], arrays, offsets, nbytes)


def places_of(arrays: Sequence[Array]) -> list[int]:
    """Return where each of them begins among the bytes of all, and where the last one ends."""
    return [0, *accumulate(granules(one.nbytes) for one in arrays)]


Take: TypeAlias = "Callable[[Array, int], None]"
"""Queues the transfer of an array, which has that offset among the bytes of all."""


class Carrier(ABC):
    """Brings the memory of items to one neighbour, and from it, in one run.

    All is made ready while the item is still being made: the less is left to do once it is there.
    """

    @abstractmethod
    async def send(self, packed: Packed, sending: Sending) -> tuple[Json, Fence]:
        """Queue the transfer of an item; return what `fetch` takes, and the fence behind which it may read."""

    @asynccontextmanager
    @abstractmethod
    def fetch(self, descriptor: Json, stream: Stream, *, forward: bool) -> AsyncIterator[Take]:
        """Prepare to receive an item; inside the block, `Take` queues the transfer of each part on the stream."""

    def drop(self) -> None:  # noqa: B027  # one of them has nothing
        """Release items that were sent and not taken."""


class ByShare(Carrier):
    """By memory of `pool.shared`: the sender's stream copies to it, and the receiver's from it."""

    def __init__(self, pid: int, *, same_device: bool) -> None:
        """Send to a process, 0 where its number is not known, and take memory of its device or of the same."""
        self._pid = pid or None
        self._same_device = same_device
        self._exports: list[share.Export] = []

    async def send(self, packed: Packed, sending: Sending) -> tuple[Json, Fence]:
        """Wait for memory to share, copy the item to it, and export that."""
        memory = await sending.pool.shared.allocate_async(packed.nbytes, stream=sending.out)
        try:
            for array, offset in zip(packed.arrays, packed.offsets, strict=True):
                array.copy_to(memory.view(array._element.name, array.shape, offset), stream=sending.out)
            exported = export_ahead(memory, self._pid)
        finally:
            memory.free()
        self._exports.append(exported)
        return exported.descriptor.hex(), sending.out.record()

    @asynccontextmanager
    async def fetch(self, descriptor: Json, stream: Stream, *, forward: bool) -> AsyncIterator[Take]:  # noqa: ARG002  # as its base
        """Open it."""
        home = stream if self._same_device else None
        async with share.attach_async(bytes.fromhex(descriptor), stream=home) as shared:

            def take(target: Array, offset: int) -> None:
                source = shared.buffer.view(target._element.name, target.shape, offset)
                target.copy_from(source, stream=stream)

            yield take

    def drop(self) -> None:
        """Close the exports."""
        while self._exports:
            self._exports.pop().close()


class ByHost(ByShare):
    """By shared memory of the host, where a device has none: each waits for its own copy, so no step runs ahead."""

    async def send(self, packed: Packed, sending: Sending) -> tuple[Json, Fence]:
        """Wait until the item is there and copied to the host, and export that."""
        memory = await sending.pool._host_pool("on the host").shared.allocate_async(packed.nbytes)
        try:
            for array, offset in zip(packed.arrays, packed.offsets, strict=True):
                await array.copy_to(memoryview(memory)[offset : offset + array.nbytes], stream=sending.out)
            self._exports.append(export_ahead(memory, self._pid))
        finally:
            memory.free()
        return self._exports[-1].descriptor.hex(), sending.out.record()

    @asynccontextmanager
    async def fetch(self, descriptor: Json, stream: Stream, *, forward: bool) -> AsyncIterator[Take]:  # noqa: ARG002  # as its base
        """Open it, and keep it until it is copied."""
        copies = []
        async with share.attach_async(bytes.fromhex(descriptor)) as shared:
            content = memoryview(shared.buffer)

            def take(target: Array, offset: int) -> None:
                copies.append(target.copy_from(content[offset : offset + target.nbytes], stream=stream))

            yield take
            for copy in copies:
                await copy


class ByNccl(Carrier):
    """By a communicator of NCCL's for each direction, so that neither waits for the other."""

    def __init__(self, device: Cuda, communicators: dict[bool, Any], other: int) -> None:
        """Use these, by whether they go forward; `other` is the neighbour's number in them."""
        self._device = device
        self._communicators = communicators
        self._other = other

    async def send(self, packed: Packed, sending: Sending) -> tuple[Json, Fence]:
        """Send it from where it is. The neighbour begins once it is there, so that its GPU does not stand by."""
        send = self._communicators[sending.step.forward].send
        with self._device.context.entered():
            for array in packed.arrays:
                if array.nbytes:
                    send(_Bytes(array, sending.out), self._other, stream=sending.out.handle)
        return None, sending.ended

    @asynccontextmanager
    async def fetch(self, descriptor: Json, stream: Stream, *, forward: bool) -> AsyncIterator[Take]:  # noqa: ARG002  # as its base
        """Receive it."""
        receive = self._communicators[forward].recv

        def take(target: Array, offset: int) -> None:  # noqa: ARG001  # parts come one after the other
            if target.nbytes:
                with self._device.context.entered():
                    receive(_Bytes(target, stream), self._other, stream=stream.handle)

        yield take


class _Bytes:
    """Memory as NCCL's bindings take it, by DLPack: bytes, in the order of the stream that works on them.

    They ask for no order, and would have the memory wait for all streams of the device before it is used again.
    """

    def __init__(self, array: Array, stream: Stream) -> None:
        self._bytes = array.buffer.view("uint8", (array.nbytes,), array.offset)
        self._stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._bytes.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **details: Any) -> CapsuleType:  # noqa: ANN401  # it has another; the protocol's
        return self._bytes.__dlpack__(stream=self._stream.handle or 1, **details)


class Nccl:
    """The communicators of a process, by NCCL's own bindings."""

    def __init__(self, wanted: bool | None) -> None:
        """Use it where it is `wanted`; None for where it is installed.

        Raises:
            BackendUnavailable: It is wanted, and not installed.
        """
        self._wanted = wanted
        self._made: dict[int | None, tuple[str, dict[bool, Any]]] = {}  # by neighbour, None for all: their id, and they
        if wanted:
            _core()

    def end(self, pool: AsyncMemoryPool, other: int | None) -> list[Json]:
        """Return what the other end of a link must know.

        That is: the kind of memory that it can share, what names the GPU, whether NCCL can use it, and what there is.
        """
        device, kind = pool.device, _shared_kind(pool)
        if not isinstance(device, Cuda):
            return [kind, None, False, None]
        usable = self._wanted is not False
        if usable:
            try:
                _core()
            except BackendUnavailable:
                usable = False
        return [kind, device.identity, usable, self._made[other][0] if other in self._made else None]

    async def carrier(self, group: Group, other: int, pool: AsyncMemoryPool, ends: Sequence[list[Json]]) -> Carrier:
        """Return how memory goes to a neighbour and from it: by NCCL where both have a GPU of their own.

        Raises:
            BackendUnavailable: NCCL is wanted, and one of them has none.
        """
        if not self._has_own(ends):
            (kind, identity, *_), (other_kind, other_identity, *_) = ends
            carrier = ByShare if kind and kind == other_kind else ByHost
            return carrier(group.pid(other), same_device=identity == other_identity)
        device, me = pool.device, int(group.rank > other)
        assert isinstance(device, Cuda)
        if not self._both_have(other, ends):
            ids = [_new_id(), _new_id()]
            if me == 0:
                group.send(other, "nccl", ids)
            else:
                ids = await group.receive(other, "nccl")
            async with pool.allocate_async(1) as scratch:
                call = partial(_connect_both, device, ids, me, scratch.view())
                self._made[other] = ids[0], await _unless_one_fails(group, call)
        return ByNccl(device, self._made[other][1], 1 - me)

    async def add(self, group: Group, device: Device, arrays: Sequence[Array], ends: Sequence[list[Json]]) -> None:
        """Queue sums on the arrays' home streams.

        Raises:
            BackendUnavailable: NCCL cannot be used.
        """
        if not self._has_own(ends) or not isinstance(device, Cuda):
            raise BackendUnavailable("NCCL", tried=_TRIED, install=_INSTALL)
        if not self._both_have(None, ends):
            unique_id = _new_id()
            if group.rank == 0:
                group.send(None, "nccl", unique_id)
            else:
                unique_id = await group.receive(0, "nccl")
            call = partial(_connect, device, unique_id, group.rank, group.size)
            self._made[None] = unique_id, {True: await _unless_one_fails(group, call)}
        await _unless_one_fails(group, partial(self._add, device, arrays))  # the first sum connects, which blocks

    def _add(self, device: Cuda, arrays: Sequence[Array]) -> None:
        with device.context.entered():
            for array in arrays:
                self._made[None][1][True].allreduce(array, array, _core().SUM, stream=array.buffer.stream.handle)

    def _has_own(self, ends: Sequence[list[Json]]) -> bool:
        own = all(usable for *_, usable, _ in ends) and len({identity for _, identity, *_ in ends}) == len(ends)
        if self._wanted and not own:
            raise BackendUnavailable("NCCL", tried=_TRIED, install=_INSTALL)
        return own

    def _both_have(self, other: int | None, ends: Sequence[list[Json]]) -> bool:
        """Whether all still have the same; one of them may have given up when the others were done."""
        same = len({made for *_, made in ends}) == 1
        if not same:
            self._end(other)
        return same and other in self._made

    def abort(self) -> None:
        """End all communicators, and what is queued by them; they are made again at the next need."""
        for other in list(self._made):
            self._end(other)

    def _end(self, other: int | None) -> None:
        _, ended = self._made.pop(other, ("", {}))
        for one in ended.values():  # not by the event loop's thread, as it blocks
            threading.Thread(target=one.abort, name="asyncmem ends NCCL").start()


_INSTALL: Final = "pip install 'nccl4py[cu13]'"
_TRIED: Final = ("each process needs nccl4py and a GPU of its own",)


def _shared_kind(pool: AsyncMemoryPool) -> str | None:
    try:
        return pool.shared.device.kind
    except (BackendUnavailable, InvalidRequest):
        return None


def _core() -> Any:  # noqa: ANN401  # it has no types here
    try:
        import nccl.core
    except ImportError as error:
        raise BackendUnavailable("NCCL", tried=(f"nccl4py: {error}",), install=_INSTALL) from None
    return nccl.core


def _new_id() -> str:
    return bytes(_core().get_unique_id()).hex()


async def _unless_one_fails(group: Group, call: Callable[[], T]) -> T:
    """Make a call on a thread that waits there for the others; where one of them fails, leave that thread to itself.

    Raises:
        RankLost: One of them has failed or ended.
    """
    made: list[T] = []
    lost: list[RankLost] = []
    async with anyio.create_task_group() as tasks:

        async def watch() -> None:
            lost.append(await group.failure())
            tasks.cancel_scope.cancel()

        tasks.start_soon(watch)
        made.append(await run_sync(call, abandon_on_cancel=True))
        tasks.cancel_scope.cancel()
    if not made:
        raise lost.pop()
    return made[0]


def _connect(device: Cuda, unique_id: str, rank: int, size: int) -> Any:  # noqa: ANN401  # as `_core`
    core = _core()
    with device.context.entered():
        return core.Communicator.init(size, rank, core.UniqueId.from_bytes(bytes.fromhex(unique_id)))


def _connect_both(device: Cuda, ids: Sequence[str], me: int, scratch: Array) -> dict[bool, Any]:
    """Make the communicators of two neighbours, and send something by each (blocks): NCCL connects only then."""
    made, stream = {}, scratch.buffer.stream
    for forward, unique_id in zip((True, False), ids, strict=True):
        made[forward] = communicator = _connect(device, unique_id, me, 2)
        with device.context.entered():
            pass_on = communicator.send if forward == (me == 0) else communicator.recv
            pass_on(_Bytes(scratch, stream), 1 - me, stream=stream.handle)
        stream.synchronize_blocking()
    return made
