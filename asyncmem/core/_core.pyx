# distutils: language = c++
# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, initializedcheck=False
# A copied or unpickled handle would free its block twice; signatures are for help() and for the test of the stub.
# cython: auto_pickle=False, embedsignature=True, embedsignature.format=clinic
"""The binding over the C++ heap and scheduler, and the handles that users hold: Buffer, Batch, Ready, Request, and the
methods of Allocator."""

cimport cython
from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS, PyBUF_FORMAT, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_Fetch, PyErr_Restore, PyErr_SetObject, PyErr_WriteUnraisable
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetName, PyCapsule_GetPointer
from cpython.unicode cimport PyUnicode_FromObject
from cpython.weakref cimport PyWeakref_NewRef
from libc.stdint cimport int32_t, int64_t, intptr_t, uint8_t, uint16_t, uint32_t, uint64_t
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF, Py_XINCREF
from cython.operator cimport dereference as deref
from libcpp.string cimport string
from libcpp.unordered_map cimport unordered_map
from libcpp.utility cimport pair
from libcpp.vector cimport vector

import _signal
import asyncio
import os
import queue
import signal
import sys
import threading
from asyncio import InvalidStateError
from collections import deque
from copy import copy
from functools import partial
from time import monotonic, sleep
from types import GenericAlias
from weakref import KeyedRef

from asyncmem.synonyms import BUFFER as _BUFFER, Elsewhere as _Elsewhere
from asyncmem.core.report import (
    AccountCounts, BlockInfo, HeapCorrupted, HeapCounts, LogPart as Part, Move, Piece, Plan, ReplaySample, ReplayTally,
    ReplayWaste, RetireCounts, SegmentCounts,
)
from asyncmem.errors import BufferReleased, DeviceError, InvalidRequest, OutOfMemoryError, RequestCancelled
from asyncmem.text import printable as _printable, quoted as _quoted
from asyncmem.units import parse_duration as _parse_duration, parse_size as _parse_size

cdef extern from "pythread.h":
    unsigned long PyThread_get_thread_ident() noexcept

include "binding/heap_api.pxi"
include "binding/methods.pxi"

GRANULE = 512
MAX_SIZE = max_size
NO_LIMIT = no_limit
FLAG_WAITING = 1
REASON_MEMORY, REASON_PAGES = 1, 4

include "binding/heap.pxi"
include "binding/policy.pxi"
include "binding/scheduler_api.pxi"
include "binding/scheduler.pxi"
include "binding/witness.pxi"
include "binding/core.pxi"
include "binding/lanes.pxi"
include "binding/retire.pxi"
include "binding/buffer.pxi"
include "binding/spares.pxi"
include "binding/batch.pxi"
include "binding/ready.pxi"
include "binding/request.pxi"
include "binding/allocator.pxi"
include "binding/route.pxi"
include "binding/pointers.pxi"
include "binding/interrupts.pxi"
include "binding/quick.pxi"
include "binding/replay.pxi"
