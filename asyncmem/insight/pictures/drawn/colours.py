"""Which colour means what, the same in all pictures of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final
from zlib import crc32

from asyncmem.insight.pictures.timeline import NO_TAG

if TYPE_CHECKING:
    from asyncmem.insight.names import Site
    from asyncmem.insight.pictures.timeline import Band

_TAGS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7a5195", "#b2a100")
"""Told apart with any kind of sight: those of Okabe and Ito, but for their yellow, which is too light for areas."""

_LINES: Final = ("#fdbf6f", "#a6cee3", "#b2df8a", "#fb9a99", "#cab2d6", "#e5d8a8", "#9fd8cb", "#f4b6d2")
"""Light, because there is text on them."""

UNTAGGED: Final = "#8d99a6"
OTHERS: Final = "#c3cad1"
TEXT: Final = "#1b1f24"
LIVE: Final = "#4b5563"
RESERVED: Final = "#111827"
LIMIT: Final = "#dc2626"
GREW: Final = "#c2410c"
WAITED: Final = "#7c3aed"
REFUSED: Final = "#dc2626"
TRIMMED: Final = "#0f766e"
SEGMENT: Final = "#eef1f4"
BORDER: Final = "#8c959f"
GAP: Final = "#ffffff"

_WITH_A_GAP: Final = 1 / 200  # of a picture's width: what is narrower would be all border


@final
class TagColours:
    """The colour of each tag: those that have a band have their own."""

    def __init__(self, bands: tuple[Band, ...]) -> None:
        tags = [band.tag for band in bands if band.tag is not None]
        self._of: dict[str | None, str] = {None: UNTAGGED, **dict(zip(tags, _TAGS, strict=False))}

    def of(self, tag: str | None) -> str:
        """Answer the colour of a tag, None for what has none."""
        return self._of.get(tag, OTHERS)

    def of_band(self, band: Band) -> str:
        """Answer the colour of a band."""
        return self.of(band.tag) if band.tag is not None or band.name == NO_TAG else OTHERS


def border_of(colour: str, share: float) -> str:
    """Answer the border of a box, as wide as so large a share of the picture: white, or its own colour if narrow."""
    return GAP if share > _WITH_A_GAP else colour


def of_function(site: Site) -> str:
    """Answer the colour of the lines of a function: the same in every picture and run."""
    name = f"{site.file}:{site.function}"
    return _LINES[crc32(name.encode("utf-8", "surrogatepass")) % len(_LINES)]
