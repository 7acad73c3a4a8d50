# Request: an allocation that could not be served at once. The one awaitable for all of them: with deadlines, priorities,
# batches, leases, on asyncio, uvloop and trio.

cdef extern from "Python.h":
    int PyContextVar_Get(object var, PyObject* fallback, PyObject** value) except -1
    Py_ssize_t Py_REFCNT(object) noexcept
    int PyIter_Send(object iterator, object value, PyObject** result) noexcept
    int PYGEN_NEXT


cdef inline PyObject* raised_unless(PyObject* answer) except NULL:
    return answer


cdef object _running_loop = asyncio._get_running_loop
cdef dict _modules = sys.modules
# CPython 3.11 asks the kernel who it is each time that it is asked for the running loop; its own loops know their thread.
cdef object _knows_thread = asyncio.BaseEventLoop if sys.version_info < (3, 12) else ()


cdef bint _runs_here(object loop) except -1:
    # Whether an asyncio loop runs on this thread.
    if not isinstance(loop, _knows_thread):
        return _running_loop() is loop
    thread = loop._thread_id
    return thread is not None and <unsigned long>thread == PyThread_get_thread_ident()


cdef class Request:
    """An allocation under way: await it, or use it with ``async with``.

    It has started when it is made. It is a coroutine to `asyncio.create_task`, `gather`, `wait_for`, task groups and
    trio alike, and it may be awaited more than once: every await and `result` give the same buffer.

    Ownership: until the first hand-out the request owns the memory; afterwards it only knows it, weakly. A request
    that is dropped before gives back its memory, or its place in the queue.

    Cancellation: cancelling the task that awaits it means that nothing happened, also when the grant had just come.
    `cancel` ends the request itself; whoever awaits it gets `RequestCancelled`.

    Attributes:
        nbytes: Bytes asked for, of all pieces of a batch together.
        tag: The name under which statistics count it, or None.
    """

    cdef readonly Core _core
    cdef PyObject* keeper  # the same, from when the scheduler has it: the garbage collector does not clear this one first
    cdef readonly Allocator _share
    cdef readonly int64_t nbytes  # bytes asked for, of all pieces of a batch together
    cdef readonly object tag
    cdef readonly object _capture  # the graph that its memory is for, and the stream that is captured
    cdef public object _site  # "file:line" where it was made, where that is noted
    cdef readonly object _holder  # the number of the owner that was named for it, or None
    cdef readonly object _timeout  # seconds, as given
    cdef public list _jobs  # what the caller's thread has to carry out; None once it has left
    cdef public object _gate  # what that thread blocks on
    cdef tuple sizes  # of a batch
    cdef object found, handed, failure
    cdef object callbacks, loop, driver, entered
    cdef list sleepers
    cdef PyObject* await_  # the one sleeper that most have, which takes itself out before it dies
    cdef object __weakref__
    cdef readonly uint64_t _id  # the scheduler's; 0 once it has ended there
    cdef double until
    cdef int awaited
    cdef uint32_t stream
    cdef bint ended, polite

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(self):
        raise TypeError("requests are made by a pool, a budget or a lease")

    def __dealloc__(self):
        # No Python and no lock in between: this may be the garbage collector, in the midst of anything.
        if self._id and (<Core>self.keeper).born == _generation:
            (<Core>self.keeper).withdraw(self._id)
        Py_XDECREF(self.keeper)

    def __repr__(self):
        state = "waiting" if not self.ended else "failed" if self.failure is not None else "granted"
        return f"<asyncmem.Request of {self.nbytes} bytes: {state}>"

    def done(self):
        """Return whether it has been granted or has failed."""
        return self.ended

    def cancelled(self):
        """Return whether it ended by `cancel`."""
        return isinstance(self.failure, RequestCancelled)

    def result(self):
        """Return the buffer, or raise the error, of a request that is done.

        Raises:
            InvalidRequest: It is not done.
            BufferReleased: Its buffer was handed out before and is gone.
        """
        if not self.ended:
            raise InvalidRequest("result()", self, "a request that is done; await it, or test done() first")
        if self.failure is not None:
            raise self.error()
        if self.handed is None:
            found, self.found = self.found, None
            self.handed = PyWeakref_NewRef(found, None)
            return found
        known = self.handed()
        if known is None:
            raise BufferReleased(self.nbytes, tag=self.tag, action="result()")
        return known

    def exception(self):
        """Return the error of a request that has failed, None of one that was granted.

        Raises:
            InvalidRequest: It is not done.
        """
        if not self.ended:
            raise InvalidRequest("exception()", self, "a request that is done; await it, or test done() first")
        return None if self.failure is None else self.error()

    cdef object error(self):
        # A copy each time: what is raised keeps the frames it went through alive, and the request must not.
        return copy(self.failure)

    def cancel(self):
        """End a request that is not done: it gives its place back, and awaiting it raises `RequestCancelled`.

        Returns:
            Whether it did; False for a request that was done already, whose buffer stays valid.
        """
        if self.ended or not self._id or not self._core.s.cancel(self._id, self._core.now()):
            return False
        self._core.carry_out()
        return True

    def add_done_callback(self, callback):
        """Call `callback` with this request once it is done: on the loop's thread where it was made on one.

        An error that it raises is reported by `sys.unraisablehook`.
        """
        if self.ended:
            callback(self)
        else:
            self.callbacks = [*(self.callbacks or ()), callback]

    def block(self, timeout=None):
        """Wait on this thread (blocks) for its end; return False when `timeout` seconds passed first, and it goes on.

        For threads that wait as a task does, until another one calls `cancel`. It never blocks beyond the request's own
        deadline.
        """
        self._core.pool._block(self, timeout)
        return self.ended

    # -- ends --------------------------------------------------------------------------------------------------------

    cdef int grant(self) except -1:
        # Its memory is there.
        cdef uint64_t id = self._id
        self._id = 0
        self.found = self._core.claim(self, id)
        self.end()
        return 0

    cdef int fail(self, object error) except -1:
        # Nothing is kept of where the error was made.
        self.failure = error
        self.end()
        return 0

    cdef int end(self) except -1:
        cdef PyObject* first = self.await_
        self.ended = True
        if first != NULL:
            (<Await>first).wake()
        if self.sleepers is not None:
            sleepers, self.sleepers = self.sleepers, None
            for sleeper in sleepers:
                if sleeper.wake() is False and self.awaited <= 1:
                    self.lose()
        if self.callbacks is not None:
            callbacks, self.callbacks = self.callbacks, None
            for callback in callbacks:
                if self.loop is None:
                    _call(callback, self)
                else:
                    self.loop.call(partial(_call, callback, self))
        return 0

    cdef int lose(self) except -1:
        # The loop of whoever slept on it is closed: nobody is left to take its memory.
        if self.found is not None:
            self.give_back()
        return 0

    cdef int give_back(self) except -1:
        found, self.found = self.found, None
        self.failure = RequestCancelled(pool=self._core.pool.name, asked=self.nbytes)
        found.free()
        return 0

    cdef int abandon(self) except -1:
        # The last who slept on it was cancelled: it gives its place back, or the grant that had just come.
        if not self.ended:
            if self._id and self._core.s.cancel(self._id, self._core.now()):
                self._core.carry_out()
        elif self.handed is None and self.found is not None:
            self._core.s.note_handed_back(self._share._account)
            self.give_back()
        return 0

    # -- for the event loops and threads of the pool -------------------------------------------------------------------

    @property
    def _deadline(self):
        """The time at which it expires, by the clock of its pool; None for never."""
        return None if self.until == never else self.until

    @property
    def _sizes(self):
        """Bytes of each buffer, as asked."""
        return (self.nbytes,) if self.sizes is None else self.sizes

    @property
    def _is_batch(self):
        """Whether it gives a batch."""
        return self.sizes is not None

    def _granted(self, found):
        """End it with a buffer that it did not get from the scheduler."""
        self.found = found
        self.end()

    def _admit(self, sleeper):
        """Keep a sleeper until the end; False when that has come."""
        if self.ended:
            return False
        self.sleepers = [*(self.sleepers or ()), sleeper]
        return True

    def _abandon_sleeper(self, sleeper):
        """Forget a sleeper that was cancelled."""
        if self.sleepers is not None:
            self.sleepers = [one for one in self.sleepers if one is not sleeper] or None

    def _asleep(self, owner):
        """Count a task that begins to wait."""
        self.awaited += 1
        if self._id:
            if not isinstance(owner, int):
                self._core.know(self._core.owner_of(owner), owner)
            self._core.s.asleep(self._id, self._core.owner_of(owner), self._core.now())
            self._core.carry_out()

    def _awake(self, cancelled):
        """Count one that ends to wait; the last one that was cancelled gives the place or the grant back."""
        self.awaited -= 1
        if self._id:
            self._core.s.awake(self._id)
        if cancelled and self.awaited == 0:
            self.abandon()

    def _expire(self):
        """Fail with `PoolTimeout`, unless it is done."""
        if self._id and not self.ended:
            self._core.s.fail(self._id, CReason.Expired, self._core.now())
            self._core.carry_out()

    def _withdraw(self, error):
        """Fail with an error, unless it is done."""
        if self._id and not self.ended:
            self.failure = error
            self._core.s.fail(self._id, CReason.Error, self._core.now())
            self._core.carry_out()

    # -- awaiting ------------------------------------------------------------------------------------------------------

    def __await__(self):
        """Wait for the memory; see the class for what cancellation leaves behind."""
        cdef Await wait = Await.__new__(Await)
        wait.request = self
        return wait

    cdef PyObject* hand_out(self) except NULL:
        # A new reference. Nobody can ask again when the caller's is the only reference to this object.
        if Py_REFCNT(self) == 1 and self.found is not None:
            found, self.found = self.found, None
        else:
            found = self.result()
        Py_INCREF(found)
        return <PyObject*>found

    def send(self, value):
        """Drive it as a coroutine: for event loops."""
        if self.driver is None:
            self.driver = self.__await__()
        return self.driver.send(value)

    def throw(self, kind, value=None, traceback=None):
        """Raise inside it as a coroutine: for event loops."""
        if self.driver is None:  # cancelled before its task began: the body never ran, which would clean up
            self.cancel()
            self.driver = self.__await__()
        return self.driver.throw(kind, value, traceback)

    def close(self):
        """End it as a coroutine: for event loops."""
        if self.driver is not None:
            self.driver.close()
        self.cancel()

    async def __aenter__(self):
        """Wait for the memory and hold it until the block ends; the current task counts as its owner."""
        entered = await self
        entered.__enter__()
        self.entered = entered
        return entered

    def __aexit__(self, *details):
        """Free what the block held."""
        entered, self.entered = self.entered, None
        entered.__exit__(*details)
        return _granted(None, -1)


def _call(callback, request):
    try:
        callback(request)
    except BaseException as error:  # others are woken after it
        _report(error, callback)


cdef enum Await_stage:
    Fresh, Asleep, Aside, Yielded, Over


@cython.final
@cython.no_gc_clear
cdef class Await(Awaiting):
    """One await of a request: a generator to the interpreter, and what wakes the task."""

    cdef Request request  # until the end
    cdef object future
    cdef object task  # that sleeps
    cdef object aside  # the generator that waits on another loop than asyncio's
    cdef bint woken
    cdef Await_stage stage

    def __dealloc__(self):
        # Dropped asleep, which only happens to who drives an await by hand, or whose loop was closed: tasks close theirs.
        if self.stage == Asleep and self.request is not None:
            self.rise()
            if self.request.awaited == 0 and self.request._id:
                (<Core>self.request.keeper).withdraw(self.request._id)
                self.request._id = 0

    cdef PyObject* step(self, PyObject* sent, bint* yields) except NULL:
        cdef PyObject* answer = NULL
        cdef int status
        cdef Request request = self.request
        if self.stage == Asleep:
            if not self.woken and not self.future.done():
                self.give_up()
                raise RuntimeError("await wasn't used with future")
            self.rise()
            return self.answer()
        if self.stage == Fresh:
            if request.ended and not request.polite:
                return self.answer()
            if not request.ended and self.lie_down(request):
                yields[0] = True
                self.future._asyncio_future_blocking = True
                Py_INCREF(self.future)
                return <PyObject*>self.future
            if self.stage == Over:
                return self.answer()
            if request.polite and _running_loop() is not None:
                self.stage = Yielded
                yields[0] = True
                Py_INCREF(None)
                return <PyObject*>None
            self.stage = Aside
            self.aside = request._core.pool._wait(request)
        if self.stage == Yielded:
            return self.answer()
        if self.stage == Over:
            Py_INCREF(None)
            return <PyObject*>None
        try:
            status = PyIter_Send(self.aside, <object>sent, &answer)
            if status != PYGEN_NEXT and answer != NULL:
                Py_DECREF(<object>answer)
                self.aside = None
                return self.answer()
            yields[0] = status == PYGEN_NEXT
            return raised_unless(answer)
        except BaseException:
            self.end()
            raise

    cdef bint lie_down(self, Request request) except -1:
        # Let a task of asyncio sleep until its request has ended; False where that takes another way, or has come.
        cdef Core core = request._core
        loop = core.asyncio_loop
        if loop is None or not _runs_here(loop):
            try:
                core.pool._bind(request)
            except InvalidRequest as refused:
                request._withdraw(refused)
                self.stage = Over
                return False
            loop = core.asyncio_loop
            if loop is None:
                return False
        self.task = task = core.task_of(loop)
        self.future = core.future_type(loop=loop) if core.future_type is not None else loop.create_future()
        if request.ended:
            self.stage = Over
            return False
        if request.await_ == NULL:
            request.await_ = <PyObject*>self
        else:
            request._admit(self)
        self.stage = Asleep
        request.awaited += 1
        core.s.asleep(request._id, <uint64_t><size_t><PyObject*>task, core.now())
        core.carry_out()
        return True

    cdef PyObject* answer(self) except NULL:
        cdef Request request = self.request
        self.stage = Over
        self.request = None
        return request.hand_out()

    cdef void rise(self) noexcept:
        # The task goes on, one way or another.
        cdef Request request = self.request
        if request.await_ == <PyObject*>self:
            request.await_ = NULL
        elif request.sleepers is not None:
            request.sleepers = [one for one in request.sleepers if one is not self] or None
        request.awaited -= 1
        if request._id:
            (<Core>request.keeper).s.awake(request._id)
        self.task = None
        self.stage = Over

    cdef int end(self) except -1:
        self.stage = Over
        self.request = self.aside = None
        return 0

    cdef int give_up(self) except -1:
        cdef Request request = self.request
        self.rise()
        self.request = None
        if request.awaited == 0:
            request.abandon()
        return 0

    cpdef wake(self):
        """Wake the task, whatever thread this is; False where its loop is closed."""
        cdef Core core = self.request._core
        loop = self.future.get_loop()
        if _runs_here(loop):
            return self._finish()
        try:
            loop.call_soon_threadsafe(self._finish)
        except RuntimeError:  # the loop has been closed, and its task is gone
            if not loop.is_closed():
                raise
            return self.lost()

    def _finish(self):
        self.woken = True
        try:
            self.future.set_result(None)
        except InvalidStateError:  # cancelled meanwhile
            pass
        except RuntimeError:
            if not self.future.get_loop().is_closed():
                raise
            return self.lost()

    cdef object lost(self):
        if self.request is not None and self.request.awaited <= 1:
            self.request.lose()
        return False

    def throw(self, kind, value=None, traceback=None):
        """Raise inside the wait: a request whose last sleeper leaves so is withdrawn, or its grant given back."""
        if self.stage == Aside:
            try:
                return self.aside.throw(kind, value, traceback) if value is not None else self.aside.throw(kind)
            except BaseException:
                self.end()
                raise
        if self.stage == Asleep:
            self.give_up()
        elif self.stage == Yielded:
            self.request.abandon()
        self.end()
        raise _thrown(kind, value, traceback)

    def close(self):
        """End the wait as `throw` does, in silence."""
        if self.stage == Aside:
            self.aside.close()
        elif self.stage == Asleep:
            self.give_up()
        elif self.stage == Yielded:
            self.request.abandon()
        self.end()


asyncmem_patch(Await)


from collections.abc import Coroutine

Coroutine.register(Request)
