"""Figures of Bokeh from the columns of `asyncmem.insight.pictures`, one a file as there."""
