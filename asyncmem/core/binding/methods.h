/* Doors for Python code without detours: C methods that are called straight, and integers that are read straight. */
#pragma once

#include <Python.h>
#include <stdint.h>

/* Whether the interpreter's lock lets in one thread at a time. */
#ifdef Py_GIL_DISABLED
static const int asyncmem_one_at_a_time = 0;
#else
static const int asyncmem_one_at_a_time = 1;
#endif

typedef PyObject *(*asyncmem_entry)(PyObject *self, PyObject **arguments, Py_ssize_t count, PyObject *names);

/* A method with a quick way in front of the one that parses all arguments. */
typedef struct {
    asyncmem_entry slow;
    PyMethodDef quick;
} asyncmem_method;

/* Give a compiled type one more attribute. */
static inline int asyncmem_set_attribute(PyObject *type, PyObject *name, PyObject *value) {
    int failed = PyDict_SetItem(((PyTypeObject *)type)->tp_dict, name, value);
    PyType_Modified((PyTypeObject *)type);
    return failed;
}

/* Put `quick` in front of a method of a compiled type: it gets the arguments as the interpreter passes them, and calls
 * `method->slow` for all but the plain cases. Parsing five arguments costs a tenth of a hit. */
static int asyncmem_quicken(PyObject *type, const char *name, asyncmem_entry quick, asyncmem_method *method) {
    PyObject *own = ((PyTypeObject *)type)->tp_dict;
    PyObject *found = PyDict_GetItemString(own, name);
    if (!found || !Py_IS_TYPE(found, &PyMethodDescr_Type)) return 0;
    method->quick = *((PyMethodDescrObject *)found)->d_method;
    if (method->quick.ml_flags != (METH_FASTCALL | METH_KEYWORDS)) return 0;
    method->slow = (asyncmem_entry)(void (*)(void))method->quick.ml_meth;
    method->quick.ml_meth = (PyCFunction)(void (*)(void))quick;
    PyObject *descriptor = PyDescr_NewMethod((PyTypeObject *)type, &method->quick);
    int failed = !descriptor || PyDict_SetItemString(own, name, descriptor) < 0;
    Py_XDECREF(descriptor);
    PyType_Modified((PyTypeObject *)type);
    return failed ? -1 : 0;
}

/* CPython calls a C method without detours only where the object's type is the very type that the descriptor belongs to;
 * on a subclass each call takes 8 ns more. So subclasses get descriptors of theirs for the same C functions. */
static int asyncmem_own_method(PyObject *cls, const char *name) {
    PyObject *found = PyObject_GetAttrString(cls, name);
    if (!found) return -1;
    int failed = 0;
    /* What is no C method is an override, which stays. */
    if (Py_IS_TYPE(found, &PyMethodDescr_Type) && PyDescr_TYPE(found) != (PyTypeObject *)cls) {
        PyObject *own = PyDescr_NewMethod((PyTypeObject *)cls, ((PyMethodDescrObject *)found)->d_method);
        failed = !own || PyObject_SetAttrString(cls, name, own) < 0;
        Py_XDECREF(own);
    }
    Py_DECREF(found);
    return failed ? -1 : 0;
}

/* Whether the only keyword passed is `name`, spelled in the caller's code (and so the same object). */
static inline int asyncmem_names_only(PyObject *names, PyObject *name) {
    return PyTuple_GET_SIZE(names) == 1 && PyTuple_GET_ITEM(names, 0) == name;
}

/* An int as a C integer; below 0 for what is no int (a bool is none here), does not fit, or is negative. Up to a GiB it is
 * read straight. */
static inline int64_t asyncmem_whole(PyObject *number) {
    if (!PyLong_CheckExact(number)) return -1;
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)number)) return PyUnstable_Long_CompactValue((PyLongObject *)number);
#else
    if (Py_SIZE(number) == 1) return ((PyLongObject *)number)->ob_digit[0];
#endif
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow ? -1 : value;
}

#if PY_VERSION_HEX < 0x030D0000 && !defined(Py_GIL_DISABLED)

/* 3.11 and 3.12 keep the attributes of an object in an array, and call its methods without looking into a dict first, only
 * when object.__new__ has made it: a compiled type's own constructor makes objects with a dict. So for subclasses that
 * constructor gets its memory through object.__new__. */
static newfunc asyncmem_born;

static PyObject *asyncmem_alloc_with_values(PyTypeObject *type, Py_ssize_t items) {
    (void)items;
    static PyObject *none;
    type->tp_alloc = PyType_GenericAlloc;
    if (!none) none = PyTuple_New(0);
    return none ? PyBaseObject_Type.tp_new(type, none, NULL) : NULL;
}

static PyObject *asyncmem_new_with_values(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    if (type->tp_alloc == PyType_GenericAlloc && (type->tp_flags & Py_TPFLAGS_MANAGED_DICT))
        type->tp_alloc = asyncmem_alloc_with_values;
    PyObject *self = asyncmem_born(type, arguments, names);
    if (type->tp_alloc == asyncmem_alloc_with_values) type->tp_alloc = PyType_GenericAlloc;
    return self;
}

static void asyncmem_give_values(PyObject *type) {
    PyTypeObject *t = (PyTypeObject *)type;
    asyncmem_born = t->tp_new;
    t->tp_new = asyncmem_new_with_values;
}

#else

static void asyncmem_give_values(PyObject *type) { (void)type; }

#endif
