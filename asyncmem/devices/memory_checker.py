"""What is reported to a memory checker of a device's segments and blocks, and how to compute-sanitizer.

compute-sanitizer knows what the driver handed out, which for a pool is whole segments: a kernel that writes past its
block, or into one that was freed, hits memory that is in use. NVTX's memory extension is the protocol for telling
it more. A tool names its library in a variable; the library fills in the functions it wants called. This module speaks
that protocol as it is in memory, so nothing has to be installed. Where no tool is attached it costs one look at the
environment, and the pool's fast ways stay as they are. Where one is attached, all segments come from cuMemAlloc, of
whatever kind they are: compute-sanitizer refuses reports of blocks in mapped or stream-ordered memory.

The checker goes by the host's order: a block that is freed while its kernel still runs counts as trespassed on. So run
it with `--force-blocking-launches`.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ssize_t, c_uint16, c_uint32, c_void_p
from typing import Final, final

VARIABLE: Final = "NVTX_INJECTION64_PATH"
_DOMAIN: Final = b"asyncmem"

# nvToolsExt.h and nvToolsExtMem.h (NVTX 3.0; memory extension 1.2): the numbers of the protocol.
_VERSION: Final = 3
_MEMORY_MODULE: Final = 1
_MEMORY_VERSION: Final = 0x0102
_MEMORY_SLOTS: Final = 63
_HEAP_REGISTER, _HEAP_UNREGISTER, _REGIONS_REGISTER, _REGIONS_UNREGISTER = 0, 1, 3, 5
_SUB_ALLOCATOR: Final = 1  # a heap's usage: nothing in it may be touched that is not a region
_VIRTUAL_ADDRESS: Final = 1  # a range's type
_BY_POINTER: Final = 1  # how a region is referred to
_TABLE_SIZES: Final = {1: 16, 2: 9, 3: 15, 4: 7, 5: 16, 6: 7}  # functions of each plain module, the one at 0 included
_CORE2, _DOMAIN_CREATE = 5, 12
_CALLBACKS, _VERSIONS = 1, 3  # the tables that a tool may ask for


class _Range(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("pointer", c_void_p))


class _Heap(ctypes.Structure):
    _fields_ = (
        ("version", c_uint16), ("struct_size", c_uint16), ("reserved", c_uint32), ("usage", c_uint32),
        ("type", c_uint32), ("desc_size", c_size_t), ("desc", c_void_p), ("category", c_uint32),
        ("message_type", c_uint32), ("message", c_void_p),
    )  # fmt: skip


class _Regions(ctypes.Structure):
    _fields_ = (
        ("version", c_uint16), ("struct_size", c_uint16), ("type", c_uint32), ("heap", c_void_p), ("count", c_size_t),
        ("element_size", c_size_t), ("elements", c_void_p), ("handles_out", c_void_p),
    )  # fmt: skip


class _References(ctypes.Structure):
    _fields_ = (
        ("version", c_uint16), ("struct_size", c_uint16), ("type", c_uint32), ("count", c_size_t),
        ("element_size", c_size_t), ("elements", c_void_p),
    )  # fmt: skip


class _Functions(ctypes.Structure):
    _fields_ = (("number", c_size_t), ("count", c_size_t), ("slots", c_void_p))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("nvtx", c_uint16), ("struct_size", c_uint16), ("module", c_uint16), ("version", c_uint16),
        ("segment_count", c_size_t), ("segments", POINTER(_Functions)), ("get_export", c_void_p), ("info", c_void_p),
    )  # fmt: skip


class _Callbacks(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("get_table", c_void_p))


class _Versions(ctypes.Structure):
    _fields_ = (("struct_size", c_size_t), ("version", c_uint32), ("reserved", c_uint32), ("set_version", c_void_p))


_GetTable = ctypes.CFUNCTYPE(c_int, c_int, c_void_p, c_void_p)  # the last two are written to, unless null
_SetVersion = ctypes.CFUNCTYPE(None, c_uint32)
_GetExport = ctypes.CFUNCTYPE(c_void_p, c_uint32)
_CreateDomain = ctypes.CFUNCTYPE(c_void_p, c_char_p)
_Register = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p)  # (domain, description) -> heap
_Describe = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)  # (domain, description or heap)


@final
class _PlainTool:
    """The tool's plain part, which makes the domain; it may leave it to 0, the default."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._slots = {module: (c_void_p * size)() for module, size in _TABLE_SIZES.items()}
        self._tables = {module: self._table(module) for module in _TABLE_SIZES}
        self._get_table = _GetTable(self._answer_table)
        self._set_version = _SetVersion(lambda version: None)  # noqa: ARG005  # the protocol's name for it
        self._callbacks = _Callbacks(ctypes.sizeof(_Callbacks), ctypes.cast(self._get_table, c_void_p))
        versions = ctypes.cast(self._set_version, c_void_p)
        self._versions = _Versions(ctypes.sizeof(_Versions), _VERSION, 0, versions)
        self._exports = {_CALLBACKS: ctypes.addressof(self._callbacks), _VERSIONS: ctypes.addressof(self._versions)}
        self._get_export = _GetExport(self._exports.get)
        start = getattr(library, "InitializeInjectionNvtx2", None)
        self.domain: int | None = None
        create = self._slots[_CORE2][_DOMAIN_CREATE] if start is not None and start(self._get_export) else None
        if create:
            self.domain = _CreateDomain(create)(_DOMAIN)

    def _table(self, module: int) -> ctypes.Array[c_void_p]:
        slots, count = self._slots[module], _TABLE_SIZES[module]
        first, step = ctypes.addressof(slots), ctypes.sizeof(c_void_p)
        return (c_void_p * (count + 1))(None, *(first + step * number for number in range(1, count)), None)

    def _answer_table(self, module: int, table: int | None, size: int | None) -> int:
        if module not in self._tables:
            return 0
        if table:
            c_void_p.from_address(table).value = ctypes.addressof(self._tables[module])
        if size:
            c_uint32.from_address(size).value = _TABLE_SIZES[module]
        return 1


@final
class Sanitizer:
    """A tool that listens. Segments and blocks are reported by address, from any thread; that never fails.

    A pool on a device that has one goes the slower way for every request, so that it can tell of each block.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Introduce asyncmem to the tool.

        Raises:
            OSError: It does not listen to memory annotations.
        """
        self._library = library
        self._plain = _PlainTool(library)
        self._slots = (c_ssize_t * _MEMORY_SLOTS)()
        functions = _Functions(1, _MEMORY_SLOTS, ctypes.addressof(self._slots))
        self._functions = functions
        self._module = _Extension(
            _VERSION, ctypes.sizeof(_Extension), _MEMORY_MODULE, _MEMORY_VERSION, 1, ctypes.pointer(functions)
        )
        start = getattr(library, "InitializeInjectionNvtxExtension", None)
        wanted = (_HEAP_REGISTER, _HEAP_UNREGISTER, _REGIONS_REGISTER, _REGIONS_UNREGISTER)
        # A slot that the tool leaves alone stays 0; 1 is the protocol's word for "not wanted".
        if start is None or not start(ctypes.byref(self._module)) or any(self._slots[one] in {0, 1} for one in wanted):
            raise OSError(f"{library._name} does not listen to memory annotations")
        self._register = _Register(self._slots[_HEAP_REGISTER])
        self._unregister = _Describe(self._slots[_HEAP_UNREGISTER])
        self._add = _Describe(self._slots[_REGIONS_REGISTER])
        self._remove = _Describe(self._slots[_REGIONS_UNREGISTER])
        self._heaps: dict[int, tuple[int, int | None]] = {}  # by address: bytes, and the tool's handle
        self._busy = threading.Lock()

    def open_segment(self, address: int, nbytes: int) -> None:
        """Report a new segment, of which nothing may be touched yet."""
        extent = _Range(nbytes, address)
        heap = _Heap(
            version=_MEMORY_VERSION, struct_size=ctypes.sizeof(_Heap), usage=_SUB_ALLOCATOR, type=_VIRTUAL_ADDRESS,
            desc_size=ctypes.sizeof(extent), desc=ctypes.addressof(extent),
        )  # fmt: skip
        with self._busy:
            self._heaps[address] = nbytes, self._register(self._plain.domain, ctypes.addressof(heap))

    def close_segment(self, address: int) -> None:
        """Report the end of a segment, before it goes back to the driver."""
        with self._busy:
            known = self._heaps.pop(address, None)
            if known is not None:
                self._unregister(self._plain.domain, known[1])

    def open_block(self, address: int, nbytes: int) -> None:
        """Report that a block may be used from now on, to its last byte and no further."""
        extent = _Range(nbytes, address)
        regions = _Regions(
            version=_MEMORY_VERSION, struct_size=ctypes.sizeof(_Regions), type=_VIRTUAL_ADDRESS,
            count=1, element_size=ctypes.sizeof(extent), elements=ctypes.addressof(extent),
        )  # fmt: skip
        with self._busy:
            regions.heap = self._heap_of(address)
            self._add(self._plain.domain, ctypes.addressof(regions))

    def close_block(self, address: int) -> None:
        """Report that a block may not be used any more."""
        pointer = c_void_p(address)
        references = _References(
            version=_MEMORY_VERSION, struct_size=ctypes.sizeof(_References), type=_BY_POINTER,
            count=1, element_size=ctypes.sizeof(pointer), elements=ctypes.addressof(pointer),
        )  # fmt: skip
        with self._busy:
            self._remove(self._plain.domain, ctypes.addressof(references))

    def _heap_of(self, address: int) -> int | None:
        for start, (nbytes, heap) in self._heaps.items():
            if start <= address < start + nbytes:
                return heap
        return None


@functools.cache
def attached_checker() -> Sanitizer | None:
    """Return the memory checker that this process was started under, or None; the same one each time.

    The first call comes after the driver has been initialized: the tool needs that.
    """
    # Asked of the C library: a tool may set it when the driver starts, which `os.environ` does not show.
    ask = ctypes.CDLL(None).getenv
    ask.restype = c_char_p
    path = ask(VARIABLE.encode())
    if not path:
        return None
    try:
        return Sanitizer(ctypes.CDLL(os.fsdecode(path)))
    except OSError:
        return None  # a profiler, say, that listens to other annotations
