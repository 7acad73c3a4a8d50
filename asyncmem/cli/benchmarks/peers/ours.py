"""asyncmem's own pool, measured as its peers are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, Unpack

from asyncmem import AsyncMemoryPool, OutOfMemoryError
from asyncmem.cli.benchmarks.peers.peer import Crossing, Peer
from asyncmem.cli.benchmarks.peers.way import Way
from asyncmem.devices import Device, device
from asyncmem.options import OptionArguments, PoolOptions

ACROSS = "block = pool.allocate({size}, stream=producer)\nblock.use_on(consumer)\nblock.free(stream=consumer)"
COUNTED = ("driver_calls", "waits", "grows", "late_fences")
"""The pool's statistics that `cross_stream` looks at."""


class Ours(Peer):
    """A pool of its own for every row, on one device object."""

    name = "asyncmem"
    awaits = True
    out_of_memory: ClassVar[type[BaseException]] = OutOfMemoryError

    def __init__(self, spec: str | Device) -> None:
        self.device = device(spec)
        self._made = self.device is not spec
        self._options: OptionArguments = {}

    @contextmanager
    def tuned(self, **options: Unpack[OptionArguments]) -> Iterator[None]:
        """Have the pools that are made meanwhile depart from the defaults."""
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
    def opened(self, limit: int | None = None) -> Iterator[Way]:
        """Answer a fresh pool's synchronous call and the drop of its buffer."""
        with self.pool(limit) as pool:
            yield Way(names={"pool": pool}, allocate="pool.allocate({size})")

    @contextmanager
    def crossing(self) -> Iterator[Crossing]:
        """Answer `use_on`, which orders the consumer behind the producer, and a free in the consumer's order."""
        with self.pool() as pool:

            def counts() -> Mapping[str, int]:
                stats = pool.stats()
                return {name: int(getattr(stats, name)) for name in COUNTED}

            yield Crossing(
                names={
                    "pool": pool,
                    "producer": pool.device.create_stream("producer"),
                    "consumer": pool.device.create_stream("consumer"),
                },
                statement=ACROSS,
                counts=counts,
            )

    def close(self) -> None:
        """Close the device, where it was made here."""
        if self._made:
            self.device.close()
