"""A page as it is seen: colours at the places of data, and the text that stands there."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from .chromium import Chromium

Colour = tuple[int, int, int]

_TEXTS = """
(() => {
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode())
    if (!walker.currentNode.parentElement.closest("script, style, details")) found.push(walker.currentNode.textContent);
  return found.map(one => one.trim()).filter(Boolean);
})()
"""

# In the timeline the value is a height or the name of a mark, in the map the number of a segment, else a depth.
_PLACE = """
(([name, x, y]) => {
  const box = document.querySelector(`#${name} svg`).getBoundingClientRect();
  const view = views[name === "timeline" ? "time" : name];
  if (name !== "timeline") return [box.left + view.x(x), box.top + y * 24 + 12];
  const mark = data.marks.findIndex(one => one.name === y);
  if (mark >= 0) return [box.left + view.x(x), box.top + 290 + 34 + mark * 24 + 12];
  const axis = [...document.querySelectorAll("#timeline svg > text")].filter(one => one.textContent.endsWith("B"));
  const [low, high] = [axis[0], axis.at(-1)].map(one => one.getAttribute("y") - 4);
  const bytes = axis.at(-1).textContent.split(" ")[0] * 1024 ** 2;
  return [box.left + view.x(x), box.top + low - y / bytes * (low - high)];
})
"""

_CELL = """
(([icicle, frame]) => {
  const cell = document.querySelector(`svg[data-name=${icicle}] [data-frame*="(${frame})"] rect`);
  const box = cell.getBoundingClientRect();
  return [box.left, box.right, box.top, box.bottom];
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
        """Return where the timeline or the memory has a value."""
        left, top = self._browser.evaluate(f"{_PLACE}({json.dumps([figure, x, y])})")
        return Spot(round(left), round(top))

    def cell(self, icicle: str, function: str) -> tuple[Spot, Spot]:
        """Return the left and the right end of the first line of a function, in the middle of their height."""
        left, right, top, bottom = self._browser.evaluate(f"{_CELL}({json.dumps([icicle, function])})")
        middle = round((top + bottom) / 2)
        return Spot(round(left), middle), Spot(round(right), middle)

    def variable(self, name: str) -> Colour:
        """Return the colour that a part of a picture, such as "waited" or "tag0", has in this theme."""
        code = f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')"
        return rgb(self._browser.evaluate(code).strip())

    def colour(self, spot: Spot) -> Colour:
        """Return the colour of a pixel."""
        found = self._picture.getpixel(spot)
        assert isinstance(found, tuple)
        return found[0], found[1], found[2]

    def around(self, spot: Spot, reach: int = 4) -> Counter[Colour]:
        """Return the colours near a place."""
        places = range(-reach, reach + 1)
        return Counter(self.colour(Spot(spot.x + right, spot.y + down)) for right in places for down in places)

    def row(self, start: Spot, end: Spot) -> Counter[Colour]:
        """Return the colours from a place to one at its right."""
        return Counter(self.colour(Spot(x, start.y)) for x in range(start.x, end.x))

    def texts(self) -> list[str]:
        """Return what stands on the page outside of what is drawn: headings, titles of legends, tips."""
        found: list[str] = self._browser.evaluate(_TEXTS)
        return found

    def tip(self) -> list[str]:
        """Return what stands in the tip at the mouse; nothing without one."""
        code = "[...document.querySelectorAll('#tip:not([hidden]) td')].map(one => one.textContent)"
        found: list[str] = self._browser.evaluate(code)
        return found

    def point_at(self, spot: Spot) -> None:
        """Move the mouse there."""
        self._browser.point_at(*spot)


def rgb(name: str, opacity: float = 1.0) -> Colour:
    """Return a colour as it is seen on white."""
    parts = (int(name[at : at + 2], 16) for at in (1, 3, 5))
    red, green, blue = (round(255 + (part - 255) * opacity) for part in parts)
    return red, green, blue


def close(one: Colour, other: Colour, by: int = 3) -> bool:
    """Whether nobody could tell two colours apart."""
    return all(abs(mine - its) <= by for mine, its in zip(one, other, strict=True))


def share(of: Counter[Colour], colour: Colour, by: int = 3) -> float:
    """Return the share of pixels that have a colour."""
    return sum(number for found, number in of.items() if close(found, colour, by)) / of.total()
