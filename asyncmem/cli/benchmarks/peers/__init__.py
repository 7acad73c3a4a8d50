"""The allocators that `asyncmem bench --peers` measures beside asyncmem, each family in a process of its own."""

from asyncmem.cli.benchmarks.peers.family import FAMILIES, Absent, Family, absent, family

__all__ = ["FAMILIES", "Absent", "Family", "absent", "family"]
