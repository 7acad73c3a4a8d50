"""What PyObjC adds: objects that stand for others, methods with metadata, pools of temporary objects, and errors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .machine import FakeMetal


class error(Exception):  # PyObjC's name
    pass


class autorelease_pool:
    """Ends what was made within; the depth is counted for each thread."""

    _depths = threading.local()

    def __enter__(self) -> None:
        self._depths.now = self.depth() + 1

    def __exit__(self, *_: object) -> None:
        self._depths.now -= 1

    @classmethod
    def depth(cls) -> int:
        return getattr(cls._depths, "now", 0)


class objc_object:
    """An object of Objective-C as Python has it. Those that are new come with a reference that somebody owns."""

    def __init__(self, machine: FakeMetal, *, new: bool = False) -> None:
        self.machine = machine
        self._extra = 1 if new and not machine.knows_who_owns else 0

    def release(self) -> None:
        if not self._extra:
            self.machine.note(f"{type(self).__name__} was released once too often")
        self._extra -= 1

    def respondsToSelector_(self, name: str, /) -> bool:
        return hasattr(type(self), name.replace(":", "_"))


class Method:
    """A method that counts its calls and fails where it was told to; a colon takes an argument, no more, no fewer."""

    def __init__(self, function: Callable[..., Any], *, temporary: bool = False) -> None:
        self._function = function
        self._temporary = temporary
        functools.update_wrapper(self, function)

    def __get__(self, instance: objc_object | None, owner: type) -> Any:
        return self if instance is None else _Bound(instance, self._function, temporary=self._temporary)


class _Bound:
    def __init__(self, instance: objc_object, function: Callable[..., Any], *, temporary: bool) -> None:
        self._instance = instance
        self._function = function
        self._temporary = temporary
        self.__name__ = function.__name__

    def __call__(self, *arguments: Any) -> Any:
        if len(arguments) != self.__name__.count("_"):
            raise TypeError(f"{self.__name__} takes {self.__name__.count('_')} arguments, not {len(arguments)}")
        machine = self._instance.machine
        if self._temporary and not autorelease_pool.depth():
            machine.note(f"{self.__name__} makes a temporary object, and no pool is there to end it")
        return None if machine.enter(self.__name__) else self._function(self._instance, *arguments)

    def __metadata__(self) -> dict[str, Any]:
        owned = self.__name__.startswith("new") and self._instance.machine.knows_who_owns
        return {"retval": {"type": b"@", **({"already_retained": True} if owned else {})}}


def method(function: Callable[..., Any]) -> Any:
    """Make a method of PyObjC's."""
    return Method(function)


def temporary(function: Callable[..., Any]) -> Any:
    """Make a method whose answer nobody owns."""
    return Method(function, temporary=True)


def pyobjc_id(thing: objc_object) -> int:
    return id(thing)
