"""Reports on records: functions that return figures. The commands of the same names print them."""

from asyncmem.insight.reports.lines import (
    Leak,
    Leaks,
    Node,
    Row,
    Table,
    Tree,
    WaitClass,
    WaitingLine,
    Waits,
    leaks,
    table,
    tree,
    waits,
)  # fmt: skip
from asyncmem.insight.reports.segments import Piece, Segment, Segments, segments
from asyncmem.insight.reports.summary import LifeClass, SizeClass, Stats, Summary, stats, summary
from asyncmem.insight.reports.timeline import Moment, Timeline, timeline

__all__ = [
    "Leak",
    "Leaks",
    "LifeClass",
    "Moment",
    "Node",
    "Piece",
    "Row",
    "Segment",
    "Segments",
    "SizeClass",
    "Stats",
    "Summary",
    "Table",
    "Timeline",
    "Tree",
    "WaitClass",
    "WaitingLine",
    "Waits",
    "leaks",
    "segments",
    "stats",
    "summary",
    "table",
    "timeline",
    "tree",
    "waits",
]
