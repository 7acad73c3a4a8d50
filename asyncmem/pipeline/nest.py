"""Nests: tuples, lists, dicts and dataclasses of anything, and what is done to each of their leaves."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def changed(nest: object, change: Callable[[object], object]) -> object:
    """Answer a nest of the same kind and shape, with what `change` makes of each leaf, in order.

    Named tuples, subclasses of dict and list, and dataclasses keep their types. Whatever else there is, is a leaf.
    """
    if isinstance(nest, MutableMapping):
        mapping = copy.copy(nest)
        for key, part in nest.items():
            mapping[key] = changed(part, change)
        return mapping
    if isinstance(nest, list):
        parts = copy.copy(nest)
        parts[:] = [changed(part, change) for part in nest]
        return parts
    if type(nest) is tuple:
        return tuple(changed(part, change) for part in nest)
    if isinstance(nest, tuple) and hasattr(nest, "_make"):
        return nest._make(changed(part, change) for part in nest)
    if is_dataclass(nest) and not isinstance(nest, type):
        record = copy.copy(nest)
        for one in fields(nest):
            object.__setattr__(record, one.name, changed(getattr(nest, one.name), change))
        return record
    return change(nest)
