# Ready: a request that was served at the call. Awaiting it takes no iteration of the event loop.

cdef extern from "binding/await.h":
    ctypedef PyObject* (*asyncmem_stepper)(PyObject* self, PyObject* sent, bint* yields)
    void asyncmem_patch(object type)
    int asyncmem_await(asyncmem_stepper step) except -1
    bint asyncmem_is_temporary(PyObject* self)


cdef class Awaiting:
    """What `await` drives, as it drives a generator."""

    cdef PyObject* step(self, PyObject* sent, bint* yields) except NULL:
        # A new reference: to the result, or to what goes to the event loop where `yields` says so.
        raise NotImplementedError

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """Go on, as a generator does."""
        cdef bint yields = False
        answer = asyncmem_owned(self.step(<PyObject*>value, &yields))
        if yields:
            return answer
        raise StopIteration(answer)


cdef PyObject* _step(PyObject* self, PyObject* sent, bint* yields) except NULL:
    return (<Awaiting>self).step(sent, yields)


asyncmem_await(<asyncmem_stepper>_step)


cdef enum Stage:
    Holding, HandedOut, Dropped


@cython.final
@cython.no_gc
cdef class Ready(Awaiting):
    """A request granted at the call: an awaitable, a coroutine to task groups, a finished future to callbacks.

    Holds its buffer (or batch) until the first hand-out and only weakly from then on. Dropped before that, it gives the
    memory back.
    """

    cdef PyObject* value  # until handed out
    cdef PyObject* weak  # from then on, where it could be asked again
    cdef PyObject* entered  # what `async with` holds
    cdef int64_t nbytes  # -1 when the value is None
    cdef Stage stage

    def __dealloc__(self):
        Py_XDECREF(self.value)
        Py_XDECREF(self.weak)
        Py_XDECREF(self.entered)

    __class_getitem__ = classmethod(GenericAlias)

    cdef PyObject* hand_out(self, bint asked_again) except NULL:
        # A new reference. A second ask finds the value by a weak reference; there is none when the interpreter's stack
        # holds the only reference to this object.
        cdef PyObject* value = self.value
        if self.stage != Holding:
            return self.handed_out()
        if value == NULL:
            value = <PyObject*>None
            Py_INCREF(None)
        elif asked_again:
            weak = PyWeakref_NewRef(<object>value, None)
            _write(&self.weak, weak)
        self.value = NULL
        self.stage = HandedOut
        return value

    cdef PyObject* handed_out(self) except NULL:
        # Handed out before: it is still there if another reference holds it.
        value = None if self.weak == NULL else (<object>self.weak)()
        if value is None and self.nbytes >= 0:
            raise BufferReleased(self.nbytes, action="awaiting its request again")
        return _counted(value)

    cdef PyObject* step(self, PyObject* sent, bint* yields) except NULL:
        return self.hand_out(not asyncmem_is_temporary(<PyObject*>self))

    def throw(self, kind, value=None, traceback=None):
        """Give the memory back and raise what is thrown."""
        self.close()
        raise _thrown(kind, value, traceback)

    def close(self):
        """Give the memory back if it was not handed out."""
        if self.stage == Holding:
            self.stage = Dropped
            _write(&self.value, None)

    def done(self):
        """Return True: the request was granted at the call."""
        return True

    def block(self, timeout=None):
        """Return True: there is nothing to wait for."""
        return True

    def result(self):
        """Return the buffer, the same one that awaiting gives. Raises BufferReleased once it is gone."""
        return asyncmem_owned(self.hand_out(True))

    def cancel(self, msg=None):
        """Return False: it is too late to cancel."""
        return False

    def cancelled(self):
        """Return False."""
        return False

    def exception(self):
        """Return None: the request was granted."""
        return None

    def add_done_callback(self, callback):
        """Call `callback(self)` at once."""
        callback(self)

    def __aenter__(self):
        entered = self.result()
        entered.__enter__()
        _write(&self.entered, entered)
        return _granted(entered, self.nbytes)

    def __aexit__(self, *details):
        entered = _read(self.entered)
        _write(&self.entered, None)
        if entered is not None:
            entered.__exit__(*details)
        return _granted(None, -1)

    def __repr__(self):
        return f"<Ready {('with ' + repr(_read(self.value))) if self.stage == Holding else 'handed out'}>"


cdef object _thrown(object kind, object value, object traceback):
    # The error that a generator's throw() raises for these arguments.
    if value is None:
        value = kind if isinstance(kind, BaseException) else kind()
    elif not isinstance(value, BaseException):
        value = kind(value)
    return value if traceback is None else value.with_traceback(traceback)


cdef asyncmem_recycler _readies


cdef inline PyObject* _ready(PyObject* value, int64_t nbytes) except NULL:
    # A request with one reference, the caller's, over a reference that it takes over (NULL for None).
    cdef PyObject* ready = asyncmem_reuse(&_readies)
    if ready == NULL:
        ready = _counted(Ready.__new__(Ready))
    (<Ready>ready).stage = Holding
    (<Ready>ready).nbytes = nbytes
    (<Ready>ready).value = value
    return ready


cdef object _granted(object value, int64_t nbytes):
    if value is None:
        return asyncmem_owned(_ready(NULL, -1))
    return asyncmem_owned(_ready(_counted(value), nbytes))


cdef void _drop_ready(PyObject* self) noexcept:
    # The destructor. `self` has no references: it must not be bound to a name.
    if ((<Ready>self).value != NULL or (<Ready>self).weak != NULL or (<Ready>self).entered != NULL
            or not asyncmem_has_room(&_readies)):
        _readies.slow(self)
        return
    asyncmem_keep(&_readies, self)


asyncmem_recycle(&_readies, Ready, _drop_ready)
asyncmem_patch(Ready)
