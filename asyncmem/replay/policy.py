"""What a replay tries out: a kind of segments, and the options of a pool that decide how little it reserves."""

from dataclasses import dataclass, field
from typing import Final, Self

from asyncmem import readers
from asyncmem.errors import InvalidRequest
from asyncmem.options import OPTIONS, PoolOptions
from asyncmem.readers import Patience

KINDS: Final = ("paged", "stream_ordered", "direct")
"""The kinds of segments that can be replayed."""

MATTERS: Final = (
    "small_limit",
    "strategy",
    "segment_size",
    "stream_cache_blocks",
    "stream_cache_bytes",
    "shared_cache_blocks",
    "shared_cache_bytes",
)
"""The options of a pool that change a replay."""

IMPATIENT: Final = Patience(seconds=0.0)
"""Growth does not wait."""

_OWN: Final = ("take_back", "patience")
_REPLAYED: Final = ("patience", *MATTERS)
_CLOSEST: Final = {"paged": "paged", "direct": "direct"}
"""The policy for a pool's kind of segments; for all others segments of a pool of the driver's."""


@dataclass(frozen=True)
class Policy:
    """How memory is got; without arguments by pages below reserved addresses.

    Attributes:
        segments: "paged" (pages below reserved addresses), "stream_ordered" or "direct".
        take_back: Whether memory in no use is had elsewhere before more than ever is taken: pages are moved, segments
            go back; for all but "direct".
        patience: How long growth may wait before more than ever is taken; for all but "direct".
        options: The pool's; those in `MATTERS` count.
        text: How it was written, for tables.

    Raises:
        InvalidRequest: There is no such kind of segments.
    """

    segments: str = "paged"
    take_back: bool = True
    patience: Patience = IMPATIENT
    options: PoolOptions = field(default_factory=PoolOptions)
    text: str = ""

    def __post_init__(self) -> None:
        if self.segments not in KINDS:
            raise InvalidRequest("policy", self.segments, f"one of {', '.join(KINDS)}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a kind of segments and settings, such as "paged,small_limit=512KiB,patience=2%,take_back=off".

        Raises:
            InvalidRequest: A setting is unknown, has no effect here, or cannot be right.
        """
        segments, settings = _read(text, "paged")
        own = {name: value for name, value in settings.items() if name in _OWN}
        options = {_known(name): value for name, value in settings.items() if name not in _OWN}
        return cls(
            segments=segments,
            take_back=bool(readers.switch(own.get("take_back", "on"), "take_back")),
            patience=readers.patience(own.get("patience", "0s"), "patience"),
            options=PoolOptions().replace(**options),  # type: ignore[arg-type]  # read as text
            text=text,
        )

    def __str__(self) -> str:
        return self.text or self.segments


def pool_options(text: str) -> PoolOptions:
    """Read a kind of segments and options of a pool, such as "paged,segment_size=2MiB", for a replay by a real one.

    Raises:
        InvalidRequest: There is no such option, or its value cannot be right.
    """
    segments, settings = _read(text, "auto")
    return PoolOptions(segments=segments).replace(**settings)  # type: ignore[arg-type]  # read as text


def policy_like(text: str) -> str:
    """Return the policy of the model that comes closest to a pool's options, both as text.

    Raises:
        InvalidRequest: There is no such option, or its value cannot be right.
    """
    segments = _CLOSEST.get(pool_options(text).segments, "stream_ordered")
    _, settings = _read(text, "auto")
    return ",".join([segments, *(f"{name}={value}" for name, value in settings.items() if name in _REPLAYED)])


def _read(text: str, otherwise: str) -> tuple[str, dict[str, str]]:
    segments, *settings = (part.strip() for part in text.split(","))
    if "=" in segments:
        segments, settings = otherwise, [segments, *settings]
    found = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise InvalidRequest("policy", setting, "settings such as small_limit=512KiB")
        found[name] = value
    return segments, found


def _known(name: str) -> str:
    if name in MATTERS:
        return name
    expected = f"one of {', '.join((*_OWN, *MATTERS))}"
    raise InvalidRequest("policy", name, expected, hint="it has no effect on a replay" if name in OPTIONS else "")
