/* Whether the interpreter is at its end, asked without its lock. */
#pragma once

#include <Python.h>

static inline int asyncmem_finalizing(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}
