"""Producers and consumers that share memory without stalling or deadlock."""
