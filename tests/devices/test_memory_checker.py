"""Memory annotations reach a tool that listens, in the words of the protocol, and cost nothing where none does."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from asyncmem.devices.memory_checker import VARIABLE, Sanitizer, attached_checker
from tests.compiler import find_compiler

SOURCE = Path(__file__).with_name("listening_tool.cpp")
SEGMENT = 0x7F00_0000_0000
MIB = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are tools for Linux alone")


def build(folder: Path, *options: str) -> Path:
    library = folder / "tool.so"
    subprocess.run([find_compiler(), "-std=c++17", "-shared", "-fPIC", *options, "-o", library, SOURCE], check=True)
    return library


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(tmp_path_factory.mktemp("tool"))))
    library.what_was_heard.restype = ctypes.POINTER(ctypes.c_longlong * 8)
    return library


def heard(tool: ctypes.CDLL) -> list[int]:
    return list(tool.what_was_heard().contents)


def test_a_tool_hears_of_segments_and_blocks(tool: ctypes.CDLL) -> None:
    """Each call arrives as the protocol says, with address and size, in a domain of our name."""
    checker = Sanitizer(tool)
    checker.open_segment(SEGMENT, MIB)
    assert heard(tool) == [1, 1, 0, 0, 0, 0, MIB, SEGMENT]
    checker.open_block(SEGMENT + 512, 777)
    assert heard(tool) == [1, 1, 0, 1, 0, 0, MIB + 777, SEGMENT + 512]
    checker.close_block(SEGMENT + 512)
    checker.close_segment(SEGMENT)
    checker.close_segment(SEGMENT)
    assert heard(tool) == [1, 1, 1, 1, 1, 0, MIB + 777, SEGMENT + 512]


def test_a_tool_without_memory_annotations_is_let_be(tmp_path: Path) -> None:
    """A profiler that listens to other annotations is no memory checker."""
    library = ctypes.CDLL(str(build(tmp_path, "-DNO_EXTENSION")))
    with pytest.raises(OSError, match="does not listen"):
        Sanitizer(library)


@pytest.mark.parametrize("value", [None, "", "/no/such/library.so"])
def test_without_a_tool_there_is_no_checker(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    """Most processes have none, and a wrong name does no harm."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    attached_checker.cache_clear()
    assert attached_checker() is None


def test_an_attached_tool_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tool's library is loaded from where the variable says, once."""
    monkeypatch.setenv(VARIABLE, str(build(tmp_path)))
    attached_checker.cache_clear()
    try:
        checker = attached_checker()
        assert checker is not None
        assert attached_checker() is checker
    finally:
        attached_checker.cache_clear()
