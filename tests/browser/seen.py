"""A page as it is seen: colours at the places of data, and the text that stands there."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .chromium import Chromium

Colour = tuple[int, int, int]

# Texts lie in shadow trees too.
_TEXTS = """
(() => {
  const found = [];
  const walk = node => {
    if (node.nodeType === Node.TEXT_NODE) found.push(node.textContent);
    if (["SCRIPT", "STYLE"].includes(node.nodeName)) return;
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return found.map(one => one.trim()).filter(Boolean);
})()
"""

_PLACE = """
(([name, x, y]) => {
  const figure = Bokeh.documents.map(one => one.get_model_by_name(name)).find(Boolean);
  const view = Bokeh.index.find_one(figure);
  const corner = view.canvas_view.el.getBoundingClientRect();
  return [corner.left + view.frame.x_scale.compute(x), corner.top + view.frame.y_scale.compute(y)];
})
"""


class Spot(NamedTuple):
    """A place in the window."""

    x: int
    """Pixels from the left,"""
    y: int
    """and from above."""


class Seen:
    """What a browser shows of a page.

    Attributes:
        colours: Which colours there are, with the number of their pixels.
    """

    def __init__(self, browser: Chromium, path: Path, width: int = 1300) -> None:
        self._browser = browser
        browser.open(path, width=width)
        self.look()

    def look(self) -> None:
        """Look again."""
        self._picture = self._browser.picture()
        found = self._picture.getcolors(1 << 24) or ()
        self.colours: Counter[Colour] = Counter(
            {colour: number for number, colour in found if isinstance(colour, tuple)}
        )

    def wait_for(self, colour: Colour, pixels: int, seconds: float = 60) -> None:
        """Look again and again until so many pixels have a colour.

        Raises:
            TimeoutError: They never had.
        """
        end = time.monotonic() + seconds
        while sum(number for found, number in self.colours.items() if close(found, colour)) < pixels:
            if time.monotonic() > end:
                raise TimeoutError(f"no {pixels} pixels of {colour}")
            self.look()

    def spot(self, figure: str, x: float, y: float | str) -> Spot:
        """Answer where a figure has a value."""
        left, top = self._browser.evaluate(f"{_PLACE}({json.dumps([figure, x, y])})")
        return Spot(round(left), round(top))

    def colour(self, spot: Spot) -> Colour:
        """Answer the colour of a pixel."""
        found = self._picture.getpixel(spot)
        assert isinstance(found, tuple)
        return found[0], found[1], found[2]

    def around(self, spot: Spot, reach: int = 4) -> Counter[Colour]:
        """Answer the colours near a place."""
        places = range(-reach, reach + 1)
        return Counter(self.colour(Spot(spot.x + right, spot.y + down)) for right in places for down in places)

    def row(self, start: Spot, end: Spot) -> Counter[Colour]:
        """Answer the colours from a place to one at its right."""
        return Counter(self.colour(Spot(x, start.y)) for x in range(start.x, end.x))

    def texts(self) -> list[str]:
        """Answer what stands on the page outside of what is drawn: headings, titles of legends, tips."""
        found: list[str] = self._browser.evaluate(_TEXTS)
        return found

    def point_at(self, spot: Spot) -> None:
        """Move the mouse there."""
        self._browser.point_at(*spot)


def rgb(name: str, opacity: float = 1.0) -> Colour:
    """Answer a colour as it is seen on white."""
    parts = (int(name[at : at + 2], 16) for at in (1, 3, 5))
    red, green, blue = (round(255 + (part - 255) * opacity) for part in parts)
    return red, green, blue


def close(one: Colour, other: Colour, by: int = 3) -> bool:
    """Whether nobody could tell two colours apart."""
    return all(abs(mine - its) <= by for mine, its in zip(one, other, strict=True))


def share(of: Counter[Colour], colour: Colour, by: int = 3) -> float:
    """Answer the share of pixels that have a colour."""
    return sum(number for found, number in of.items() if close(found, colour, by)) / of.total()
