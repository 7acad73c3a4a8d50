"""Promises of stream order: no block is used before every earlier use of it is done or waited for."""
