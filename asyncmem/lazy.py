"""numpy, imported when something of it is first used: it takes longer than all else that `import asyncmem` does."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            found = self.__dict__[name] = getattr(import_module(self.__name__), name)
            return found

    np = _Lazy("numpy")
