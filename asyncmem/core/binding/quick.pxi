# Quick: the plain calls, served before any argument is parsed. All others go to the methods as they are written.

cdef asyncmem_method _allocate, _allocate_async, _free


cdef PyObject* _quick_allocate(PyObject* self, PyObject** arguments, Py_ssize_t count, PyObject* names) except NULL:
    # allocate(size) and allocate(size, stream=stream)
    cdef Terms terms
    if count == 1 and names == NULL:
        return _allocate_now(<Allocator>self, <object>arguments[0], None, None, &terms, None)
    if count == 1 and asyncmem_names_only(names, "stream"):
        return _allocate_now(<Allocator>self, <object>arguments[0], <object>arguments[1], None, &terms, None)
    return _allocate.slow(self, arguments, count, names)


cdef PyObject* _quick_allocate_async(PyObject* self, PyObject** arguments, Py_ssize_t count, PyObject* names) except NULL:
    # allocate_async(size) and allocate_async(size, stream=stream)
    cdef Terms terms
    if count == 1 and names == NULL:
        return _allocate_soon(<Allocator>self, <object>arguments[0], None, None, &terms, None)
    if count == 1 and asyncmem_names_only(names, "stream"):
        return _allocate_soon(<Allocator>self, <object>arguments[0], <object>arguments[1], None, &terms, None)
    return _allocate_async.slow(self, arguments, count, names)


cdef PyObject* _quick_free(PyObject* self, PyObject** arguments, Py_ssize_t count, PyObject* names) except NULL:
    # free() and free(stream=stream)
    if count == 0 and names == NULL and (<Buffer>self).alive and (<Buffer>self).noted == NULL and (<Buffer>self).exports == 0:
        (<Buffer>self).alive = False
        (<Buffer>self).give()
        return _counted(None)
    if count == 0 and names != NULL and asyncmem_names_only(names, "stream"):
        if (<Buffer>self).alive:
            (<Buffer>self).free_ordered(<object>arguments[0])
        return _counted(None)
    return _free.slow(self, arguments, count, names)


asyncmem_quicken(Allocator, b"allocate", _quick_allocate, &_allocate)
asyncmem_quicken(Allocator, b"allocate_async", _quick_allocate_async, &_allocate_async)
asyncmem_quicken(Buffer, b"free", _quick_free, &_free)
asyncmem_give_values(Allocator)

for _kind in (Awaiting, Await, Batch, BatchIterator, Buffer, Effect, Export, Lanes, Ready, Request, Tag, _Interrupts):
    asyncmem_make_inside(_kind)
del _kind

for _name, _ours in _BUFFER.items():
    asyncmem_set_attribute(Buffer, _name, _Elsewhere(_name, _ours))
del _name, _ours
