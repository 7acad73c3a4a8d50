# Ready: a request that was served at the call. Awaiting it takes no iteration of the event loop.

cdef extern from "immediate.h":
    ctypedef PyObject* (*asyncmem_handout)(PyObject* self)
    int asyncmem_patch(object type, asyncmem_handout hand_out) except -1
    bint asyncmem_is_temporary(PyObject* self)


cdef enum Stage:
    Holding, HandedOut, Dropped


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Ready:
    """A request granted at the call: an awaitable, a coroutine to task groups, a finished future to callbacks.

    Holds its buffer (or batch) until the first hand-out and only weakly from then on. Dropped before that, it gives the
    memory back.
    """

    cdef object value
    cdef object weak
    cdef object entered
    cdef int64_t nbytes
    cdef Stage stage

    def __init__(self, value=None, /):
        self.value = value
        self.nbytes = 0 if value is None else value.nbytes

    __class_getitem__ = classmethod(GenericAlias)

    cdef object hand_out(self):
        if self.stage == Holding:
            value = self.value
            if value is not None and not asyncmem_is_temporary(<PyObject*>self):
                self.weak = PyWeakref_NewRef(value, None)
            self.value = None
            self.stage = HandedOut
            return value
        return self.handed_out()

    cdef object handed_out(self):
        # The value was handed out before: it is still there if somebody else holds it.
        if self.stage == HandedOut and self.weak is None and self.nbytes == 0:
            return None
        value = None if self.weak is None else self.weak()
        if value is None:
            raise BufferReleased(self.nbytes, action="awaiting its request again")
        return value

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration(self.hand_out())

    def send(self, value):
        """Finish at once: raise StopIteration with the result, as a coroutine without any suspension does."""
        raise StopIteration(self.result())

    def throw(self, kind, value=None, traceback=None):
        """Give the memory back and raise what is thrown."""
        self.close()
        if value is None:
            value = kind if isinstance(kind, BaseException) else kind()
        elif not isinstance(value, BaseException):
            value = kind(value)
        raise value.with_traceback(traceback) if traceback is not None else value

    def close(self):
        """Give the memory back if it was not handed out."""
        if self.stage == Holding:
            self.stage = Dropped
            self.value = None

    def done(self):
        """Answer True: the request was granted at the call."""
        return True

    def result(self):
        """Answer the buffer, the same one that awaiting gives. Raises BufferReleased once it is gone."""
        if self.stage != Holding:
            return self.handed_out()
        value = self.value
        if value is not None:
            self.weak = PyWeakref_NewRef(value, None)
        self.value = None
        self.stage = HandedOut
        return value

    def cancel(self, msg=None):
        """Answer False: it is too late to cancel."""
        return False

    def cancelled(self):
        """Answer False."""
        return False

    def exception(self):
        """Answer None: the request was granted."""
        return None

    def add_done_callback(self, callback):
        """Call `callback(self)` at once."""
        callback(self)

    def __aenter__(self):
        self.entered = self.result()
        self.entered.__enter__()
        return _ready(self.entered, self.nbytes)

    def __aexit__(self, *details):
        entered = self.entered
        self.entered = None
        if entered is not None:
            entered.__exit__(*details)
        return _ready(None, 0)

    def __repr__(self):
        return f"<Ready {('with ' + repr(self.value)) if self.stage == Holding else 'handed out'}>"



cdef PyObject* _hand_out_checked(PyObject* self) except NULL:
    value = (<Ready>self).hand_out()
    Py_INCREF(value)
    return <PyObject*>value


cdef Ready _ready(object value, int64_t nbytes):
    cdef Ready ready = Ready.__new__(Ready)
    ready.value = value
    ready.nbytes = nbytes
    return ready


asyncmem_patch(Ready, <asyncmem_handout>_hand_out_checked)
