"""`page`: all pictures of records in one file, which needs nothing but a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.insight.needs import need_bokeh
from asyncmem.insight.pictures.thinning import PARTS

if TYPE_CHECKING:
    from asyncmem.insight.records import Records


def page(records: Records, title: str = "asyncmem") -> str:
    """Answer a page of HTML with all pictures of records, and what they come to as text above.

    It has all in it that it shows, and asks no other machine for anything. Where more has happened than a screen can
    show, the highest and lowest of every moment are there, so that no peak is lost.

    Args:
        records: What happened.
        title: What stands above.

    Raises:
        ModuleNotFoundError: Bokeh is missing, which the extra `pictures` installs.
    """
    need_bokeh("drawing")
    from asyncmem.insight.pictures.drawn.document import document

    return document(records, title, PARTS, with_summary=True)
