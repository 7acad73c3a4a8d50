"""Decisions: who is served next, when to grow, which freed memory is ready, what is stuck.

Nothing here awaits, and only ``retire`` talks to a device, through calls that do not block. Each module is a stranger
to the others; ``asyncmem.pool`` is where they meet.
"""
