# Desk: the plain ways of a request through the pool, compiled: to queue, to sleep, and to be handed what was just freed.
#
# An asyncio.Queue hands over in 3.8 us, of which most is the event loop's; the same in Python took 11. So these three
# steps make no Python call of our own (the row `handover` of the benchmarks), but to send the worker for growth. Whatever is
# not plain they leave as it is and to `asyncmem.pool`: budgets, batches, deadlines, owners who hold something, other
# threads and other loops.

cdef extern from "Python.h":
    int PyContextVar_Get(object var, PyObject* fallback, PyObject** value) except -1
    Py_ssize_t Py_REFCNT(object) noexcept
    int PyIter_Send(object iterator, object value, PyObject** result) noexcept
    int PYGEN_NEXT




cdef extern from "immediate.h":
    ctypedef PyObject* (*asyncmem_stepper)(PyObject* self, PyObject* sent, int* yields)
    object asyncmem_new(object type)
    int asyncmem_patch_steps(object type, asyncmem_stepper step) except -1


cdef inline PyObject* raised_unless(PyObject* answer) except NULL:
    return answer


cdef class Waits:
    """Counters of requests that had to wait."""

    cdef public int64_t waits
    cdef public int64_t misses
    cdef public double wait_seconds, longest_wait

    def left(self, waiting):
        """Count the end of a wait, whatever it was."""
        self.count(waiting.age)

    cdef inline void count(self, double age) noexcept:
        self.wait_seconds += age
        if age > self.longest_wait:
            self.longest_wait = age


cdef class Desk:
    """What the compiled ways of a request know of their pool's flow, which is a subclass.

    Attributes:
        core: The heap with its buffers.
        turn: The pool's lock.
        queue: Who waits for memory.
        pool: The pool itself, whose plain requests may take the compiled ways.
        tally: Counts the waits.
        held: What is held by whom; while that is empty nobody's sleep can close a circle.
        kinds: The types of what is queued and of what the caller gets.
        named: The context variable that names an owner.
        plain: Whether no option asks for more than these ways do.
        busy: Whether an errand for the queue is under way.
        budgets: Shares with a queue of their own.
        refusing: The error that newcomers get from now on, or None.
        progress: Counts grants, so that a standstill shows.
        may_spill: Whether marked memory lies idle, so that who waits may be helped though nobody frees.
    """

    cdef readonly Core core
    cdef readonly Turn turn
    cdef readonly object pool
    cdef public Line queue
    cdef public Waits tally
    cdef public dict held
    cdef public tuple kinds
    cdef public object named, closed, refusing
    cdef public bint plain, busy, may_spill, _changed
    cdef public list budgets, _owed
    cdef bint owing  # something is to be called once the turn is free
    cdef public uint64_t _left_over  # free bytes that nobody who waits could use when last looked at
    cdef public int64_t progress
    cdef object _home, loop, future_type, task_of, now
    cdef unsigned long thread

    def _connect(self, Core core, pool, settle):
        self.core = core
        self.pool = pool
        self.turn = Turn(settle)
        core.desk = self

    @property
    def home(self):
        """The event loop that is served now."""
        return self._home

    @home.setter
    def home(self, home):
        self._home = home
        self.loop = getattr(home, "loop", None)
        self.now = None if home is None else home.now
        if self.loop is not None:
            self.thread, self.future_type, self.task_of = home.thread, home.future_type, home.task_of

    cdef object task_here(self):
        # The task that runs now on the loop that is served; None elsewhere. Asking for the running loop is a system call.
        if self.loop is None or PyThread_get_thread_ident() != self.thread:
            return None
        return self.task_of(self.loop)

    cdef object queue_up(self, Allocator door, object size, object stream, object tag):
        # A request that what is mapped cannot serve, however tidied, waiting already; None where that is not so, or not
        # plain. Where growth can help it is sent for.
        cdef Core core = self.core
        cdef Ask ask
        cdef Waiter waiter
        cdef int64_t nbytes, total
        if door is not self.pool or not self.plain or self.may_spill or self.refusing is not None:
            return None
        if not _ask(door, &ask, stream, tag) or self.task_here() is None:
            return None
        nbytes = _exact(size)
        total = (nbytes + 511) // 512 * 512
        ask.nbytes = nbytes
        if nbytes <= 0 or <uint64_t>total > core.c.account(0).limit or not self.is_out(ask, total):
            return None
        if stream is not None and (core.retire is None or not core.retire.may_wait(ask.stream)):
            return None  # a capture, which waits for nothing
        if not self.turn.take_quickly():
            return None
        try:
            waiter = asyncmem_new(self.kinds[0])
            waiter.keeper, waiter.share, waiter.home, waiter.since = self, self.pool, self._home, self.now()
            waiter.nbytes, waiter.total, waiter.stream, waiter.tag = nbytes, total, ask.stream, tag
            waiter.caused = ask.caused
            if ask.caused:
                waiter.cause = ask.cause
            self.count_passed()
            self.queue.put(waiter)
            self.tally.waits += 1
            core.c.set_gate(0, True)
            self._left_over = core.c.reserved() - core.c.live()
            # Again: what was freed before the gate closed told nobody.
            if self.queue.count > 1:
                self._changed = core.paged or self.may_hold(total)
            elif not self.serve_plainly(waiter, False) and not self.busy:
                self.send_for(waiter)
        finally:
            self.leave_turn()
        ticket = <Ticket>asyncmem_new(self.kinds[1])
        ticket._flow, ticket._waiting = self, waiter
        return ticket

    cdef bint may_hold(self, uint64_t total) except -1:
        # Whether so much is free, in whatever pieces, within the limit.
        cdef Account account = self.core.c.account(0)
        return account.live + total <= min(account.limit, self.core.c.reserved())

    cdef bint is_out(self, const Ask& ask, uint64_t total) except -1:
        # Whether a door that has just missed would miss again, whatever is made of what is mapped.
        cdef Core core = self.core
        if core.paged:  # memory comes for any request that stays below the limit; its addresses are what may be lacking
            return core.last.reason == Reason.NoPages or core.c.account(0).live + total > core.c.account(0).limit
        if not self.may_hold(total):
            return True
        if core.last.reason != Reason.NoMemory or core.c.cached_bytes():
            return False
        return len(core.stream_objects) == 1 or (core.retire is not None and core.retire.should_grow(ask))

    cdef int send_for(self, Waiter waiter) except -1:
        # Growth for a newcomer who waits alone. Over the limit there is none, and it waits for somebody to free.
        cdef Account account = self.core.c.account(0)
        if account.live + waiter.total <= account.limit:
            self._provide_alone(waiter)
            self.owing = True
        return 0

    cpdef count_passed(self):
        """Close the gate up, and count what the doors have served meanwhile as having overtaken (with the turn held)."""
        cdef uint64_t passed = self.core.c.close_up()
        if passed:
            self.queue.overtaken += passed

    cdef int leave_turn(self) except -1:
        if self._changed or self.owing:
            self.owing = False
            self.turn.leave()
        else:
            self.turn.let_go()
        return 0

    cdef bint hand_over(self) except -1:
        # Give what was just freed to who is next, without the whole pump; False where that takes more thought.
        cdef Waiter head
        if not self.turn.take_quickly():
            return False
        try:
            head = self.plain_head()
            if head is None:
                return False
            if not self.serve_plainly(head, not head.provided):
                # The only one who waits has growth under way: the pump may wait for that, too.
                return head.provided and self.queue.count == 1
            if self._changed:
                head = self.wake_first(head)
        finally:
            self.leave_turn()
        if head is not None:
            head.rouse()
        return True

    def _errand_over(self):
        """End an errand for the queue, and give what it brought to who is next; the pump looks at all that is not plain."""
        cdef Waiter head
        cdef bint served = False
        self.turn.acquire()
        try:
            self.busy = False
            self._let_look_again()
            head = self.plain_head()
            served = head is not None and not self.budgets and self.serve_plainly(head, True)
            if served:
                self.tally.misses += 1
                self.wake_first(head)
            self._changed = self._changed or not served or self.queue.count > 0
        finally:
            self.turn.leave()

    cdef void note_wait(self, Waiter waiter, object error) noexcept:
        # Of a request that leaves the queue: how long it stood there, and what became of it.
        cdef int end = 0 if error is None else 1
        if isinstance(error, PoolTimeout):
            end = 2
        elif error is not None and not isinstance(error, RequestCancelled):
            end = 3
        self.core.note(_WAITED, end, waiter.nbytes, 0, waiter.age, waiter.stream, waiter)

    cdef Waiter wake_first(self, Waiter head):
        # Leave it to the turn to wake who was served, before those whom the pump serves next.
        self._owed.append(head.wake)
        return None

    cdef Waiter plain_head(self):
        # Who is next, where nothing about that takes thought.
        cdef Waiter head
        if self._changed or self.may_spill or self.closed is not None or self.queue.urgent or self.core._observed:
            return None
        head = self.queue.eldest()
        if head is None or head.deadline is not None or head.site is not None or head.holder is not None:
            return None
        return head

    cdef bint serve_plainly(self, Waiter head, bint anywhere) except -1:
        # Grant to who is next what needs no more than to be taken (with the turn held); whoever calls this wakes it.
        cdef uint64_t room
        found = self.granted(head, anywhere)
        if found is None:
            return False
        self.queue.remove(head)
        if head.share is self.pool and head.home is self._home is not None:
            self.tally.count(<double>self.now() - head.since)
        else:
            for tally in head.tallies():
                tally.left(head)
        if head.promised:
            self._keep_promises(head)
        head.settle(found, None)
        self.progress += 1
        room = self.core.c.reserved() - self.core.c.live()
        if self.queue.count:
            self._changed = room > self._left_over
        elif self.core.c.reserved() <= self.core.c.account(0).limit:
            self.core.c.set_gate(0, False)
        else:  # above a limit that was lowered
            self._changed = True
        return True

    cdef object granted(self, Waiter head, bint anywhere):
        cdef Core core = self.core
        cdef Ask ask
        cdef uint32_t block
        if (head.share is not self.pool or head.batch or head.nbytes <= 0
                or head.tag is not None and type(head.tag) is not str
                or core.retire is not None and not core.retire.lane(head.stream).lasting):
            core.blame(head)
            try:
                return head.share.grant(head, anywhere=anywhere)
            finally:
                core.blamed = NULL
        ask.nbytes, ask.stream, ask.account, ask.arena = head.nbytes, head.stream, 0, -1
        ask.anywhere, ask.door, ask.again, ask.caused = anywhere, False, core.paged, head.caused
        if head.caused:
            core.blame(head)
            ask.cause = head.cause
            core.blamed = NULL
        block = core.c.take(ask, core.last)
        if not block:
            return None
        return asyncmem_owned(_wrap(core, block, core.last.address, head.nbytes, head.stream, head.tag))

    cdef bint lay_down(self, Waiter waiter, Nap nap) except -1:
        # Let a task sleep until its request is settled; False where that takes more thought.
        cdef PyObject* name
        if waiter.home is not self._home or waiter.deadline is not None or waiter.nap != NULL or self.held:
            return False
        task = self.task_here()
        if task is None:
            return False
        PyContextVar_Get(self.named, NULL, &name)
        Py_XDECREF(name)
        if name != NULL and name != <PyObject*>None:
            return False
        nap.future = self.future_type(loop=self.loop) if self.future_type is not None else self.loop.create_future()
        if not self.turn.take_quickly():
            return False
        laid = not waiter.done
        if laid:
            waiter.owner = task
            waiter.nap = <PyObject*>nap
            waiter.awaited += 1
            nap.thread, nap.stage = self.thread, Asleep
        self.turn.let_go()
        return laid


cdef class Ticket:
    """What the user holds of a request that waits. Dropped before the hand-out, it gives its place or its memory back."""

    cdef readonly Desk _flow
    cdef readonly Waiter _waiting
    cdef readonly bint _polite
    cdef public object _handed  # a weak reference to what was handed out
    cdef object __weakref__

    __class_getitem__ = classmethod(GenericAlias)

    def __init__(self, Desk flow not None, Waiter waiting not None, bint polite):
        self._flow, self._waiting, self._polite = flow, waiting, polite

    def __del__(self):
        # The garbage collector may have come in the middle of the pool's own work: leave a note, never wait.
        cdef Waiter waiting = self._waiting
        if waiting is None:
            return
        if waiting.done:
            waiting.result = None  # a grant nobody took; the queue may still know the waiter for a while
        else:
            self._flow._dropped(waiting)

    def __await__(self):
        """Wait for the memory; see the class for what cancellation leaves behind."""
        cdef Nap nap = Nap.__new__(Nap)
        nap.ticket = self
        nap.waiter = self._waiting
        return nap

    cdef PyObject* hand_out(self) except NULL:
        # A new reference. Nobody can ask again when the caller's is the only reference to this object.
        cdef Waiter waiting = self._waiting
        if Py_REFCNT(self) == 1 and waiting.result is not None:
            found, waiting.result = waiting.result, None
        else:
            found = self.result()
        Py_INCREF(found)
        return <PyObject*>found


cdef enum Nap_stage:
    Fresh, Asleep, Aside, Over


@cython.final
@cython.freelist(64)
@cython.no_gc_clear
cdef class Nap:
    """One await of a request: a generator to the interpreter, and what wakes the task."""

    cdef Ticket ticket  # until the end
    cdef Waiter waiter
    cdef object future
    cdef object aside  # the generator that does it in Python
    cdef unsigned long thread  # the loop's
    cdef bint woken
    cdef Nap_stage stage

    def __dealloc__(self):
        # Dropped asleep, which only happens to who drives an await by hand, or whose loop was closed: tasks close theirs.
        if self.stage == Asleep:
            self.waiter.nap = NULL
            self.waiter.awaited -= 1
            if self.waiter.awaited == 0 and not self.waiter.done:  # what was granted goes back with the ticket
                self.waiter.keeper._dropped(self.waiter)

    cdef PyObject* step(self, PyObject* sent, bint* yields) except NULL:
        cdef PyObject* answer = NULL
        cdef int status
        if self.stage == Asleep:
            if not self.woken and not self.future.done():
                self.give_up()
                raise RuntimeError("await wasn't used with future")
            self.rise()
            return self.answer()
        if self.stage == Fresh:
            if self.waiter.done and not self.ticket._polite:
                self.stage = Over
                return self.answer()
            if not self.waiter.done and self.ticket._flow.lay_down(self.waiter, self):
                yields[0] = True
                self.future._asyncio_future_blocking = True
                Py_INCREF(self.future)
                return <PyObject*>self.future
            self.stage = Aside
            self.aside = self.ticket._wait()
        if self.stage == Over:
            Py_INCREF(None)
            return <PyObject*>None
        try:
            status = PyIter_Send(self.aside, <object>sent, &answer)
            yields[0] = status == PYGEN_NEXT
            return raised_unless(answer)
        finally:
            if not yields[0]:
                self.end()

    cdef PyObject* answer(self) except NULL:
        cdef Ticket ticket = self.ticket
        self.ticket = None
        return ticket.hand_out()

    cdef int rise(self) except -1:
        # The task goes on, one way or another.
        if self.waiter.nap == <PyObject*>self:
            self.waiter.nap = NULL
        self.waiter.awaited -= 1
        self.stage = Over
        return 0

    cdef int end(self) except -1:
        self.stage = Over
        self.ticket = self.aside = None
        return 0

    cdef int give_up(self) except -1:
        try:
            self.waiter.abandon(self)
        finally:
            self.rise()
            self.ticket = None
        return 0

    cdef int wake(self) except -1:
        self.waiter.nap = NULL
        if PyThread_get_thread_ident() == self.thread:
            self._finish()
        else:
            self.waiter.home.call(self._finish)
        return 0

    def _finish(self):
        self.woken = True
        try:
            self.future.set_result(None)
        except InvalidStateError:  # cancelled meanwhile
            pass
        except RuntimeError:  # the loop has been closed, and its task is gone
            if not self.waiter.home.is_closed():
                raise

    def __await__(self):
        return self

    def __iter__(self):
        return self

    def __next__(self):
        return self.send(None)

    def send(self, value):
        """Go on, as a generator does."""
        cdef bint yields = False
        cdef PyObject* found = self.step(<PyObject*>value, &yields)
        answer = asyncmem_owned(found)
        if yields:
            return answer
        raise StopIteration(answer)

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
        self.end()
        if value is None:
            value = kind if isinstance(kind, BaseException) else kind()
        elif not isinstance(value, BaseException):
            value = kind(value)
        raise value.with_traceback(traceback) if traceback is not None else value

    def close(self):
        """End the wait as `throw` does, in silence."""
        if self.stage == Aside:
            self.aside.close()
        elif self.stage == Asleep:
            self.give_up()
        self.end()


cdef PyObject* _step(PyObject* self, PyObject* sent, int* yields) except NULL:
    cdef bint again = False
    cdef PyObject* found = (<Nap>self).step(sent, &again)
    yields[0] = again
    return found


asyncmem_patch_steps(Nap, <asyncmem_stepper>_step)
