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


@cython.no_gc_clear  # the scheduler may have something for it as long as it lives
cdef class Request:
    """An allocation under way: await it, or use it with ``async with``.

    It has started when it is made. It is a coroutine to `asyncio.create_task`, `gather`, `wait_for`, task groups and
    trio alike, and it may be awaited more than once: every await and `result` give the same buffer.

    Ownership: until the first hand-out the request owns the memory; afterwards it only knows it, weakly. A request
    that is dropped before gives back its memory, or its place in the queue.

    Cancellation: cancelling the task that awaits it means that nothing happened, also when the grant had just come.
    `cancel` ends the request itself; its awaits raise `RequestCancelled`.

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
    cdef readonly object _site  # "file:line" where it was made, where that is noted
    cdef public object _elsewhere  # its buffer or batch of the host's memory, until it is granted
    cdef readonly object _holder  # the number of the owner that was named for it, or None
    cdef readonly object _timeout  # seconds, where there is one
    cdef public list _jobs  # what the caller's thread has to carry out; None where it does not, or has left
    cdef public bint _interruptible  # an interrupt may come to that thread, so it leaves what may wait to others
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
    cdef bint unwanted  # it was cancelled while its memory was on the way

    __class_getitem__ = classmethod(GenericAlias)

    def __dealloc__(self):
        # No Python and no lock in between: this may be the garbage collector, in the midst of anything.
        if self._id and (<Core>self.keeper).born == _generation:
            (<Core>self.keeper).withdraw(self._id)
        Py_XDECREF(self.keeper)

    def __repr__(self):
        state = "waiting" if not self.ended else "failed" if self.failure is not None else "granted"
        return f"<asyncmem.pool.Request of {self.nbytes} bytes: {state}>"

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
        if self.ended:
            return False
        self.leave()
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
        """Wait on this thread (blocks) for its end; return False when `timeout` seconds passed first: it still waits.

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

    cdef int fail(self, object error) except -1:
        # Nothing is kept of where the error was made.
        self.failure = self.cancelled_error() if self.unwanted else error
        self.end()

    cdef int end(self) except -1:
        cdef Await first = None if self.await_ == NULL else <Await>self.await_  # kept, as its task may leave meanwhile
        self.ended = True
        if self.unwanted and self.found is not None:
            self.hand_back()
        if self._gate is not None:
            self._gate.put(None)
        if first is not None:
            first.wake()
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

    cdef int lose(self) except -1:
        # The loop of the task that slept on it is closed: no task is left to take its memory.
        if self.found is not None:
            self.give_back()

    cdef int give_back(self) except -1:
        found, self.found = self.found, None
        self.failure = self.cancelled_error()
        found.free()

    cdef int hand_back(self) except -1:
        # It was granted and cancelled at once, which counts as a cancellation.
        self._core.s.note_handed_back(self._share._account)
        return self.give_back()

    cdef object cancelled_error(self):
        return RequestCancelled(pool=self._core.pool.name, asked=self.nbytes)

    cdef int leave(self) except -1:
        # Give its place back; or its memory, as soon as that has come which is on the way.
        if self._id and self._core.s.cancel(self._id, self._core.now()):
            self._core.carry_out()
        else:
            self.unwanted = True

    cdef int abandon(self) except -1:
        # The last who slept on it was cancelled: it gives its place back, or the grant that had just come.
        if not self.ended:
            self.leave()
        elif self.handed is None and self.found is not None:
            self.hand_back()

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

    def _asleep(self, owner, sleeper=None):
        """Count a thread that begins to wait, to be woken by `sleeper`; False, and nothing done, at the end."""
        if sleeper is not None:
            self.sleepers = [*(self.sleepers or ()), sleeper]
        if self.ended:
            self.forget_sleeper(sleeper)
            return False
        self.awaited += 1
        self._core.s.asleep(self._id, self._core.owner_of(owner), self._core.now())
        self._core.carry_out()
        return True

    def _awake(self, sleeper=None):
        """Count one that ends to wait."""
        self.awaited -= 1
        self.forget_sleeper(sleeper)
        if self._id:
            self._core.s.awake(self._id)

    cdef int forget_sleeper(self, object sleeper) except -1:
        if self.sleepers is not None:
            self.sleepers = [one for one in self.sleepers if one is not sleeper] or None

    def _expire(self):
        """Fail with `PoolTimeout`, unless it is done."""
        if self._id and not self.ended:
            self._core.s.fail(self._id, CReason.Expired, self._core.now())
            self._core.carry_out()

    def _withdraw(self, error):
        """Fail with an error, unless it is done."""
        if self._id and not self.ended:
            self.failure = copy(error)  # without the frames it went through, which may keep this request
            self._core.s.fail(self._id, CReason.Error, self._core.now())
            self._core.carry_out()

    # -- awaiting ------------------------------------------------------------------------------------------------------

    def __await__(self):
        """Wait for the memory; see the class for what cancellation leaves behind."""
        cdef Await wait = Await.__new__(Await)
        wait.request = self
        return wait

    cdef PyObject* hand_out(self) except NULL:
        # A new reference. No second ask is possible when the caller's is the only reference to this object.
        if Py_REFCNT(self) == 1 and self.found is not None:
            found, self.found = self.found, None
        else:
            found = self.result()
        return _counted(found)

    def send(self, value):
        """Drive it as a coroutine: for event loops."""
        if self.driver is None:
            self.driver = self.__await__()
        return self.driver.send(value)

    def throw(self, kind, value=None, traceback=None):
        """Raise inside it as a coroutine: for event loops."""
        if self.driver is None:  # cancelled before its task began: the body never ran, which would clean up
            if self.awaited == 0:
                self.abandon()
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
    Fresh, Asleep, Yielded, Over


@cython.final
@cython.no_gc_clear
cdef class Await(Awaiting):
    """One await of a request: a generator to the interpreter, and what wakes the task."""

    cdef Request request  # until the end
    cdef object sleeper  # what wakes the task: asyncio's future, or trio's sleeper
    cdef object inner  # the generator that suspends a task of trio
    cdef object task  # that sleeps
    cdef bint woken
    cdef Await_stage stage

    def __dealloc__(self):
        # Dropped asleep, which only happens where an await is driven by hand, or its loop was closed: tasks close theirs.
        if self.stage == Asleep and self.request is not None:
            self.end_sleep()
            if self.request.awaited == 0 and self.request._id:
                (<Core>self.request.keeper).withdraw(self.request._id)
                self.request._id = 0

    cdef PyObject* step(self, PyObject* sent, bint* yields) except NULL:
        cdef Request request = self.request
        if self.stage == Fresh:
            if request.ended:
                if not request.polite:
                    return self.answer()
                self.yield_once(request)
            elif not self.sleep(request):
                return self.answer()
            if self.inner is None:
                yields[0] = True
                return _counted(self.sleeper)  # None to yield once
        if self.stage == Over:
            return _counted(None)
        if self.inner is not None:
            return self.step_inner(sent, yields)
        if self.stage == Asleep and not self.woken and not self.sleeper.done():
            self.abandon()
            raise RuntimeError("await wasn't used with future")
        return self.answer()

    cdef PyObject* step_inner(self, PyObject* sent, bint* yields) except NULL:
        cdef PyObject* answer = NULL
        cdef int status
        try:
            status = PyIter_Send(self.inner, <object>sent, &answer)
            raised_unless(answer)
        except BaseException:
            self.abandon()
            raise
        if status == PYGEN_NEXT:
            yields[0] = True
            return answer
        Py_DECREF(<object>answer)
        return self.answer()

    cdef int yield_once(self, Request request) except -1:
        # Let the other tasks of the loop run once.
        cdef Core core = request._core
        if _running_loop() is None:
            core.pool._bind(request)
            self.inner = core.loop.turn()
        self.stage = Yielded

    cdef bint sleep(self, Request request) except -1:
        # Let the task sleep until its request has ended; False where that has come.
        cdef Core core = request._core
        if core.born != _generation:
            raise copy(core.pool.closed)
        loop = core.asyncio_loop
        if loop is None or not _runs_here(loop):
            try:
                core.pool._bind(request)
            except InvalidRequest as refused:
                request._withdraw(refused)
                return False
            loop = core.asyncio_loop
        self.task = task = _task_here(loop)
        if loop is None:
            self.sleeper = core.loop.sleeper()
            self.inner = self.sleeper.__await__()
        else:
            self.sleeper = core.future_type(loop=loop) if core.future_type is not None else loop.create_future()
            self.sleeper._asyncio_future_blocking = True
        if request.await_ == NULL:
            request.await_ = <PyObject*>self
        else:
            request.sleepers = [*(request.sleepers or ()), self]
        if request.ended:  # while objects were made, which may let other threads in
            self.leave_list(request)
            if self.inner is not None:
                self.inner.close()
            return False
        self.stage = Asleep
        request.awaited += 1
        core.s.asleep(request._id, <uint64_t><size_t><PyObject*>task, core.now())
        core.carry_out()
        return True

    cdef PyObject* answer(self) except NULL:
        cdef Request request = self.request
        if self.stage == Asleep:
            self.end_sleep()
        self.end()
        return request.hand_out()

    cdef void end_sleep(self) noexcept:
        # The task goes on, one way or another.
        cdef Request request = self.request
        self.leave_list(request)
        request.awaited -= 1
        if request._id:
            (<Core>request.keeper).s.awake(request._id)
        self.task = None
        self.stage = Over

    cdef int leave_list(self, Request request) except -1:
        if request.await_ == <PyObject*>self:
            request.await_ = NULL
        else:
            request.forget_sleeper(self)

    cdef int end(self) except -1:
        self.stage = Over
        self.request = self.inner = self.task = None  # the task has the request as its coroutine, and this as its driver

    cdef int abandon(self) except -1:
        # Without the memory: a request whose last sleeper leaves so is withdrawn, or its grant given back.
        cdef Request request = self.request
        cdef bint waited = self.stage in (Asleep, Yielded)
        if self.stage == Asleep:
            self.end_sleep()
        self.end()
        if waited and request.awaited == 0:
            request.abandon()

    cpdef wake(self):
        """Wake the task, whatever thread this is; False where its loop is closed."""
        if self.request is None:  # the wait is over
            return None
        if self.inner is not None:
            return None if self.sleeper.wake() else self.lost()
        loop = self.sleeper.get_loop()
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
            self.sleeper.set_result(None)
        except InvalidStateError:  # cancelled meanwhile
            pass
        except RuntimeError:
            if not self.sleeper.get_loop().is_closed():
                raise
            return self.lost()

    cdef object lost(self):
        if self.request is not None and self.request.awaited <= 1:
            self.request.lose()
        return False

    def throw(self, kind, value=None, traceback=None):
        """Raise inside the wait: a request whose last sleeper leaves so is withdrawn, or its grant given back."""
        if self.inner is not None:
            try:
                return self.inner.throw(kind, value, traceback) if value is not None else self.inner.throw(kind)
            except BaseException:
                self.abandon()
                raise
        self.abandon()
        raise _thrown(kind, value, traceback)

    def close(self):
        """End the wait as `throw` does, in silence."""
        if self.inner is not None:
            self.inner.close()
        self.abandon()


asyncmem_patch(Await)


from collections.abc import Coroutine

Coroutine.register(Request)
