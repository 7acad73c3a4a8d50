# Batch: buffers that were granted together, all or none.

@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class Batch:
    """A sequence of buffers in the order asked. free(), leaving its `with` block and dropping it free them together.

    Buffers that are also held elsewhere outlive a batch that is dropped.
    """

    cdef tuple buffers
    cdef Core core
    cdef object __weakref__

    def __dealloc__(self):
        if self.buffers is not None and (<PyObject*>self.buffers).ob_refcnt == 1:
            _give_together(self.core, self.buffers, True)

    def free(self):
        """Free every buffer under one lock; those freed already are left alone."""
        _give_together(self.core, self.buffers, False)
        for buffer in self.buffers:
            (<Buffer>buffer).free()

    @property
    def nbytes(self):
        """Bytes asked for, all buffers together."""
        return sum([(<Buffer>buffer).nbytes for buffer in self.buffers])

    def __len__(self):
        return len(self.buffers)

    def __iter__(self):
        cdef BatchIterator iterator = BatchIterator.__new__(BatchIterator)
        iterator.batch = self
        return iterator

    def __reversed__(self):
        return reversed(self.buffers)

    def __getitem__(self, index):
        return self.buffers[index]

    def __contains__(self, buffer):
        return buffer in self.buffers

    def index(self, *arguments):
        """Return the position of a buffer."""
        return self.buffers.index(*arguments)

    def count(self, buffer):
        """Return how often a buffer occurs: 0 or 1."""
        return self.buffers.count(buffer)

    def __repr__(self):
        alive = sum([(<Buffer>buffer).alive for buffer in self.buffers])
        return f"<Batch of {len(self.buffers)} buffers, {self.nbytes} B, {alive} alive>"

    def __enter__(self):
        for buffer in self.buffers:
            buffer.__enter__()
        return self

    def __exit__(self, *details):
        for buffer in self.buffers:
            buffer.__exit__()

    def __aenter__(self):
        return _granted(self.__enter__(), self.nbytes)

    def __aexit__(self, *details):
        self.__exit__()
        return _granted(None, -1)


cdef Batch _batch(Core core, tuple buffers):
    cdef Batch batch = Batch.__new__(Batch)
    batch.core = core
    batch.buffers = buffers
    return batch


@cython.final
@cython.no_gc
@cython.freelist(8)
cdef class BatchIterator:
    # Keeps the batch and not only its tuple, so that `for buffer in await request` ends in one free of them all.
    cdef Batch batch
    cdef Py_ssize_t next

    def __iter__(self):
        return self

    def __next__(self):
        # By bare pointers: counting a reference of the tuple's up and down for every buffer is a stall each (see types.h).
        cdef PyObject* buffers = <PyObject*>self.batch.buffers
        cdef Py_ssize_t i = self.next
        if i >= PyTuple_GET_SIZE(buffers):
            raise StopIteration
        self.next = i + 1
        return <object>PyTuple_GET_ITEM(buffers, i)

    def __length_hint__(self):
        return len(self.batch.buffers) - self.next


cdef void _give_together(Core core, tuple buffers, bint unshared_only) noexcept:
    # Free under one lock the buffers that need no order with other streams; the rest is left to themselves.
    cdef vector[uint32_t] blocks
    cdef uint32_t flags
    cdef PyObject* large = NULL
    cdef PyObject* item
    cdef Py_ssize_t i
    if core.born != _generation:
        return
    blocks.reserve(len(buffers))
    for i in range(len(buffers)):
        item = PyTuple_GET_ITEM(<PyObject*>buffers, i)
        if unshared_only and item.ob_refcnt > 1:
            continue
        if (<Buffer>item).alive and (<Buffer>item)._block and (<Buffer>item).noted == NULL and not (<Buffer>item).exports:
            (<Buffer>item).alive = False
            blocks.push_back((<Buffer>item).leave_block())
            if (<Buffer>item).nbytes >= core.fence_from:
                large = item
    if blocks.empty():
        return
    flags = core.c.free_many(blocks)
    if large != NULL:
        (<Buffer>large).fence_home()  # for all: a batch has one home, unless some were handed over
    if flags:
        core.signal(flags)


cdef extern from "Python.h":
    PyObject* PyTuple_GET_ITEM(PyObject* buffers, Py_ssize_t i)
    Py_ssize_t PyTuple_GET_SIZE(PyObject* buffers)
    tuple PyTuple_New(Py_ssize_t count)
    void PyTuple_SET_ITEM(object buffers, Py_ssize_t i, PyObject* stolen)


from collections.abc import Sequence

Sequence.register(Batch)
