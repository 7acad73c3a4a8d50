"""What a notebook shows of records: their pictures in a frame of their own, or text where there are none."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from asyncmem.insight.needs import need_bokeh
from asyncmem.insight.summary import summarize

if TYPE_CHECKING:
    from asyncmem.insight.records import Records

_PARTS: Final = 300
_HEIGHT: Final = 640


def mimebundle(records: Records) -> dict[str, str]:
    """Answer what records look like, by the names of formats, of which a notebook shows the richest that it can.

    The page stands in a frame: it works without an extension of the notebook, and in one that is read elsewhere later.
    """
    found = {"text/plain": summarize(records)}
    try:
        need_bokeh("drawing")
    except ModuleNotFoundError:
        return found
    from asyncmem.insight.pictures.drawn.document import document

    inner = escape(document(records, "asyncmem", _PARTS, with_summary=False))
    found["text/html"] = (
        f'<iframe srcdoc="{inner}" sandbox="allow-scripts allow-downloads" width="100%" height="{_HEIGHT}"'
        ' style="border: 1px solid #d0d7de"></iframe>'
    )
    return found
