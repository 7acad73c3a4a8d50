"""A stand-in for Metal and PyObjC, which runs what it is given.

`FakeMetal` is one machine with its GPU: queues that run command buffers in order on a thread that Python does not
list, buffers that are real memory, events, faults on demand, and the rules of Metal: each breach is noted in `wrong`.
"""

from .machine import TIMED_OUT, FakeMetal

__all__ = ["TIMED_OUT", "FakeMetal"]
