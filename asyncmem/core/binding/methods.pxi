# binding/methods.h as Cython sees it.

cdef extern from "binding/methods.h":
    ctypedef PyObject* (*asyncmem_entry)(PyObject* self, PyObject** arguments, Py_ssize_t count, PyObject* names) except NULL
    ctypedef struct asyncmem_method:
        asyncmem_entry slow
    const bint asyncmem_one_at_a_time
    int asyncmem_quicken(object cls, const char* name, asyncmem_entry quick, asyncmem_method* method) except -1
    int asyncmem_set_attribute(object cls, object name, object value) except -1
    int asyncmem_own_method(object cls, const char* name) except -1
    void asyncmem_give_values(object cls) noexcept
    int64_t asyncmem_whole(PyObject* number) noexcept
    bint asyncmem_names_only(PyObject* names, object name) noexcept

cdef extern from "binding/types.h":
    void asyncmem_make_inside(object cls) noexcept
