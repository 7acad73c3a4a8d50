"""What can be chosen about a pool, checked once and frozen: sizes in bytes, times in seconds, shares from 0 to 1."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import partial
from typing import Final, Self, TypedDict, TypeVar, Unpack

from asyncmem import readers
from asyncmem.environment import CONF, read_environment, unknown_option
from asyncmem.errors import InvalidRequest
from asyncmem.readers import SHARED, OnOutOfMemory, Peers, Reader, Warmup
from asyncmem.units import Need, Share, Size, bytes_needed, parse_count, parse_duration, parse_share, parse_size

_T = TypeVar("_T")

DEFAULT: Final = "default"
ARGUMENT: Final = "argument"
_MOST_FREES: Final = 4096  # what the core takes


class OptionArguments(TypedDict, total=False):
    """The options as they may be written: sizes as integers or text, shares as numbers or text."""

    limit: Size | float | None
    need: Need
    pregrow: Size
    warmup: Iterable[tuple[Size, int]] | str
    shrink_after: float | str | None
    timeout: float | str | None
    max_waiting: int | None
    fallback: str | None
    spill_limit: Size | float
    on_oom: OnOutOfMemory | str | None
    track: bool
    name: str | None
    fraction: Share
    min_free: Size
    segments: str
    segment_size: Size
    zero_segments: bool
    peers: Iterable[object] | str
    share_limit: Size | float
    small_limit: Size
    strategy: str
    stream_cache_blocks: int
    stream_cache_bytes: Size
    shared_cache_blocks: int
    shared_cache_bytes: Size
    adaptive: bool
    defragment: bool
    merge_threshold: Share
    late_fences: bool
    fence_every: int | str
    overlap: Size | float
    patience: float | str
    watch_captures: bool
    bypass: float
    collect: bool
    stall_after: float | str | None
    oom_snapshot: str | None
    journal: str | None


def _option(default: _T, read: Reader, *, fixed: bool = False) -> _T:
    # Returns a dataclass field; typed as its value, as `dataclasses.field` itself is.
    return field(default=default, metadata={"read": read, "fixed": fixed})


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class PoolOptions:
    """The options of a pool. Made from arguments; `from_environment` also reads the environment.

    Unknown names and values that cannot be right raise `InvalidRequest`, which names the option, what came and what
    was expected. A program sets some of the first table; the second is for experts.

    ============== ================================================
    option         is about
    ============== ================================================
    limit          the most that the pool reserves
    need           what the device must have room for
    pregrow        what is reserved when the pool opens
    warmup         what is allocated once when the pool opens
    shrink_after   when free memory goes back to the device
    timeout        how long a request waits
    max_waiting    how many requests may wait
    fallback       where buffers go when the device has no memory
    spill_limit    host memory for spilled buffers
    on_oom         a function called before an out-of-memory error
    track          remembering where each buffer was allocated
    name           the pool's name
    ============== ================================================

    =========================================================== ========================
    option                                                      is about
    =========================================================== ========================
    fraction, min_free, segments, segment_size                  memory from the device
    zero_segments, peers, share_limit
    small_limit, strategy, stream_cache_blocks                  placement and caches
    stream_cache_bytes, shared_cache_blocks, shared_cache_bytes
    adaptive, defragment, merge_threshold
    late_fences, fence_every, overlap, patience, watch_captures reuse between streams
    bypass, collect, stall_after                                waiting and failing
    oom_snapshot, journal                                       files
    =========================================================== ========================
    """

    limit: int | float | str | None = _option(None, readers.optional(readers.limit))
    """The most memory that the pool may reserve: bytes, or a share of the device's memory; None for `fraction` of
    it; "shared" for `fraction` together with the pools of other processes. A limit above what the device has counts
    as all of it."""
    need: int = _option(0, bytes_needed, fixed=True)
    """Memory that the device must have room for: bytes, or an estimate of `asyncmem.planning`. It is reserved when
    the pool opens; "auto" then chooses a device with room.

    Opening raises `NoDeviceHasRoom` where no device has room.
    """
    pregrow: int = _option(0, parse_size)
    """Memory to reserve when the pool opens, and to keep."""
    warmup: Warmup = _option((), readers.warmup, fixed=True)
    """Pairs of size and count to allocate and free when the pool opens, at most 262,144 buffers; in the environment
    "4KiB*100; 1MiB*10"."""
    shrink_after: float | None = _option(None, readers.optional(parse_duration))
    """Seconds without an allocation or a free after which free segments go back to the device; None for never.

    What `pregrow` or `need` ask for stays.
    """
    timeout: float | None = _option(None, readers.optional(parse_duration))
    """Seconds that a request waits if it has no `timeout` of its own; None for no bound."""
    max_waiting: int | None = _option(None, readers.optional(parse_count))
    """Requests that may wait at once before `TooManyRequests` is raised; None for any number, 0 for none. Growing
    requests do not count."""
    fallback: str | None = _option(None, readers.optional(readers.one_of("host")))
    """Where to place a buffer when the device has no memory: "host", or None to wait or fail."""
    spill_limit: int | float = _option(0.25, readers.size_or_share_or_nothing)
    """Page-locked host memory that `spillable` buffers may move to: bytes, or a share of the host's memory; 0 for
    none."""
    on_oom: OnOutOfMemory | None = _option(None, readers.optional(readers.callback))
    """Function that is called with the facts before an out-of-memory error, on any thread; return True to try once
    more."""
    track: bool = _option(False, readers.switch)
    """Whether to remember where each buffer was allocated, for the `LeakWarning` when it is forgotten; costs some
    microseconds."""
    name: str | None = _option(None, readers.optional(readers.label), fixed=True)
    """The pool's name in messages and statistics; None for a generated one."""

    # -- for experts ---------------------------------------------------------------------------------------------------

    fraction: float = _option(0.9, readers.positive_share)
    """Share of the device's memory that is the limit if `limit` is None."""
    min_free: int = _option(512 << 20, parse_size)
    """Memory to leave free for other programs, on devices that have memory of their own.

    When less is left, or others have come to hold more, memory that was not used for half a second goes back.
    """
    segments: str = _option("auto", readers.label, fixed=True)
    """How memory is obtained: "auto", "direct" (each request from the driver, no pooling), "paged" (page by page,
    little reserved), or a kind of the device.

    "auto" is "paged" on a GPU that maps memory, unless a memory checker is at work, and else the device's first kind.
    """
    segment_size: int = _option(64 << 20, readers.positive_size)
    """Size by which the pool grows; more if a request needs more."""
    zero_segments: bool = _option(False, readers.switch)
    """Whether new segments are filled with zeros; reused memory is never cleared."""
    peers: Peers = _option((), readers.peers, fixed=True)
    """Devices, or their names, whose streams may use the pool's memory directly; in the environment "cuda:1;
    cuda:2"."""
    share_limit: int | float = _option(0.25, readers.size_or_share)
    """The most that `pool.shared` may reserve, memory that other processes can open: bytes, or a share of the device's
    memory."""
    small_limit: int = _option(1 << 20, readers.positive_size)
    """Size below which requests are placed apart from larger ones."""
    strategy: str = _option("best_fit", readers.one_of("best_fit", "good_fit"))
    """Placement: "best_fit" looks at more candidates and wastes less, "good_fit" takes the first that is near."""
    stream_cache_blocks: int = _option(256, parse_count)
    """The most blocks in each stream's cache."""
    stream_cache_bytes: int = _option(64 << 20, parse_size)
    """The most bytes in each stream's cache."""
    shared_cache_blocks: int = _option(1024, parse_count)
    """The most blocks in the cache shared by all streams."""
    shared_cache_bytes: int = _option(256 << 20, parse_size)
    """The most bytes in the cache shared by all streams."""
    adaptive: bool = _option(True, readers.switch)
    """Whether caches keep a quarter of their bytes, and free memory is merged across streams at once, from 80 % of
    the limit until below 60 %."""
    defragment: bool = _option(True, readers.switch)
    """Whether a quiet pool merges free memory across streams."""
    merge_threshold: float = _option(0.1, parse_share)
    """Fragmentation (the share of free memory outside the largest hole) from which a quiet pool merges."""
    late_fences: bool = _option(True, readers.switch)
    """Whether memory of another stream may be taken, as the last resort, behind a fence that is recorded only then.

    Such a fence covers later work of that stream too. It is never reached if that work waits for the taking stream.
    """
    fence_every: int = _option(16, partial(parse_count, least=1, most=_MOST_FREES))
    """How many frees on a stream other than the home stream may share a fence; 1 for a fence at every free.

    A larger number makes a free cheaper, and its memory available a little later. At most an eighth of the free memory
    waits for a shared fence. A request that needs that memory has the fence recorded and waits behind it, as with
    `late_fences`.
    """
    overlap: int | float = _option(0.9, readers.size_or_any_share)
    """Free memory up to which the pool grows rather than make a stream wait for unfinished work of another: bytes,
    or a share of the most that was live; 0 always waits."""
    patience: readers.Patience = _option(readers.Patience(seconds=0.0), readers.patience)
    """How long growth may wait for free memory that a stream still uses, before more is reserved than ever: seconds
    for each request, or a share such as "2%" of the pool's life for all such waits together.

    If the limit is in the way, a pool whose segments are "paged" waits in any case. Other pools wait for whole free
    segments only.
    """
    watch_captures: bool = _option(True, readers.switch)
    """Whether each allocation that names a stream asks if that stream is being captured, on devices with graphs;
    costs some tens of nanoseconds.

    Without it, requests that a cache serves are not refused on a captured stream.
    """
    bypass: float = _option(2.0, readers.factor)
    """How many times the limit smaller requests may take past a request that does not fit; 0 for strict order."""
    collect: bool = _option(False, readers.switch)
    """Whether `gc.collect()` is tried before an out-of-memory error; it can take long, on the event loop's thread
    too."""
    stall_after: float | None = _option(10.0, readers.optional(parse_duration))
    """Seconds without progress after which waiting requests are reported by a `StallWarning`; None for never."""
    oom_snapshot: str | None = _option(None, readers.optional(readers.file))
    """File to which the facts of each out-of-memory error are written as JSON; a newer error overwrites it."""
    journal: str | None = _option(None, readers.optional(readers.file), fixed=True)
    """File for every call of the pool's heap and scheduler and what they decide, which `asyncmem journal` prints
    and replays.

    It grows by about 80 bytes for each allocation and each free. A file that exists is kept; the name gets a number.
    """

    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each option came from that is not at its default: "argument" or the name of a variable."""

    def __init__(self, **settings: Unpack[OptionArguments]) -> None:
        """Read and check the options that are given; the others get their defaults."""
        given = {name: _read(name, value, name) for name, value in settings.items()}
        vars(self).update(_DEFAULTS | given, origins=dict.fromkeys(given, ARGUMENT))

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
            base: Options made before; what they set counts as arguments.
            **arguments: Beat the base too.

        Raises:
            InvalidRequest: Also for variables that name no option; the message names the variable.
        """
        start = cls() if base is None else base
        if not isinstance(start, PoolOptions):
            raise InvalidRequest("options", base, 'PoolOptions, such as PoolOptions(limit="2 GiB")')
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
        """Return these options with some changed; the rest, and where it came from, is kept."""
        values = {name: _read(name, value, name) for name, value in settings.items()}
        return self._updated(values, dict.fromkeys(values, ARGUMENT))

    def reconfigured(self, **settings: Unpack[OptionArguments]) -> Self:
        """Return these options with some changed, if all of those can be changed while the pool is in use.

        Raises:
            InvalidRequest: One of them cannot; it is named, and nothing has changed.
        """
        for name, value in settings.items():
            if name in OPTIONS and name not in RUNTIME_OPTIONS:
                raise InvalidRequest(name, value, "no change while the pool is in use", hint="give it to a new pool")
        changed = self.replace(**settings)
        if (changed.limit == SHARED) != (self.limit == SHARED):
            raise InvalidRequest(
                "limit", settings["limit"], f"no change from or to {SHARED!r} while the pool is in use"
            )
        return changed

    def origin(self, name: str) -> str:
        """Return where an option's value came from: "default", "argument", or the variable's name."""
        return self.origins.get(name, DEFAULT)

    def ceiling(self, total_memory: int) -> int:
        """Return the limit in bytes, for a device that has so many: at most that, by default `fraction` of it."""
        limit = self.fraction if self.limit is None or isinstance(self.limit, str) else self.limit
        return int(limit * total_memory) if isinstance(limit, float) else min(limit, total_memory)

    @property
    def ready(self) -> int:
        """Bytes to reserve when the pool opens: what `pregrow` or `need` say, whichever is more."""
        return max(self.pregrow, self.need)

    def spared(self, kind: str) -> int:
        """Return the bytes to leave free for others on a device of that kind."""
        # A limit in bytes has been thought about; else something is left for others, where memory is not the host's.
        chosen = self.limit not in (None, SHARED) and self.origin("min_free") == DEFAULT
        return 0 if chosen or kind == "host" else self.min_free

    def room(self, kind: str, *, free: int, total: int) -> int:
        """Return the bytes that a pool may have of a device of that kind, with so many free."""
        return max(min(self.ceiling(total), free - self.spared(kind)), 0)

    def __repr__(self) -> str:
        """Show what differs from the defaults."""
        changed = (name for name, default in _DEFAULTS.items() if getattr(self, name) != default)
        return f"PoolOptions({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def as_text(self) -> str:
        """Return the kind of segments and what else differs from the defaults, as in "paged,overlap=0".

        Limits, sizes to begin with, names, files and objects are left out: they are a program's own.
        """
        settings = {name: _as_text(name, getattr(self, name)) for name in OPTIONS if name not in _OF_A_PROGRAM}
        return ",".join([self.segments, *(f"{name}={text}" for name, text in settings.items() if text)])

    def _updated(self, values: Mapping[str, object], origins: Mapping[str, str]) -> Self:
        changed = object.__new__(type(self))
        vars(changed).update(vars(self), **values, origins={**self.origins, **origins})
        return changed


_READERS: Final[dict[str, Reader]] = {one.name: one.metadata["read"] for one in fields(PoolOptions) if one.metadata}
_DEFAULTS: Final = {one.name: one.default for one in fields(PoolOptions) if one.metadata}

OPTIONS: Final = tuple(_READERS)
"""The names of all options, in the order of their declaration."""

COMMON_OPTIONS: Final = OPTIONS[: OPTIONS.index("fraction")]
"""The names of those that programs set; the others are for experts."""

RUNTIME_OPTIONS: Final = {one.name for one in fields(PoolOptions) if one.metadata and not one.metadata["fixed"]}
"""The names of those that `pool.configure(...)` may change."""


def _read(name: str, value: object, what: str) -> object:
    if name not in _READERS:
        raise unknown_option(name, OPTIONS)
    return _READERS[name](value, what=what)


_OF_A_PROGRAM: Final = (
    "segments", "limit", "fraction", "min_free", "pregrow", "need", "warmup", "on_oom", "fallback", "peers", "name",
    "oom_snapshot", "journal",
)  # fmt: skip
"""Options that `PoolOptions.as_text` leaves out, or has first."""


def _as_text(name: str, value: object) -> str:
    """Return text that is read as this value; empty for the default, and for what no text is read as."""
    if value == _DEFAULTS[name]:
        return ""
    texts = ["on" if value else "off"] if isinstance(value, bool) else [str(value)]
    if isinstance(value, float):
        texts.append(f"{Decimal(repr(value)) * 100}%")  # of some options a number is bytes, and a share has its sign
    for text in texts:
        with suppress(InvalidRequest):
            if _read(name, text, name) == value:
                return text
    return ""


def _blame(name: str, origin: str) -> str:
    return f"{name} in {CONF}" if origin == CONF else origin
