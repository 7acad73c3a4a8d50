"""DLPack's structs by ctypes, for tests that look into a capsule or are a producer of their own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]

# CDLL's functions run without the interpreter's lock, as a consumer's own threads call deleters.
DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_USED = {b"dltensor": b"used_dltensor", b"dltensor_versioned": b"used_dltensor_versioned"}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


def consume(capsule: CapsuleType, name: bytes) -> tuple[Legacy | Versioned, Callable[[], None]]:
    """Take what a capsule holds, as a consumer does; return it and how to say that it is not needed any more."""
    address = _pointer(capsule, name)
    kind = Versioned if name == b"dltensor_versioned" else Legacy
    managed = kind.from_address(address)
    deleter = managed.deleter
    _rename(capsule, _USED[name])
    return managed, lambda: deleter(address)


class Producer:
    """Memory of another library: counts how often it is told that a consumer is done."""

    def __init__(
        self, address: int, shape: Sequence[int], strides: Sequence[int] | None = None, *, versioned: bool = True,
        dtype: tuple[int, int, int] = (0, 64, 1), device: tuple[int, int] = (1, 0), offset: int = 0,
    ) -> None:  # fmt: skip
        self.deleted = 0
        self.asked: list[dict[str, object]] = []
        self.device = device
        self._deleter = DELETER(self._delete)
        self._lengths = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self._strides = (ctypes.c_int64 * max(len(shape), 1))(*(strides or ()))
        steps = ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if strides is not None else None
        lengths = ctypes.cast(self._lengths, ctypes.POINTER(ctypes.c_int64))
        tensor = Tensor(address, *device, len(shape), *dtype, lengths, steps, offset)
        self.name = b"dltensor_versioned" if versioned else b"dltensor"
        self.managed = (
            Versioned(1, 0, None, self._deleter, 0, tensor) if versioned else Legacy(tensor, None, self._deleter)
        )

    def _delete(self, _managed: int) -> None:
        self.deleted += 1

    def __dlpack__(self, **asked: object) -> CapsuleType:
        self.asked.append(asked)
        capsule: CapsuleType = _new(ctypes.addressof(self.managed), self.name, None)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device
