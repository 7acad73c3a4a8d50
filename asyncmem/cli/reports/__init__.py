"""The commands that read a file of records, one a file; `asyncmem.insight.reports` has their figures."""

from asyncmem.cli.reports.export import export
from asyncmem.cli.reports.leaks import leaks
from asyncmem.cli.reports.plan import plan
from asyncmem.cli.reports.report import report
from asyncmem.cli.reports.segments import segments
from asyncmem.cli.reports.stats import stats
from asyncmem.cli.reports.summary import summary
from asyncmem.cli.reports.table import table
from asyncmem.cli.reports.timeline import timeline
from asyncmem.cli.reports.tree import tree
from asyncmem.cli.reports.waits import waits

REPORTS = (summary, stats, table, tree, timeline, segments, waits, leaks, plan, report, export)
