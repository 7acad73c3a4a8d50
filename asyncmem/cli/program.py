"""A Python program that runs in this process as the interpreter would run it."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

import click

INTERRUPTED: Final = 130
"""The status of a program that Ctrl-C has ended, by the shells' convention: 128 and the signal's number."""


class Program:
    """A script, or a module as ``python -m`` runs it, with arguments, import path and main module of its own.

    Args:
        name: The script's file, or the module's name.
        is_module: Which of them it is.

    Attributes:
        file: The file of its source.

    Raises:
        click.UsageError: There is none of that name; the text says what is missing.
    """

    def __init__(self, name: str, *, is_module: bool) -> None:
        self._main = ModuleType("__main__")
        vars(self._main)["__builtins__"] = builtins
        self._loader = self._find_module(name) if is_module else self._find_script(name)
        self.file = self._main.__file__ = self._loader.path
        self._main.__loader__ = self._loader
        self._name = self.file if is_module else name

    def run(self, arguments: Sequence[str]) -> int:
        """Run it, and return its exit status; what it raises is shown as the interpreter does.

        Recorded lines end here: `asyncmem.insight.reading` knows this function by its name.
        """
        sys.argv = [self._name, *arguments]
        sys.modules["__main__"] = self._main  # and stays it, for what goes on after the program's end
        try:
            code = self._loader.source_to_code(self._loader.get_data(self.file), self.file)
            exec(code, vars(self._main))  # noqa: S102 -- that is what it is for
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            sys.stderr.write(f"{end.code}\n")
            return 1
        except BaseException as error:  # noqa: BLE001 -- the program's last error, whatever it is
            _show(error)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        return 0

    def _find_script(self, name: str) -> SourceFileLoader:
        path = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118 -- as the interpreter names it: "./" is kept
        if not Path(path).is_file():
            raise click.UsageError(f"there is no file {name!r}")
        _lead_imports_with(str(Path(path).resolve().parent))
        return SourceFileLoader("__main__", path)

    def _find_module(self, name: str) -> SourceFileLoader:
        _lead_imports_with(str(Path.cwd()))
        spec = _spec(name)
        if spec.submodule_search_locations is not None:
            spec = _spec(f"{name}.__main__")
        if not isinstance(spec.loader, SourceFileLoader):
            raise click.UsageError(f"module {name!r} has no source that could be run")
        self._main.__spec__ = spec
        self._main.__package__ = spec.parent
        return spec.loader


def _spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise click.UsageError(f"module {name!r} was not found: {error}") from error
    if spec is None:
        raise click.UsageError(f"there is no module {name!r}")
    return spec


def _lead_imports_with(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


_OURS: Final = (__file__, "<frozen importlib._bootstrap_external>", "<frozen importlib._bootstrap>")
