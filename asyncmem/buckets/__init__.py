"""Buffers of any kind, kept by their size. It stands apart: it makes none, and knows no pool and no device."""

from asyncmem.buckets.pool import BucketPool, BucketStats

__all__ = ["BucketPool", "BucketStats"]
