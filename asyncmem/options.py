"""What can be chosen about a pool, checked once and frozen: sizes in bytes, times in seconds, shares from 0 to 1."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Final, Self, TypedDict, TypeVar, Unpack

from asyncmem import readers
from asyncmem.environment import CONF, read_environment, unknown_option
from asyncmem.errors import InvalidRequest
from asyncmem.needs import Need
from asyncmem.readers import OnOutOfMemory, Peers, Reader, Warmup
from asyncmem.units import Share, Size

_T = TypeVar("_T")

DEFAULT: Final = "default"
ARGUMENT: Final = "argument"


class OptionArguments(TypedDict, total=False):
    """The options as they may be written: sizes as integers or text, shares as numbers or text."""

    limit: Size | float | None
    fraction: Share
    min_free: Size
    segment_size: Size
    segments: str
    pregrow: Size
    need: Need
    warmup: Iterable[tuple[Size, int]] | str
    small_limit: Size
    strategy: str
    merge_threshold: Share
    defragment: bool
    adaptive: bool
    shrink_after: float | str | None
    zero_segments: bool
    stream_cache_blocks: int
    stream_cache_bytes: Size
    shared_cache_blocks: int
    shared_cache_bytes: Size
    max_waiting: int | None
    timeout: float | str | None
    bypass: float
    on_oom: OnOutOfMemory | str | None
    collect: bool
    fallback: str | None
    spill_limit: Size | float
    late_fences: bool
    fence_every: int | str
    overlap: Size | float
    patience: float | str
    watch_captures: bool
    peers: Iterable[object] | str
    stall_after: float | str | None
    track: bool
    oom_snapshot: str | None
    journal: str | None
    name: str | None


def _option(default: _T, read: Reader, *, fixed: bool = False) -> _T:
    # Answers a dataclass field; typed as its value, as `dataclasses.field` itself is.
    return field(default=default, metadata={"read": read, "fixed": fixed})


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class PoolOptions:
    """The options of a pool. Made from arguments; `from_environment` also asks the environment.

    Unknown names and values that cannot be right raise `InvalidRequest`, which names the option, what came and what
    was expected.
    """

    limit: int | float | None = _option(None, readers.optional(readers.size_or_share))
    """The most the pool may reserve from the driver: bytes (an int), or a share of the device's memory (a float)."""
    fraction: float = _option(0.9, readers.positive_share)
    """Share of the device's memory that stands in where no `limit` is given."""
    min_free: int = _option(512 << 20, readers.size)
    """Bytes to leave free for others, on devices that have memory of their own."""
    segment_size: int = _option(64 << 20, readers.positive_size)
    """Bytes the pool grows by, or more where a request needs more."""
    segments: str = _option("auto", readers.label, fixed=True)
    """How memory is obtained: "auto", "direct" (each request from the driver, no pooling) or a kind of the device.

    "paged", on devices that have pages, reserves little: memory comes page by page, and moves to where it is lacking.
    It is never chosen by "auto", because growth costs more on a GPU, and needs a device without a memory checker.
    """
    pregrow: int = _option(0, readers.size)
    """Bytes to reserve when the pool opens, and to keep ready."""
    need: int = _option(0, readers.need, fixed=True)
    """Bytes that the device must have room for, also given as an estimate; they are reserved when the pool opens.

    The device "auto" is then the one with room; where none has it, opening raises `NoDeviceHasRoom`.
    """
    warmup: Warmup = _option((), readers.warmup, fixed=True)
    """Pairs of size and count to have ready when the pool opens."""
    small_limit: int = _option(1 << 20, readers.positive_size)
    """Requests below so many bytes are placed apart from the larger ones."""
    strategy: str = _option("best_fit", readers.one_of("best_fit", "good_fit"))
    """Placement: "best_fit" looks at more candidates and wastes less, "good_fit" takes the first that is near."""
    merge_threshold: float = _option(0.1, readers.share)
    """Fragmentation (share of free memory outside the largest hole) from which the idle pool merges across streams."""
    defragment: bool = _option(True, readers.switch)
    """Whether the idle pool does so at all."""
    adaptive: bool = _option(True, readers.switch)
    """Whether a pool adapts to pressure.

    From 80 % of its limit handed out, until it is below 60 %, caches keep a quarter of their bytes, and free memory is
    merged across streams whatever its fragmentation.
    """
    shrink_after: float | None = _option(None, readers.optional(readers.seconds))
    """Seconds without an allocation or a free after which free segments go back to the device; None for never.

    What `pregrow` or `need` asks for stays.
    """
    zero_segments: bool = _option(False, readers.switch)
    """Whether new segments are filled with zeros; reused memory is never cleared."""
    stream_cache_blocks: int = _option(256, readers.count)
    """Blocks that each stream's cache keeps at most."""
    stream_cache_bytes: int = _option(64 << 20, readers.size)
    """Bytes that each stream's cache keeps at most."""
    shared_cache_blocks: int = _option(1024, readers.count)
    """Blocks that the cache shared by all streams keeps at most."""
    shared_cache_bytes: int = _option(256 << 20, readers.size)
    """Bytes that the cache shared by all streams keeps at most."""
    max_waiting: int | None = _option(None, readers.optional(readers.count))
    """Requests that may wait at once before `TooManyRequests`; None for any number, 0 for none."""
    timeout: float | None = _option(None, readers.optional(readers.seconds))
    """Seconds a request waits that names no `timeout` of its own; None for as long as it takes."""
    bypass: float = _option(2.0, readers.factor)
    """Smaller requests may overtake one that does not fit until they got this many limits; 0 for strict order."""
    on_oom: OnOutOfMemory | None = _option(None, readers.optional(readers.callback))
    """Called with the facts before an out-of-memory error, on any thread; True asks for one more try."""
    collect: bool = _option(False, readers.switch)
    """Whether `gc.collect()` is tried before an out-of-memory error; it can take long, on the loop's thread too."""
    fallback: str | None = _option(None, readers.optional(readers.one_of("host")))
    """Where to place a buffer when the device is out: "host", or None to wait or fail."""
    spill_limit: int | float = _option(0.25, readers.size_or_share_or_nothing)
    """Page-locked host memory that `spillable` buffers may move to: bytes, or a share of the host's; 0 for none."""
    late_fences: bool = _option(True, readers.switch)
    """Whether another stream's memory may be taken behind a fence recorded only then, as the last resort.

    Such a fence covers that stream's later work too, and waits for ever if that work waits for the taker.
    """
    fence_every: int = _option(16, readers.fences_shared)
    """How many frees on a stream that is not the buffer's home may share a fence; 1 is exact.

    With more of them a free costs less. At most an eighth of what is free waits for a shared fence; who needs that,
    too, has it recorded and gets the memory behind what the stream was given to do until then, as with `late_fences`.
    """
    overlap: int | float = _option(0.9, readers.size_or_any_share)
    """Free memory up to which the pool grows rather than make a stream wait for another one's unfinished work.

    Bytes (an int), or a share (a float) of the most that has been live; 0 saves all memory and always waits.
    """
    patience: readers.Patience = _option(readers.Patience(seconds=0.0), readers.patience)
    """How long growth may wait for memory that is free but not done with, before more is reserved than ever.

    Seconds for each request, or a share such as "2%": then all of these waits together take no more of the pool's life.
    Where a limit stands in the way a pool whose segments are "paged" waits in any case. Others can do with no more than
    whole segments that are free.
    """
    watch_captures: bool = _option(True, readers.switch)
    """Whether each allocation that names a stream of a device with graphs asks whether that is being captured.

    That costs some tens of nanoseconds. Without it, requests that are served from caches are not refused there.
    """
    peers: Peers = _option((), readers.peers, fixed=True)
    """Devices, or their names, whose streams may use this pool's memory directly."""
    stall_after: float | None = _option(10.0, readers.optional(readers.seconds))
    """Seconds without progress after which waiting requests are reported by `StallWarning`; None for never."""
    track: bool = _option(False, readers.switch)
    """Whether every buffer notes where it was made, for the warning when it is forgotten; costs some microseconds."""
    oom_snapshot: str | None = _option(None, readers.optional(readers.label))
    """A file to which the facts of each out-of-memory error are written, the newest over the one before it, as JSON."""
    journal: str | None = _option(None, readers.optional(readers.label), fixed=True)
    """A file for all that the pool's heap and scheduler are told, and what they decide; `asyncmem journal` reads it.

    It grows by about 80 bytes for each allocation and each free. A file that exists stays; the name gets a number.
    """
    name: str | None = _option(None, readers.optional(readers.label), fixed=True)
    """The pool's name in messages and statistics; None to have one made up."""

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each option came from that is not at its default: "argument" or the name of a variable."""

    def __init__(self, **settings: Unpack[OptionArguments]) -> None:
        """Read and check the options that are given; the others get their defaults."""
        given = {name: _read(name, value, name) for name, value in settings.items()}
        for name, default in _DEFAULTS.items():
            object.__setattr__(self, name, given.get(name, default))
        object.__setattr__(self, "origins", dict.fromkeys(given, ARGUMENT))

    @classmethod
    def from_environment(
        cls,
        environ: Mapping[str, str] | None = None,
        /,
        *,
        base: "PoolOptions | None" = None,
        **arguments: Unpack[OptionArguments],
    ) -> "PoolOptions":
        """Join arguments and environment: an argument beats a variable, a variable beats a default.

        Args:
            environ: The variables; `os.environ` where None.
            base: Options that somebody chose already; what they set counts as arguments.
            **arguments: Beat the base too.

        Raises:
            InvalidRequest: Also for variables that name no option; the message names the variable.
        """
        start = cls() if base is None else base
        found = read_environment(os.environ if environ is None else environ, OPTIONS)
        texts = {name: one for name, one in found.items() if name not in arguments and name not in start.origins}
        values = {name: _read(name, one.text, _blame(name, one.origin)) for name, one in texts.items()}
        joined = start._updated(values, {name: one.origin for name, one in texts.items()})
        return joined.replace(**arguments)

    @classmethod
    def for_inference(cls, **settings: Unpack[OptionArguments]) -> "PoolOptions":
        """Choose for serving a model alone on its device: nearly all memory, large segments, large caches."""
        return cls(
            fraction=0.95,
            min_free="256 MiB",
            segment_size="256 MiB",
            stream_cache_bytes="256 MiB",
            shared_cache_bytes="1 GiB",
        ).replace(**settings)

    @classmethod
    def for_constrained(cls, **settings: Unpack[OptionArguments]) -> "PoolOptions":
        """Choose for a small or shared device: half its memory, small segments and caches, the host as a way out."""
        return cls(
            fraction=0.5,
            min_free="1 GiB",
            segment_size="8 MiB",
            stream_cache_bytes="8 MiB",
            shared_cache_bytes="32 MiB",
            merge_threshold=0.05,
            collect=True,
            fallback="host",
        ).replace(**settings)

    def replace(self, **settings: Unpack[OptionArguments]) -> Self:
        """Answer these options with some changed; the rest, and where it came from, is kept."""
        values = {name: _read(name, value, name) for name, value in settings.items()}
        return self._updated(values, dict.fromkeys(values, ARGUMENT))

    def reconfigured(self, **settings: Unpack[OptionArguments]) -> Self:
        """Answer these options with some changed, if all of those can be changed while the pool is in use.

        Raises:
            InvalidRequest: One of them cannot; it is named, and nothing has changed.
        """
        for name, value in settings.items():
            if name in OPTIONS and name not in RUNTIME_OPTIONS:
                raise InvalidRequest(name, value, "no change while the pool is in use", hint="give it to a new pool")
        return self.replace(**settings)

    def origin(self, name: str) -> str:
        """Say where an option's value came from: "default", "argument", or the variable's name."""
        return self.origins.get(name, DEFAULT)

    def ceiling(self, total_memory: int) -> int:
        """Answer the limit in bytes, for a device that has so many; without a limit it is `fraction` of them."""
        limit = self.fraction if self.limit is None else self.limit
        return int(limit * total_memory) if isinstance(limit, float) else limit

    @property
    def ready(self) -> int:
        """Bytes to reserve when the pool opens: what `pregrow` or `need` say, whichever is more."""
        return max(self.pregrow, self.need)

    def spared(self, kind: str) -> int:
        """Answer the bytes to leave free for others on a device of that kind."""
        # A limit in bytes has been thought about; else something is left for others, where memory is not the host's.
        chosen = self.limit is not None and self.origin("min_free") == DEFAULT
        return 0 if chosen or kind == "host" else self.min_free

    def room(self, kind: str, *, free: int, total: int) -> int:
        """Answer the bytes that a pool may have of a device of that kind, with so many free."""
        return max(min(self.ceiling(total), free - self.spared(kind)), 0)

    def __repr__(self) -> str:
        """Show what differs from the defaults."""
        changed = (name for name, default in _DEFAULTS.items() if getattr(self, name) != default)
        return f"PoolOptions({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def _updated(self, values: Mapping[str, object], origins: Mapping[str, str]) -> Self:
        changed = object.__new__(type(self))
        for name in OPTIONS:
            object.__setattr__(changed, name, values.get(name, getattr(self, name)))
        object.__setattr__(changed, "origins", {**self.origins, **origins})
        return changed


_READERS: Final[dict[str, Reader]] = {one.name: one.metadata["read"] for one in fields(PoolOptions) if one.metadata}
_DEFAULTS: Final = {one.name: one.default for one in fields(PoolOptions) if one.metadata}

OPTIONS: Final = tuple(_READERS)
"""The names of all options, in the order of their declaration."""

RUNTIME_OPTIONS: Final = frozenset(
    one.name for one in fields(PoolOptions) if one.metadata and not one.metadata["fixed"]
)
"""The names of those that `pool.configure(...)` may change."""


def _read(name: str, value: object, what: str) -> object:
    if name not in _READERS:
        raise unknown_option(name, OPTIONS)
    return _READERS[name](value, what)


def _blame(name: str, origin: str) -> str:
    return f"{name} in {CONF}" if origin == CONF else origin
