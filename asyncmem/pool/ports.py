"""What the parts of an open pool know of it, of each other, and of its shares; `open_pool` puts them together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from asyncmem.core import Allocator

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Generator, Iterator, Mapping
    from typing import Any

    from asyncmem.core import Batch, Buffer, Core, Effect, Request, Retire
    from asyncmem.devices import Device, MemoryInfo, Segment
    from asyncmem.devices.base import Span
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.graph import Captures
    from asyncmem.pool.latch import Latch
    from asyncmem.pool.loops import EventLoop
    from asyncmem.pool.pins import Pins
    from asyncmem.pool.spilling import Spilling


class AnyShare(Allocator):
    """A pool, a budget or a lease, as the parts of the pool see it.

    Attributes:
        name: What messages and statistics call it.
        parent: What this is a part of; None for a pool.
        may_wait: Whether requests queue when there is no room; a lease's fail, unless its own memory may move.
        is_lease: Whether it is a range of its own.
        laid_out: Whether buffers lie where a plan has them, and nowhere else.
        inside: The budgets that are parts of this, and of its parts.
    """

    name: str
    may_wait = True
    is_lease = False
    laid_out = False
    parent: AnyShare | None = None

    def __init__(self, name: str, parent: AnyShare | None = None) -> None:
        self.name = name
        self.parent = parent
        self.inside: dict[AnyShare, None] = {}

    @property
    def level(self) -> str:
        """What errors call it, with its kind."""
        return f"pool {self.name!r}"

    @property
    def has_range(self) -> bool:
        """Whether its memory comes from one range, as that of a lease and of all its parts."""
        return self._arena != -1

    @property
    def _opened(self) -> Opened:
        """The open pool that this is a part of; opens a pool that is not open yet.

        Raises:
            PoolClosed: It has been closed.
        """
        assert self.parent is not None
        return self.parent._opened

    def _open_core(self) -> Core:
        """Return the core, for a request.

        Raises:
            PoolClosed: It has been closed.
        """
        opened = self._opened
        if opened.refusing is not None:
            raise opened.refusing
        return opened.core

    def lineage(self) -> Iterator[AnyShare]:
        """Go through this share and those that it is a part of, innermost first."""
        share: AnyShare | None = self
        while share is not None:
            yield share
            share = share.parent

    def capacity(self) -> int:
        """Return the most bytes that could ever be had here."""
        return min(share.own_limit() for share in self.lineage())

    def own_limit(self) -> int:
        """Return this share's own limit in bytes."""
        raise NotImplementedError


class WorkerLike(Protocol):
    """What a pool asks of its worker."""

    @property
    def alive(self) -> bool: ...
    def start(self) -> None: ...
    def submit(self, job: Callable[[], None]) -> None: ...
    def close(self, timeout: float | None = None) -> bool: ...


class Carrying(Protocol):
    """The executor, as others know it."""

    segments: dict[int, Segment]
    spaces: dict[int, Span]
    memory: MemoryInfo
    elsewhere: dict[int, object]
    asked: dict[str, int]

    def quiet(self) -> int: ...
    def run(self, effect: Effect) -> None: ...


class Copying(Protocol):
    """The copies of a pool's buffers, as others know them; what it takes and returns is of `copies`."""

    def start(self, part: Any, other: object, stream: object, *, into: bool) -> Any: ...  # noqa: ANN401


class Failing(Protocol):
    """What makes the errors of requests."""

    def of(self, request: Request[Any], reason: str, cause: str, level: int, ahead: int) -> Exception: ...


class Opened(Protocol):
    """An open pool, as its parts know it; each of these is described at `OpenPool`."""

    loop_blocking_calls: int
    cpu_fallbacks: int
    counted: dict[str, float]

    @property
    def name(self) -> str: ...
    @property
    def options(self) -> PoolOptions: ...
    @property
    def pool(self) -> AnyShare: ...
    @property
    def device(self) -> Device: ...
    @property
    def core(self) -> Core: ...
    @property
    def retire(self) -> Retire: ...
    @property
    def worker(self) -> WorkerLike: ...
    @property
    def executor(self) -> Carrying: ...
    @property
    def spilling(self) -> Spilling: ...
    @property
    def captures(self) -> Captures: ...
    @property
    def copies(self) -> Copying: ...
    @property
    def pins(self) -> Pins: ...
    @property
    def failures(self) -> Failing: ...
    @property
    def limit(self) -> int: ...
    @property
    def min_free(self) -> int: ...
    @property
    def closed(self) -> Exception | None: ...
    @property
    def refusing(self) -> Exception | None: ...
    @property
    def lock(self) -> threading.Lock: ...
    @property
    def shares(self) -> Mapping[int, AnyShare]: ...

    def share_of(self, buffer: Buffer) -> AnyShare: ...
    def begin_share(self, share: AnyShare, account: int) -> None: ...
    def end_share(self, account: int, arena: int | None = None) -> None: ...
    def close_accounts(self) -> None: ...
    def on_loop(self) -> bool: ...
    def bind(self, request: Request[Any]) -> EventLoop: ...
    def wait(self, request: Request[Any]) -> Generator[Any, Any, None]: ...
    def serve(self, request: Request[Any]) -> None: ...
    def block(self, request: Request[Any], timeout: float | None) -> None: ...
    def stream_index(self, stream: object) -> int: ...
    def claims(self) -> list[tuple[int, int, int]]: ...
    def facts_of(self, number: int) -> OutOfMemoryFacts | None: ...
    def enter_owner(self) -> None: ...
    def leave_owner(self) -> None: ...
    def observe(self) -> None: ...
    def copier(self) -> WorkerLike: ...
    def run(self, call: Callable[[], object]) -> Latch[object]: ...
    def run_last(self, job: Callable[[], None]) -> None: ...
    def host_memory(self) -> Allocator: ...
    def serve_on_host(self, request: Request[Any]) -> Buffer | Batch: ...
