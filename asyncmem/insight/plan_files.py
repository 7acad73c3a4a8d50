"""Plans in files of JSON, so that one program may be planned and another served by it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncmem.errors import Described, InvalidRequest
from asyncmem.files import read_json
from asyncmem.pool.placement import PlannedPlace, ReusePlan
from asyncmem.text import to_json

if TYPE_CHECKING:
    from os import PathLike

_VERSION: Final = 1
_NUMBERS: Final = ("nbytes", "start", "end", "offset")
_MOST: Final = 1 << 48
"""More than any device has bytes, or any recording has records."""


def write_plan(plan: ReusePlan, path: str | PathLike[str]) -> None:
    """Write a plan to a file, for `read_plan`; what was there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_text(spelled(plan), encoding="utf-8")


def spelled(plan: ReusePlan) -> str:
    """Return a plan as it stands in a file: a place a line."""
    places = ",\n".join(to_json(place._asdict()) for place in plan.places)
    return f'{{"version": {_VERSION}, "align": {plan.align}, "places": [\n{places}\n]}}\n'


def read_plan(path: str | PathLike[str]) -> ReusePlan:
    """Read a plan that `write_plan` or ``asyncmem plan`` wrote; it is checked as every plan is.

    Raises:
        InvalidRequest: It is no such file, or of a version that this asyncmem does not know, or its places are in each
            other's way.
        OSError: It cannot be read.
    """
    expected = "a plan, as asyncmem plan writes it"
    try:
        found = read_json(path)
    except ValueError as error:
        raise InvalidRequest("plan", Described(f"{path}: {error}"), expected) from error
    match found:
        case {"version": int(version)} if version > _VERSION:
            raise InvalidRequest("plan", Described(f"{path} of version {version}"), f"version {_VERSION}")
        case {"version": int(), "align": int(align), "places": list(places)} if align < _MOST and all(
            map(_is_place, places)
        ):
            return ReusePlan(
                tuple(PlannedPlace(one["key"], *(one[name] for name in _NUMBERS)) for one in places), align
            )
    raise InvalidRequest("plan", Described(f"{path} with something else"), expected)


def _is_place(one: object) -> bool:
    return (
        isinstance(one, dict)
        and isinstance(one.get("key", 0), str | None)
        and all(type(one.get(name)) is int and 0 <= one[name] < _MOST for name in _NUMBERS)
    )
