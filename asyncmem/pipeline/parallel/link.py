"""What a runner needs of other processes that have the other stages; `asyncmem.ranks.Ranks` has it."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncmem.core import Buffer
from asyncmem.devices import Fence, Stream
from asyncmem.errors import StepError
from asyncmem.pipeline.parallel.schedule import StageTally, Step
from asyncmem.pool import AsyncMemoryPool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a process is about to run; all but its own stages is the same in all."""

    schedule: str
    """The schedule's name."""
    micro_batches: int
    """How many go through."""
    stages: tuple[str, ...]
    """The names of all stages."""
    own: range
    """Those of this process."""
    pools: tuple[AsyncMemoryPool, ...]
    """Their pools."""


class Sending(NamedTuple):
    """An item for a neighbour's stage.

    Attributes:
        item: Buffers, arrays and plain values; they stay the stage's, and are used again behind the stream's work.
        step: The step that takes it.
        ended: When it is there.
        out: The stream that sends it, which is behind that.
        pool: Where the stage's memory comes from.
    """

    item: object
    step: Step
    ended: Fence
    out: Stream
    pool: AsyncMemoryPool


class Link(ABC):
    """The way to the processes that have the other stages."""

    @abstractmethod
    async def begin(self, plan: Plan) -> "LinkRun":
        """Begin a run together with all others.

        Raises:
            InvalidRequest: The others are about to run something else.
            StepError: One of them has failed or ended.
        """


class LinkRun(ABC):
    """One run. What fails in another process is raised here by every wait."""

    @abstractmethod
    async def send(self, sending: Sending) -> None:
        """Queue the transfer of an item on its stream; wait for memory if it needs some."""

    @abstractmethod
    async def receive(self, step: Step, allocate: Callable[[int], Awaitable[Buffer]], stream: Stream) -> object:
        """Wait for the item that a step takes, and receive it in memory that `allocate` gives, in the stream's order.

        Cancelled: what was asked for is free.
        """

    @abstractmethod
    async def failure(self) -> StepError:
        """Wait until another process has failed or ended, and return the error for that."""

    @abstractmethod
    async def finish(self, tallies: Sequence[StageTally]) -> list[StageTally]:
        """Wait until all are done, and return the figures of all stages in order.

        Raises:
            StepError: One of them has failed or ended.
        """

    @abstractmethod
    def abort(self, error: StepError | None) -> None:
        """Tell the others that this process has failed, None if it gave up, and drop all that is being sent."""
