"""Allocators as the rows of a device use them: the calls of each.

An allocator's calls are Python source. A loop that is compiled from it calls the allocator as its users do, and not
through a function in between.
"""

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, Unpack

from asyncmem import AsyncMemoryPool, OutOfMemoryError
from asyncmem.devices import Device, device
from asyncmem.options import OptionArguments, PoolOptions

OURS: Final = "asyncmem"

SINGLE_CALLS: Final = {
    "batch": "a hundred single calls: there is no call for many",
    "await_hit": "nothing to await",
}
"""What is different with an allocator that has neither batches nor anything to await."""


def index_of(device: str) -> int:
    """Return the number in "cuda:1"; 0 if there is none."""
    return int(device.partition(":")[2] or "0")


Plan: TypeAlias = list[tuple[int, int, int]]
"""Triples of slot, size and the size of what lies in the slot before; size 0 only gives that back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """One allocator's calls, as source."""

    names: Mapping[str, object]
    """The names that the source uses."""
    allocate: str
    """An expression; `{size}` stands for the bytes."""
    release: str = ""
    """An expression; `{block}` and `{size}` stand for what was allocated. "" if the last reference gives it back."""

    def once(self, size: str) -> str:
        """Write the statement that allocates and gives back at once."""
        made = self.allocate.format(size=size)
        return f"block = {made}\n{self.release.format(block='block', size=size)}" if self.release else made

    def drop(self, place: str, size: str) -> str:
        """Write the statement that gives back what lies in a place."""
        return self.release.format(block=place, size=size) if self.release else f"{place} = None"

    def over_plan(self) -> str:
        """Write the loop over `plan`, a `Plan`, in which every step gives the slot's old block back first."""
        body = f"{self.drop('live[slot]', 'old')}\nlive[slot] = {self.allocate.format(size='size')}"
        return "for slot, size, old in plan:\n" + textwrap.indent(body, "    ")

    def over_program(self) -> str:
        """Write the loop over `plan` whose steps either allocate into an empty slot or, with size 0, empty one."""
        made = f"live[slot] = {self.allocate.format(size='size')}"
        gone = self.drop("live[slot]", "old")
        body = f"if size:\n{textwrap.indent(made, '    ')}\nelse:\n{textwrap.indent(gone, '    ')}"
        return "for slot, size, old in plan:\n" + textwrap.indent(body, "    ")

    def hundred(self) -> str:
        """Write the statement that allocates one block for each of `sizes`, looks at each, and gives all back."""
        made = f"blocks = [{self.allocate.format(size='size')} for size in sizes]"
        if self.release:
            gone = self.release.format(block="block", size="size")
            return f"{made}\nfor block, size in zip(blocks, sizes):\n    {gone}"
        return f"{made}\nfor block in blocks: pass\ndel block, blocks"

    def take(self) -> Callable[[int], object]:
        """Return a function that allocates so many bytes."""
        take: Callable[[int], object] = eval(f"lambda size: {self.allocate.format(size='size')}", dict(self.names))  # noqa: S307 - our own source
        return take

    def give(self, blocks: list[object], sizes: Iterable[int]) -> None:
        """Give back blocks of these sizes, and empty the list."""
        if self.release:
            source = f"lambda block, size: {self.release.format(block='block', size='size')}"
            give = eval(source, dict(self.names))  # noqa: S307 - our own source
            for block, size in zip(blocks, sizes, strict=False):
                give(block, size)
        blocks.clear()


FLOOR: Final = Calls(names={"object": object}, allocate="object()")
"""The least that any allocation in Python costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One block's way from the stream that allocates it to the stream that frees it."""

    names: Mapping[str, object]
    statement: str
    counts: Callable[[], Mapping[str, int]] = dict
    """Returns running counts of what the allocator asked of its driver, if it has any."""


class Allocator(ABC):
    """One allocator in one way of using it. Made in the process that measures it."""

    name: str
    """Its ID in every row."""
    unlike: ClassVar[Mapping[str, str]] = {}
    """Rows in which it does not do the same work as asyncmem, each with what is different."""
    beside: "Allocator | None" = None
    """asyncmem's pool, to be measured in turn with it in the same process."""
    rows: ClassVar[tuple[str, ...]] = ()
    """The only rows it is measured in, if they are not all of its family's."""
    out_of_memory: ClassVar[type[BaseException] | tuple[type[BaseException], ...]] = MemoryError
    """What it raises when it has no memory."""

    @abstractmethod
    def opened(self, limit: int | None = None) -> AbstractContextManager[Calls]:
        """Return its calls, from having no memory of the device until giving all of it back.

        Args:
            limit: The most bytes that it may take from the device; only asyncmem's and torch's honour it.
        """

    def crossing(self) -> AbstractContextManager[Crossing] | None:
        """Return how a block goes from stream A to B, which waits for A, and is freed there; None if it cannot."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give back what it holds besides memory."""


ACROSS = "block = pool.allocate({size}, stream=producer)\nblock.use_on(consumer)\nblock.free(stream=consumer)"
COUNTED = ("driver_calls", "waits", "grows", "late_fences")
"""The pool's statistics that `cross_stream` looks at."""


class AsyncmemPool(Allocator):
    """A pool of its own for every row, on one device object."""

    name = OURS
    out_of_memory: ClassVar[type[BaseException]] = OutOfMemoryError

    def __init__(self, spec: str | Device) -> None:
        self.device = device(spec)
        self._made = self.device is not spec
        self._options: OptionArguments = {}

    @contextmanager
    def tuned(self, **options: Unpack[OptionArguments]) -> Iterator[None]:
        """Make the pools of the block with other options than the defaults."""
        self._options = options
        try:
            yield
        finally:
            self._options = {}

    def pool(self, limit: int | None = None) -> AsyncMemoryPool:
        """Make a pool on the device; without a limit it has the options' default."""
        options = PoolOptions() if limit is None else PoolOptions(limit=limit)
        return AsyncMemoryPool(self.device, options=options.replace(**self._options))

    @contextmanager
    def opened(self, limit: int | None = None) -> Iterator[Calls]:
        """Return a fresh pool's synchronous call and the drop of its buffer."""
        with self.pool(limit) as pool:
            yield Calls(names={"pool": pool}, allocate="pool.allocate({size})")

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Return `use_on`, which orders the consumer behind the producer, and a free in the consumer's order."""
        with self.pool() as pool:

            def counts() -> Mapping[str, int]:
                stats = pool.stats()
                return {name: int(getattr(stats, name)) for name in COUNTED}

            streams = {name: pool.device.create_stream(name) for name in ("producer", "consumer")}
            yield Crossing(names={"pool": pool, **streams}, statement=ACROSS, counts=counts)

    def close(self) -> None:
        """Close the device, if it was made here."""
        if self._made:
            self.device.close()
