"""Tells from a stage's code that it takes no memory of its share, so that none has to be kept free for it.

What a function did with the items before says nothing certain about the next. Its code does, in one case: where it
never looks at its share, or at nothing of it but the stream. Of any other function all that is known is that it may
ask for memory.
"""

from __future__ import annotations

import dis
from itertools import pairwise
from types import FunctionType, MethodType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

_BACK_DOORS = frozenset({"eval", "exec", "locals", "vars"})
"""What reaches a variable without its name."""


def works_in_place(function: object) -> bool:
    """Say whether it is certain that a stage's function allocates nothing from its share.

    Args:
        function: A function of an item and a share, or what can be called like one. Nothing is certain of what is
            compiled, and of a wrapper that takes any arguments.
    """
    at = 1
    if not isinstance(function, FunctionType | MethodType):
        function = getattr(function, "__call__", None)  # noqa: B004 - what it is matters, not whether it is there
    if isinstance(function, MethodType):
        function, at = function.__func__, 2
    if not isinstance(function, FunctionType) or function.__code__.co_argcount <= at:
        return False
    code = function.__code__
    return not _may_take(code, code.co_varnames[at])


def _may_take(code: CodeType, share: str) -> bool:
    if share in code.co_cellvars or not _BACK_DOORS.isdisjoint(code.co_names):
        return True
    return any(_takes(step, then, share) for step, then in pairwise(dis.get_instructions(code)))


def _takes(step: dis.Instruction, then: dis.Instruction, share: str) -> bool:
    # From Python 3.13 on one instruction may name two variables; what follows works on the second.
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    reads_stream = then.opname == "LOAD_ATTR" and then.argval == "stream"
    return share in named[:-1] or (share in named and not reads_stream)
