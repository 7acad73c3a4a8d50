"""The heap once more in plain Python: the same answers step by step, so that each of the two can judge the other.

Not a fallback: it is written to be read and to be broken. Every rule is a method of its own, so that a test can
override one and show that the difference is seen.
"""

from tests.reference.heap import ReferenceHeap

__all__ = ["ReferenceHeap"]
