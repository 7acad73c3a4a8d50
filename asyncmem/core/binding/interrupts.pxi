# Calls that no signal's handler ends half-way.

cdef extern from "binding/interrupts.hpp" namespace "asyncmem" nogil:
    cppclass Treatment:
        pass
    void keep(int number, Treatment& kept)
    void restore(int number, const Treatment& kept)

cdef extern from "Python.h":
    ctypedef struct PyInterpreterState:
        pass
    PyInterpreterState* PyInterpreterState_Get()
    PyInterpreterState* PyInterpreterState_Main()

# Without what the signal module does to name their values, which takes 0.1 ms for all signals.
cdef object _handler_of = _signal.getsignal
cdef object _note_handler = _signal.signal
cdef tuple _SIGNALS = tuple(sorted(map(int, signal.valid_signals())))


@cython.final
cdef class _Interrupts:
    # In the place of every handler of Python's. Nothing here is Python code, before which a handler could run.
    cdef dict handlers  # by signal
    cdef list came  # the arguments of calls to make

    def __call__(self, number, frame):
        self.came.append((number, frame))

    cdef int hold(self) except -1:
        self.handlers, self.came = {}, []
        for number in _SIGNALS:
            handler = _handler_of(number)
            if callable(handler):
                self.handlers[number] = handler
                _set_handler(number, self)

    cdef int give_back(self) except -1:
        for number, handler in self.handlers.items():
            if _handler_of(number) is self:
                try:
                    _set_handler(number, handler)
                except BaseException:  # one that is back already has run first, and has raised
                    self.give_back()
                    raise

    cdef int deliver(self) except -1:
        if self.came:
            number, frame = self.came.pop(0)
            try:
                self.handlers[number](number, frame)
            finally:
                self.deliver()


cdef int _set_handler(int number, object handler) except -1:
    cdef Treatment kept
    keep(number, kept)
    try:
        _note_handler(number, handler)
    finally:
        restore(number, kept)


def on_main_thread():
    """Return whether an interrupt may come here."""
    return threading.get_ident() == threading.main_thread().ident and PyInterpreterState_Get() == PyInterpreterState_Main()


def hold_interrupts(call):
    """Make a call to its end: on the main thread, handlers of signals that come meanwhile run after it."""
    cdef _Interrupts interrupts
    if not on_main_thread():
        return call()
    interrupts = _Interrupts.__new__(_Interrupts)
    try:
        interrupts.hold()
        return call()
    finally:
        try:
            interrupts.give_back()
        finally:
            interrupts.deliver()
