# cython: language_level=3, binding=False, boundscheck=False, wraparound=False
"""Keep buffers by their size, and find one again: what `BucketPool` does at each call."""

from cpython.long cimport PyLong_CheckExact
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.object cimport PyObject
from libc.stdint cimport int64_t
from types import GenericAlias

from asyncmem.errors import Described, InvalidRequest
from asyncmem.units import MAX_SIZE, parse_size


cdef extern from *:
    """
    #include <Python.h>
    #include <stdint.h>
    /* The bucket of a size: that of the least power of two that is not below it. */
    static inline int bucket_of(int64_t size) { return size <= 1 ? 0 : 64 - __builtin_clzll((uint64_t)size - 1); }
    static inline PyObject *item_of(PyObject *list, Py_ssize_t at) { return PyList_GET_ITEM(list, at); }
    """
    int bucket_of(int64_t size)
    PyObject *item_of(PyObject *list, Py_ssize_t at)
    long long PyLong_AsLongLongAndOverflow(object number, int *overflow) except? -1


cdef enum:
    BUCKETS = 48

cdef int64_t MOST = MAX_SIZE


cdef inline int64_t read(object size) except -1:
    cdef int overflow = 0
    cdef int64_t found
    if PyLong_CheckExact(size):
        found = PyLong_AsLongLongAndOverflow(size, &overflow)
        if 0 <= found <= MOST:
            return found
    return parse_size(size)  # text, other integers, and errors


cdef class Buckets:
    """Buffers of any kind, by powers of two. Sizes are bytes; no call runs others' code while it changes this."""

    cdef list _kept
    cdef int64_t *_sizes
    cdef readonly Py_ssize_t max_pooled_per_bucket
    cdef readonly int64_t most
    cdef readonly int64_t pooled_bytes, used_bytes, peak_bytes
    cdef readonly Py_ssize_t pooled_buffers, active_buffers, hits, misses, allocations, drops

    def __cinit__(self, Py_ssize_t max_pooled_per_bucket, int64_t most):
        self.max_pooled_per_bucket = max_pooled_per_bucket
        self.most = most
        self._kept = [[] for _ in range(BUCKETS)]
        self._sizes = <int64_t *>PyMem_RawCalloc(BUCKETS * max(max_pooled_per_bucket, 1), sizeof(int64_t))
        if self._sizes is NULL:
            raise MemoryError

    def __dealloc__(self):
        PyMem_RawFree(self._sizes)

    @classmethod
    def __class_getitem__(cls, item):
        return GenericAlias(cls, item)

    def try_get(self, size, /):
        """Return a buffer of at least `size` bytes that was returned before, the newest first, or None.

        It is no larger than the next power of two.

        Raises:
            InvalidRequest: It is no size.
        """
        cdef int64_t wanted = read(size)
        cdef int bucket = bucket_of(wanted)
        cdef list kept = <list>item_of(<PyObject *>self._kept, bucket)
        cdef int64_t *sizes = self._sizes + bucket * self.max_pooled_per_bucket
        cdef Py_ssize_t last = len(kept) - 1
        cdef Py_ssize_t at = last
        cdef int64_t found
        while at >= 0 and sizes[at] < wanted:
            at -= 1
        if at < 0:
            self.misses += 1
            return None
        found = sizes[at]
        self.hits += 1
        self.pooled_bytes -= found
        self.pooled_buffers -= 1
        self.used_bytes += found
        self.active_buffers += 1
        if at == last:
            return kept.pop()
        sizes[at] = sizes[last]
        buffer, kept[at] = kept[at], kept.pop()
        return buffer

    def return_buffer(self, buffer, size, /):
        """Take a buffer of `size` bytes back, and tell whether it is kept; else its last reference is the caller's.

        It is not where its bucket is full, or what is in use and kept would exceed the limit.

        Raises:
            InvalidRequest: It is no size, or the buffer is here already.
        """
        cdef int64_t nbytes = read(size)
        cdef int bucket = bucket_of(nbytes)
        cdef list kept = <list>item_of(<PyObject *>self._kept, bucket)
        cdef Py_ssize_t count = len(kept)
        cdef Py_ssize_t at
        for at in range(count):
            if item_of(<PyObject *>kept, at) == <PyObject *>buffer:
                raise InvalidRequest("buffer", Described("one that is here already"), "a buffer that was taken")
        self.used_bytes = max(self.used_bytes - nbytes, 0)
        self.active_buffers = max(self.active_buffers - 1, 0)
        if count >= self.max_pooled_per_bucket or self.used_bytes + self.pooled_bytes + nbytes > self.most:
            self.drops += 1
            return False
        kept.append(buffer)
        self._sizes[bucket * self.max_pooled_per_bucket + count] = nbytes
        self.pooled_bytes += nbytes
        self.pooled_buffers += 1
        self._note_peak()
        return True

    def record_allocation(self, size, /):
        """Count a buffer that its user has just made, because `try_get` had none.

        Raises:
            InvalidRequest: It is no size.
        """
        self.used_bytes += read(size)
        self.active_buffers += 1
        self.allocations += 1
        self._note_peak()

    cdef inline void _note_peak(self):
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + self.pooled_bytes)

    def drop(self, keep=None, /):
        """Drop unused buffers, the largest first, until no more than `keep` bytes are left; return how many.

        None drops them all, those without bytes too.
        """
        cdef int64_t most = -1 if keep is None else read(keep)
        cdef list dropped = []
        cdef int64_t before = self.pooled_bytes
        cdef int bucket = BUCKETS - 1
        cdef list kept
        while self.pooled_bytes > most and bucket >= 0:
            kept = <list>item_of(<PyObject *>self._kept, bucket)
            if not kept:
                bucket -= 1
                continue
            self.pooled_bytes -= self._sizes[bucket * self.max_pooled_per_bucket + len(kept) - 1]
            self.pooled_buffers -= 1
            self.drops += 1
            dropped.append(kept.pop())
        # What the buffers do as they end comes last, with everything in order.
        return before - self.pooled_bytes
