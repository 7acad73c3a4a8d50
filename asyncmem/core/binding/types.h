/* Compiled types and the interpreter: objects that Python code cannot make, and objects that are used again. */
#pragma once

#include <Python.h>

/* Whether the interpreter is on its way out: what its modules held may be gone, and the driver with it. */
static inline int asyncmem_is_ending(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

/* Types whose objects Python code gets from calls, and makes none of. */
static inline PyObject *asyncmem_refuse_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)arguments, (void)names;
    return PyErr_Format(PyExc_TypeError, "cannot create '%s' instances: asyncmem makes them itself", type->tp_name);
}

/* Have Python code not make objects of a type, whose methods trust what its makers fill in. Compiled code calls the type's
 * own constructor straight, which stays as it is. */
static inline void asyncmem_make_inside(PyObject *cls) {
    PyTypeObject *type = (PyTypeObject *)cls;
    type->tp_new = asyncmem_refuse_new;
    type->tp_vectorcall = NULL;
    PyType_Modified(type);
}

/* Instances that die in a plain state are kept and handed out again, without the clearing and refilling of their slots.
 *
 * Cython's own freelist saves the memory only; this saves the way through its constructor and destructor, a quarter of
 * the price of a hit. Types made from a spec count their instances, so they are left as they are. */
#define ASYNCMEM_SPARES 512

typedef struct {
    destructor slow; /* what the type was born with: for instances that are not plain */
    int count;
    PyObject *spares[ASYNCMEM_SPARES];
} asyncmem_recycler;

/* A spare with one reference, or NULL. */
static inline PyObject *asyncmem_reuse(asyncmem_recycler *recycler) {
    if (recycler->count == 0) return NULL;
    PyObject *self = recycler->spares[--recycler->count];
#if defined(Py_REF_DEBUG) || defined(Py_TRACE_REFS)
    _Py_NewReference(self);
#else
    Py_SET_REFCNT(self, 1);
#endif
    return self;
}

/* A reference of ours as the caller's. Counting it up here and down there costs a stall on 3.12 and later, which write
 * half of the count and read all of it. */
static inline PyObject *asyncmem_owned(PyObject *self) { return self; }

static inline int asyncmem_has_room(const asyncmem_recycler *recycler) { return recycler->count < ASYNCMEM_SPARES; }

static inline int asyncmem_has_weakrefs(PyObject *self) {
    return *(PyObject **)((char *)self + Py_TYPE(self)->tp_weaklistoffset) != NULL;
}

static inline void asyncmem_keep(asyncmem_recycler *recycler, PyObject *self) {
    recycler->spares[recycler->count++] = self;
}

static inline void asyncmem_recycle(asyncmem_recycler *recycler, PyObject *type, destructor fast) {
#ifndef Py_GIL_DISABLED
    PyTypeObject *t = (PyTypeObject *)type;
    if (t->tp_flags & Py_TPFLAGS_HEAPTYPE) return;
    recycler->slow = t->tp_dealloc;
    t->tp_dealloc = fast;
#endif
}
