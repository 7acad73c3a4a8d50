"""`Ranks`: this process's place among those that train a model together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from asyncmem import share
from asyncmem.devices import HostStream
from asyncmem.errors import InvalidRequest, StepError
from asyncmem.pipeline.parallel.link import Link, LinkRun, Plan
from asyncmem.ranks.carriers import Nccl, Packed, pack
from asyncmem.ranks.peers import DONE, FAILED, Group
from asyncmem.ranks.run import RankRun
from asyncmem.units import parse_count, parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from asyncmem.arrays import Array
    from asyncmem.core import Buffer
    from asyncmem.pool import AsyncMemoryPool


class Ranks(Link):
    """A group of processes of one host and user: ``async with Ranks(key, rank, size) as ranks``.

    Use it as the `link` of a `PipelineParallel` whose stages are spread over the processes, and to add up gradients of
    processes that have the same stages. What all do together, runs and sums, each begins in the same order.

    Memory goes by NCCL between GPUs, where `nccl4py` is installed and each process has a GPU of its own; else by memory
    that both processes have open, as `asyncmem.share` does it.

    Args:
        key: A secret that the processes have in common, and no others; `secrets.token_hex()` makes one.
        rank: Which of them this is, from 0. Stages lie in the order of ranks.
        size: How many there are.
        nccl: Whether memory goes by NCCL; None for where it can.
        timeout: The most seconds to wait for the others to come.

    Raises:
        InvalidRequest: An argument cannot be right.
        BackendUnavailable: `nccl` is True, and it is not installed. Or this system cannot share memory.
    """

    def __init__(
        self, key: str, rank: int, size: int, *, nccl: bool | None = None, timeout: float | str = "60 s"
    ) -> None:
        if not key or not isinstance(key, str):
            raise InvalidRequest("key", key, "text that nobody else has")
        self.size = parse_count(size, what="size", least=1)
        self.rank = parse_count(rank, what="rank", least=0)
        if self.rank >= self.size:
            raise InvalidRequest("rank", rank, f"a number below {self.size}")
        self._timeout = parse_duration(timeout)
        self._nccl = Nccl(nccl)
        self._group = Group(key, self.rank, self.size)

    def __repr__(self) -> str:
        return f"<asyncmem.ranks.Ranks: {self.rank} of {self.size}>"

    async def __aenter__(self) -> Self:
        """Wait for the others.

        Raises:
            TimeoutError: Some did not come.
            InvalidRequest: Another process has this rank.
        """
        try:
            await self._group.join(self._timeout)
        except BaseException:
            self._group.leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave: what the others wait for fails there."""
        self._group.leave()
        self._nccl.abort()

    async def begin(self, plan: Plan) -> LinkRun:
        """Begin a run with all others; `PipelineParallel` does it.

        Raises:
            InvalidRequest: The others are about to run something else.
            BackendUnavailable: NCCL is demanded, and cannot be used.
            StepError: One of them has failed or ended.
        """
        self._group.begin()
        run = RankRun(self._group, self._nccl, plan)
        try:
            await run.begin()
        except BaseException as error:
            run.abort(error if isinstance(error, StepError) else None)
            raise
        return run

    async def all_reduce(self, pool: AsyncMemoryPool, arrays: Sequence[Array]) -> None:
        """Add up, in place, what all processes have in as many equal arrays; all get the same bits.

        Without NCCL they are added in the order of the ranks, by numpy, so they must be the host's. Later work of the
        arrays' home streams comes behind it.

        Args:
            pool: Where they are from. Without NCCL as much of `pool.shared` is needed for the time being.
            arrays: They have the same elements and shapes in all processes.

        Raises:
            InvalidRequest: The others add up something else.
            RankLost: One of the others has failed or ended; what the arrays have is not defined.
            BackendUnavailable: They are a GPU's, and NCCL cannot be used.
        """
        group, packed = self._group, pack(list(arrays))
        group.begin()
        await pool.open()
        async with AsyncExitStack() as until:
            done = False
            try:
                facts = [packed.form, self._nccl.end(pool, None)]
                group.send(None, "arrays", facts)
                answers = await group.receive_all("arrays")
                answers[group.rank] = facts
                if any(form != packed.form for form, _ in answers):
                    raise InvalidRequest("arrays", list(arrays), "the same elements and shapes in all processes")
                if pool.device.host_readable:
                    await self._add(pool, packed, until)
                else:
                    await self._nccl.add(group, pool.device, arrays, [end for _, end in answers])
                done = True
            finally:
                if not done:
                    group.send(None, FAILED, "it could not add")
                    self._nccl.abort()
            group.send(None, DONE, None)
            await group.receive_all(DONE)

    async def _add(self, pool: AsyncMemoryPool, packed: Packed, until: AsyncExitStack) -> None:
        memory = until.enter_context(await pool.shared.allocate_async(packed.nbytes))
        stream = memory.stream
        assert isinstance(stream, HostStream)
        for array, offset in zip(packed.arrays, packed.offsets, strict=True):
            array.copy_to(memory.view(array._element.name, array.shape, offset), stream=stream)
        exported = share.export(memory, readers=None)
        until.callback(exported.close)
        self._group.send(None, "memory", exported.descriptor.hex())
        parts: list[Buffer] = []
        for descriptor in await self._group.receive_all("memory"):
            if descriptor is None:
                parts.append(memory)
            else:
                shared = await until.enter_async_context(share.attach_async(bytes.fromhex(descriptor), stream=stream))
                parts.append(shared.buffer)
        for array, offset in zip(packed.arrays, packed.offsets, strict=True):
            values = [one.view(array._element.name, array.shape, offset).numpy() for one in parts]
            await stream.run(_sum, array.numpy(), values)


def _sum(into: NDArray[Any], parts: Sequence[NDArray[Any]]) -> None:
    total = parts[0].copy()
    for one in parts[1:]:
        total += one
    into[...] = total
