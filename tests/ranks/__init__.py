"""Tests of groups of processes."""
