"""Pictures of records: what each shows as columns, one a file, and `page`, which has all of them drawn.

Columns need numpy alone. `drawn` draws them with Bokeh, from the extra `pictures`, and is imported when that is asked
for.
"""

from asyncmem.insight.pictures.icicle import Cell, Icicle, at_the_peak, leaked, waited
from asyncmem.insight.pictures.marks import Marks, Moments, Spans, marks
from asyncmem.insight.pictures.memory_map import Block, MemoryMap, Row, memory_map
from asyncmem.insight.pictures.notebook import mimebundle
from asyncmem.insight.pictures.page import page
from asyncmem.insight.pictures.timeline import Band, LiveByTag, live_by_tag

__all__ = [
    "Band",
    "Block",
    "Cell",
    "Icicle",
    "LiveByTag",
    "Marks",
    "MemoryMap",
    "Moments",
    "Row",
    "Spans",
    "at_the_peak",
    "leaked",
    "live_by_tag",
    "marks",
    "memory_map",
    "mimebundle",
    "page",
    "waited",
]
