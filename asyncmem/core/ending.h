/* Whether the interpreter is on its way out: what its modules held may be gone, and the driver with it. */
#pragma once

#include <Python.h>

static inline int asyncmem_is_ending(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}
