/* Awaitables in C. What is there at once is handed to the interpreter without a trip through the event loop.
 *
 * CPython 3.11's SEND reads am_send; 3.12 and 3.13 call tp_iternext, so there the value has to leave in a StopIteration.
 * Making one costs more than the rest of the await, so the last one that dies is kept and used again.
 * Other versions raise a fresh StopIteration: correct everywhere, only slower. */
#pragma once

#include <Python.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Go on with an await: a new reference to its value, or to what goes to the event loop where `yields` says so; NULL with
 * an error set. */
typedef PyObject *(*asyncmem_stepper)(PyObject *self, PyObject *sent, int *yields);

static asyncmem_stepper asyncmem_step;

/* Whether only the interpreter's own stack holds the object. 3.14 borrows on the stack, so it cannot be told. */
static inline int asyncmem_is_temporary(PyObject *self) {
#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)
    return Py_REFCNT(self) == 1;
#else
    (void)self;
    return 0;
#endif
}

static PySendResult asyncmem_send(PyObject *self, PyObject *sent, PyObject **result) {
    int yields = 0;
    *result = asyncmem_step(self, sent, &yields);
    return !*result ? PYGEN_ERROR : yields ? PYGEN_NEXT : PYGEN_RETURN;
}

#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

/* A StopIteration whose last instance is emptied and kept instead of being freed, so it never holds a value longer than
 * the interpreter does. A used one is not tracked by the cycle collector: it lives for the length of one await, and only
 * who drives the await by hand and ties the exception into a cycle could lose it. */
static PyTypeObject asyncmem_stop_type;
static PyObject *asyncmem_spare; /* an emptied instance with no references, or NULL */

static void asyncmem_stop_dealloc(PyObject *self) {
    PyStopIterationObject *s = (PyStopIterationObject *)self;
    if (asyncmem_spare || s->dict || !s->args || PyTuple_GET_SIZE(s->args)) {
        ((PyTypeObject *)PyExc_StopIteration)->tp_dealloc(self);
        return;
    }
    if (PyObject_GC_IsTracked(self)) PyObject_GC_UnTrack(self);
    s->suppress_context = 0;
    Py_CLEAR(s->notes);
    Py_CLEAR(s->traceback);
    Py_CLEAR(s->context);
    Py_CLEAR(s->cause);
    Py_CLEAR(s->value);
    if (!asyncmem_spare)
        asyncmem_spare = self;
    else /* one of the objects just cleared ran code that came here before us */
        ((PyTypeObject *)PyExc_StopIteration)->tp_dealloc(self);
}

static int asyncmem_stop_ready(void) {
    PyTypeObject *base = (PyTypeObject *)PyExc_StopIteration;
    asyncmem_stop_type.tp_name = "asyncmem.core.StopIteration";
    asyncmem_stop_type.tp_basicsize = base->tp_basicsize;
    asyncmem_stop_type.tp_base = base;
    asyncmem_stop_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    asyncmem_stop_type.tp_traverse = base->tp_traverse;
    asyncmem_stop_type.tp_clear = base->tp_clear;
    asyncmem_stop_type.tp_dealloc = asyncmem_stop_dealloc;
    return PyType_Ready(&asyncmem_stop_type);
}

static void asyncmem_stop(PyObject *value) {
    PyObject *stop = asyncmem_spare;
    if (stop) {
        asyncmem_spare = NULL;
#if defined(Py_REF_DEBUG) || defined(Py_TRACE_REFS)
        _Py_NewReference(stop);
#else
        Py_SET_REFCNT(stop, 1);
#endif
    } else {
        stop = PyObject_CallNoArgs((PyObject *)&asyncmem_stop_type);
        if (!stop) {
            Py_DECREF(value);
            return;
        }
    }
    Py_XSETREF(((PyStopIterationObject *)stop)->value, value);
    PyErr_SetRaisedException(stop);
}

#else

static int asyncmem_stop_ready(void) { return 0; }

static void asyncmem_stop(PyObject *value) {
    /* PyErr_SetObject would unpack a tuple or an exception as the arguments. */
    PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, value);
    Py_DECREF(value);
    if (!stop) return;
    PyErr_SetObject(PyExc_StopIteration, stop);
    Py_DECREF(stop);
}

#endif

static PyObject *asyncmem_next(PyObject *self) {
    int yields = 0;
    PyObject *value = asyncmem_step(self, Py_None, &yields);
    if (!value || yields) return value;
    asyncmem_stop(value);
    return NULL;
}

/* Have instances of a type that has `__await__` and `__next__` step by `asyncmem_step`. */
static void asyncmem_patch(PyObject *type) {
    PyTypeObject *t = (PyTypeObject *)type;
    t->tp_as_async->am_send = asyncmem_send;
    t->tp_iternext = asyncmem_next;
    PyType_Modified(t);
}

static int asyncmem_await(asyncmem_stepper step) {
    asyncmem_step = step;
    return asyncmem_stop_ready();
}

#ifdef __cplusplus
}
#endif
