"""Training over several processes of a host, each with its own stages of a model or its own share of the data.

Import it by name: nothing else does.
"""

from asyncmem.ranks.ranks import Ranks

__all__ = ["Ranks"]
