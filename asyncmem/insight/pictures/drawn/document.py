"""The page: a summary as text, and the pictures below it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from bokeh.embed import components
from bokeh.model import Model
from bokeh.resources import Resources

from asyncmem.insight.pictures.drawn.parts import Part, all_parts
from asyncmem.insight.summary import summarize

if TYPE_CHECKING:
    from asyncmem.insight.records import Records

_STYLE: Final = """
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1.5em; color: #1b1f24;
  background: #fff }
h1 { font-size: 1.6em; margin: 0 0 .6em } h2 { font-size: 1.2em; margin: 2em 0 .2em }
p { margin: .2em 0 .8em; color: #57606a; max-width: 60em }
pre { background: #f6f8fa; padding: 1em; overflow-x: auto; border-radius: 6px; margin: 0 }
.said, .nothing { color: #1b1f24 }
"""


def document(records: Records, title: str, parts: int, *, with_summary: bool) -> str:
    """Lay out the page: its text, the pictures, and the browser's half of Bokeh, so that it needs nothing else."""
    head = f"<h1>{escape(title)}</h1>\n<pre>{escape(summarize(records))}</pre>\n" if with_summary else ""
    shown = all_parts(records, parts)
    drawn: dict[str, Model] = {part.name: part.drawn for part in shown if part.drawn is not None}
    script, divs = components(drawn) if drawn else ("", {})
    sections = "\n".join(_section(part, divs.get(part.name)) for part in shown)
    # Bokeh's widgets, tables and formulas are not used, and stay out.
    bokeh = Resources(mode="inline", components=["bokeh"]).render() if drawn else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n{bokeh}\n</head>\n<body>\n{head}"
        f"{sections}\n{script}\n</body>\n</html>\n"
    )


def _section(part: Part, div: str | None) -> str:
    content = (
        f'<p class="nothing">{part.nothing}</p>'
        if div is None
        else f'<p>{part.reading}</p>\n<p class="said">{part.said}.</p>\n{div}'
    )
    return f'<section id="{part.name}">\n<h2>{part.heading}</h2>\n{content}\n</section>'
