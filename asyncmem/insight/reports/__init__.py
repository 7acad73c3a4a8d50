"""Reports on records, one a file: functions that answer figures. The commands of the same names print them."""

from asyncmem.insight.reports.leaks import Leak, Leaks, leaks
from asyncmem.insight.reports.segments import Piece, Segment, Segments, segments
from asyncmem.insight.reports.stats import LifeClass, SizeClass, Stats, stats
from asyncmem.insight.reports.summary import Summary, summary
from asyncmem.insight.reports.table import Row, Table, table
from asyncmem.insight.reports.timeline import Moment, Timeline, timeline
from asyncmem.insight.reports.tree import Node, Tree, tree
from asyncmem.insight.reports.waits import WaitingLine, Waits, waits

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
