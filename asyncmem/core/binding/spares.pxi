# Spares: buffers that died in a plain state, kept whole for the next ones.

cdef extern from "binding/types.h":
    ctypedef void (*destructor)(PyObject*) noexcept
    ctypedef struct asyncmem_recycler:
        destructor slow
    PyObject* asyncmem_reuse(asyncmem_recycler* recycler) noexcept
    object asyncmem_owned(PyObject* self)
    bint asyncmem_has_room(asyncmem_recycler* recycler) noexcept
    bint asyncmem_has_weakrefs(PyObject* self) noexcept
    void asyncmem_keep(asyncmem_recycler* recycler, PyObject* self) noexcept
    void asyncmem_recycle(asyncmem_recycler* recycler, object type, destructor fast) noexcept


cdef inline PyObject* _counted(object answer) noexcept:
    # With one reference more, the caller's.
    Py_INCREF(answer)
    return <PyObject*>answer


cdef asyncmem_recycler _buffers


cdef inline PyObject* _new_buffer() except NULL:
    # With one reference, the caller's.
    cdef PyObject* spare = asyncmem_reuse(&_buffers)
    return spare if spare != NULL else _counted(Buffer.__new__(Buffer))


cdef void _drop_buffer(PyObject* self) noexcept:
    # The destructor. `self` has no references: it must not be bound to a name.
    cdef PyObject* owner = (<Buffer>self).owner
    cdef uint32_t block = (<Buffer>self)._block
    cdef uint32_t flags = 0
    if (_has_slots(self) or owner == NULL or (<Core>owner).born != _generation
            or (<Buffer>self).nbytes >= (<Core>owner).fence_from or not asyncmem_has_room(&_buffers)):
        _buffers.slow(self)
        return
    if (<Buffer>self).alive:
        (<Buffer>self).alive = False
        (<Buffer>self)._block = 0
        if block:
            flags = (<Core>owner).c.free(block)
    (<Buffer>self).owner = NULL
    asyncmem_keep(&_buffers, self)
    if flags:
        _signal_aside(owner, flags)
    Py_XDECREF(owner)


cdef inline bint _has_slots(PyObject* self) noexcept:
    return ((<Buffer>self).label != NULL or (<Buffer>self).noted != NULL or (<Buffer>self).late != NULL
            or (<Buffer>self).exports != 0 or (<Buffer>self).held != 0 or asyncmem_has_weakrefs(self))


cdef void _signal_aside(PyObject* owner, uint32_t flags) noexcept:
    # In a destructor an exception may be on its way: it is put aside while Python code runs.
    cdef PyObject* kind
    cdef PyObject* value
    cdef PyObject* traceback
    PyErr_Fetch(&kind, &value, &traceback)
    (<Core>owner).signal(flags)
    PyErr_Restore(kind, value, traceback)


asyncmem_recycle(&_buffers, Buffer, _drop_buffer)
