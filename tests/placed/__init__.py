"""Pipelines over workers: decisions on a virtual network, and processes that are real."""
