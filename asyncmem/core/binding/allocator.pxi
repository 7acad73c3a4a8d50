# Allocator: how memory is asked for. A hit is served at once; every other request goes to the scheduler.

cdef enum:
    _STREAK = 1000  # hits in a row, after which one lets the loop turn


cdef class Allocator:
    """Allocates buffers: the base of pool, budget and lease."""

    cdef readonly Core _core
    cdef readonly uint32_t _account
    cdef readonly int32_t _arena
    cdef uint32_t hold  # of a lease's range, by its owner
    cdef bint closing, own_range
    cdef object __weakref__

    def __cinit__(self):
        if type(self) is Allocator:
            raise TypeError("only pools and their parts allocate")

    def _attach(self, Core core, account=0, arena=-1):
        """Connect it to a core, its account and (for a lease) its arena."""
        self._core = core
        self._account = _index(account, "account")
        self._arena = -1 if arena == -1 else <int32_t>_index(arena, "arena")
        if type(self) is not Allocator:
            for name in (b"allocate", b"allocate_async", b"try_allocate", b"allocate_batch"):
                asyncmem_own_method(type(self), name)

    # A budget or a lease begins, and ends, in compiled steps, so that an interrupt finds it begun or not.

    def _begin_budget(self, Allocator parent not None, limit, waits, bypass):
        """Become a share of another allocator, with an account of its own; raise where that has ended meanwhile."""
        cdef Core core = parent._core
        if core is None or parent.closing:
            parent._opened  # raises why it ended
            raise RuntimeError("a share has ended without a reason")
        core.c.remove_accounts(core.ended_accounts)
        cdef uint32_t account = core.c.add_account(parent._account, _limit(limit))
        core.s.open_share(account, parent._account, parent._account, parent._arena, waits, bypass)
        self._attach(core, account, parent._arena)

    def _begin_lease(self, Buffer found not None, Allocator parent not None, bypass):
        """Take over the range of a buffer, held by the current owner. Part of the pool if its share has just ended."""
        cdef Core core = found.core()
        cdef uint64_t owner = core.owner()
        cdef uint64_t nbytes = found._block_bytes
        cdef uint32_t outer = parent._account if parent._core is core and not parent.closing else 0
        cdef uint32_t block, account, arena
        found._let_go()
        block = found._disown()
        self.hold, self.own_range = core.s.hold(owner, block), True
        account = core.c.add_account(-1, nbytes)
        arena = core.c.open_lease(block)
        core.s.open_share(account, -1, outer, <int32_t>arena, False, bypass)
        self._attach(core, account, arena)

    def __del__(self):
        # A lease that was dropped inside its block, as by an interrupt before the block had begun or in its end.
        if self.own_range and self._core is not None:
            self._core.post(partial(self._core.pool.end_share, self, self._account))

    def _end_share(self):
        """Fail the requests that wait here, then give the range back. Called again where an interrupt ended it."""
        cdef Core core = self._core
        cdef double now
        cdef uint32_t flags = 0, account = self._account
        if core is None:
            return
        now = core.now()
        if self.hold:
            core.s.release(self.hold)
            self.hold = 0
        if not self.closing:
            self.closing = True
            core.set_fast()  # before the arena and the account are another's
            core.s.close_share(account, now)
        core.carry_out()  # which an interrupt may end
        if self.own_range:
            flags = core.c.close_lease(self._arena)
        self._attach(None)
        core.ended_accounts.push_back(account)
        core.c.remove_accounts(core.ended_accounts)
        if flags:
            core.signal(flags)

    def allocate(self, size, *, stream=None, tag=None, priority=0, timeout=None):
        """Return a buffer, from any thread, without awaiting.

        Args:
            size: Bytes, or text such as "64 MiB". Zero gives a valid empty buffer.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count it.
            priority: Of waiting requests, the higher is served first.
            timeout: Seconds to block this thread for at most, or text such as "500 ms"; None does not wait.

        Raises:
            InvalidRequest: An argument that cannot be right; a nonzero timeout on a running event loop's thread.
            OutOfMemoryError: There is no such memory, with all facts.
        """
        cdef Terms terms
        _read_terms(&terms, priority, timeout)
        return asyncmem_owned(_allocate_now(self, size, stream, tag, &terms, timeout))

    def allocate_async(self, size, *, stream=None, tag=None, priority=0, timeout=None):
        """Start a request now and return it: await it, enter it by `async with`, or give it to a task group.

        A hit is granted before this returns, and awaiting it takes no iteration of the loop. A request dropped unawaited
        gives its memory or its place in the queue back; a cancelled await means that nothing was allocated.

        Args:
            size: Bytes, or text such as "64 MiB". Zero gives a valid empty buffer.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count it.
            priority: Of waiting requests, the higher is served first.
            timeout: Seconds, or text such as "500 ms", from this call after which the await raises PoolTimeout.

        Raises:
            InvalidRequest: An argument that cannot be right. Everything else is raised at the await.
        """
        cdef Terms terms
        _read_terms(&terms, priority, timeout)
        return asyncmem_owned(_allocate_soon(self, size, stream, tag, &terms, timeout))

    def try_allocate(self, size, *, stream=None, tag=None):
        """Return a buffer if that takes no waiting or growing and delays no waiting request, else None. From any thread."""
        cdef PyObject* buffer = _take(self, size, stream, tag)
        cdef Terms terms
        cdef Request request
        if buffer != NULL:
            return asyncmem_owned(buffer)
        terms.calls, terms.effort = True, Effort.Take
        request = _submit(self, size, False, stream, tag, &terms, None)
        if not request.ended:  # another thread's look at fences is under way, and would be waited for
            request._core.s.fail(request._id, CReason.NoMemory, request._core.now())
            request._core.carry_out()
        if not request.ended or request.failure is _NOTHING:
            return None
        return request.result()

    def allocate_batch(self, sizes, *, stream=None, tag=None, priority=0, timeout=None):
        """Start a request for one buffer a size, all or nothing, and return it as allocate_async does.

        Args:
            sizes: Bytes or texts. Similar sizes are laid side by side; the batch has the order asked.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count them.
            priority: Of waiting requests, the higher is served first.
            timeout: Seconds, or text such as "500 ms", from this call after which the await raises PoolTimeout.
        """
        cdef Core core = self._core
        cdef object batch
        cdef Terms terms
        _read_terms(&terms, priority, timeout)
        if core is not None and core.streak < _STREAK:
            batch = _take_batch(self, sizes, stream, tag)
            if batch is not None:
                core.streak += 1
                return _granted(batch, 0)
        return _soon(_submit(self, sizes, True, stream, tag, &terms, timeout))


cdef int _read_terms(Terms* terms, object priority, object timeout) except -1:
    # Before anything else, so that wrong arguments are refused whatever becomes of the request. The deadline counts from
    # the call until the request is submitted.
    if priority is not _NO_PRIORITY:
        terms.priority = parse_priority(priority)
    if timeout is not None:
        terms.deadline = _parse_duration(timeout)


cdef object _NO_PRIORITY = 0


cpdef int32_t parse_priority(object priority) except? -1:
    """Return a request's priority, as an integer within bounds.

    Raises:
        InvalidRequest: It is no integer.
    """
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequest("priority", priority, "an integer; larger is sooner")
    return min(max(priority, -(1 << 30)), 1 << 30)


cdef inline PyObject* _allocate_now(
    Allocator share, object size, object stream, object tag, Terms* terms, object timeout
) except NULL:
    # allocate(), with one reference, the caller's.
    cdef PyObject* buffer = _take(share, size, stream, tag)
    if buffer != NULL:
        return buffer
    return _counted(_wait_here(share, size, stream, tag, terms, timeout))


cdef object _wait_here(Allocator share, object size, object stream, object tag, Terms* terms, object timeout):
    # A request that this thread sees through.
    terms.calls = True
    cdef Request request = _submit(share, size, False, stream, tag, terms, timeout)
    try:
        if not request.ended:
            request._core.pool._serve(request)
    finally:  # what this thread has not carried out is the worker's, as it was served by others meanwhile
        jobs, request._jobs = request._jobs, None
        for job in jobs or ():
            request._core.perform(job, None)
    return request.result()


cdef inline PyObject* _allocate_soon(
    Allocator share, object size, object stream, object tag, Terms* terms, object timeout
) except NULL:
    # allocate_async(), with one reference, the caller's.
    cdef PyObject* buffer
    cdef Core core = share._core
    # A loop whose every await is a hit would never let another task run: now and then one is polite.
    if core is not None and core.streak < _STREAK:
        buffer = _take(share, size, stream, tag)
        if buffer != NULL:
            core.streak += 1
            return _ready(buffer, (<Buffer>buffer).nbytes)
    return _counted(_soon(_submit(share, size, False, stream, tag, terms, timeout)))


cdef object _soon(Request request):
    # What has its memory already is handed over without a turn of the loop, unless it is time for one.
    cdef Core core = request._core
    if core.streak >= _STREAK:
        core.streak = 0
        request.polite = True
        return request
    if not request.ended or request.failure is not None:
        return request
    found, request.found = request.found, None
    return _granted(found, found.nbytes)


def ready(Allocator share not None, Buffer found not None):
    """Return a request that has its buffer, as `allocate_async` does for a hit of a share."""
    cdef Request request = Request.__new__(Request)
    share._core.streak += 1
    request._core, request._share, request.nbytes = share._core, share, found.nbytes
    request.found, request.ended, request.until = found, True, never
    return _soon(request)


cdef Request _submit(Allocator share, object size, bint batch, object stream, object tag, Terms* terms, object timeout):
    # Read the rest of the arguments, and give the request to the scheduler. It may have ended when this returns.
    cdef Core core = share._core
    cdef Request request = Request.__new__(Request)
    cdef Ask ask
    cdef int index = 0
    cdef double seconds = terms.deadline
    if core is None or core.s == NULL or core.born != _generation:
        core = share._open_core()  # raises where it is closed
    request._core, request._share = core, share
    if batch:
        if isinstance(size, (str, bytes)):
            raise InvalidRequest("sizes", size, "several of them")
        request.sizes = tuple([_read_size(one) for one in size])
        request.nbytes = min(sum(request.sizes), <int64_t>max_size * 2)
    else:
        request.nbytes = _read_size(size)
    if tag is not None and not isinstance(tag, str):
        raise InvalidRequest("tag", tag, "text or None")
    request.tag = tag
    if stream is not None:
        index = core.stream_number(stream)
    ask.nbytes, ask.stream, ask.account, ask.arena = request.nbytes, index, share._account, share._arena
    core.cause(&ask, tag)
    if core.can_capture and (stream is not None or core.observed) and core.may_be_captured(index):
        request._capture = core.pool.captures.admit(index)
        terms.captured = True
        ask.stream = core.pool.executor.quiet()
    request.stream = ask.stream
    if core.call_site is not None:
        request._site = core.call_site()
    if core.noting:
        request._holder = core.pool._holder()
    request._timeout = None if timeout is None else seconds
    if terms.calls:
        terms.on_loop = core.loop_here() is not None
        terms.waits = 0 < seconds < never
        if terms.waits and terms.on_loop:
            raise InvalidRequest(
                "timeout", timeout, "0 or None on an event loop's thread", hint="await allocate_async instead")
        if terms.effort != Effort.Take and PyThread_get_thread_ident() in core.serving:
            raise InvalidRequest(
                "allocate", core.pool, "a thread that is not inside another call of this pool, as on_oom, a signal's "
                "handler and a finalizer may be", hint="use try_allocate there, which takes what is free")
        request._gate = _SimpleQueue()
        core.pool._divide_effects(request)
    else:
        request.loop = core.loop_here()
        if seconds == never and core.default_timeout is not None:
            request._timeout = seconds = core.default_timeout
    if seconds != never:
        terms.deadline = core.now() + seconds
        if seconds <= 0:
            terms.effort = Effort.Tidy
    request.until = terms.deadline
    if request._capture is not None and request._capture.graph.serve(request):
        return request
    core.submit(request, ask, deref(terms))
    return request


cdef object _SimpleQueue = queue.SimpleQueue


cdef int64_t _read_size(object size) except -1:
    cdef int64_t nbytes = asyncmem_whole(<PyObject*>size)
    if 0 <= nbytes <= <int64_t>max_size:
        return nbytes
    return _parse_size(size)


cdef inline bint _ask(Allocator share, Ask* ask, object stream, object tag) except -1:
    # Whether the fast path may serve this at all; fills in all but the size.
    cdef int index = 0
    cdef bint fast
    cdef Core core = share._core
    if core is None or core.born != _generation:
        return False
    fast = core.fast
    if not fast and (core.witness is None or not core._open or core.observed):
        return False
    if tag is not None and type(tag) is not str:
        return False
    if stream is not None:
        index = core.index_of(stream)
        if index < 0 or core.watch_captures and core.retire.capturing(index):
            return False
    ask.stream = index
    ask.fast = True
    ask.caused = not fast
    if not fast:
        core.witness.see(&ask.cause, tag)
    # Asking a stream lets other threads in, and one of them may have closed the budget or lease. From here on none comes.
    if share._core is not core:
        return False
    ask.account = share._account
    ask.arena = share._arena
    return True


cdef inline PyObject* _take(Allocator share, object size, object stream, object tag) except? NULL:
    # A buffer with one reference, the caller's; NULL for a miss.
    cdef Ask ask
    cdef uint32_t block
    cdef int64_t nbytes
    nbytes = _exact(size)
    if nbytes <= 0 or not _ask(share, &ask, stream, tag):
        return NULL
    ask.nbytes = nbytes
    block = share._core.c.take(ask, share._core.last)
    if block == 0:
        return NULL
    return _wrap(share._core, block, share._core.last.address, nbytes, ask.stream, ask.account, tag)


cdef extern from "Python.h":
    PyObject** asyncmem_items "PySequence_Fast_ITEMS" (object sizes)


cdef object _take_batch(Allocator share, object sizes, object stream, object tag):
    # One lock for all; None for a miss.
    cdef Core core = share._core
    cdef Ask ask
    cdef vector[uint64_t] wanted
    cdef vector[Granted] granted
    cdef int64_t nbytes = 0
    cdef PyObject* known = NULL  # batches mostly repeat one int
    cdef PyObject** items
    cdef Py_ssize_t i, count
    cdef object buffers
    if type(sizes) not in (list, tuple) or not _ask(share, &ask, stream, tag):
        return None
    ask.nbytes = 1
    items, count = asyncmem_items(sizes), len(sizes)
    wanted.resize(count)
    for i in range(count):  # reading an int runs no code that could change a list
        if items[i] != known:
            nbytes = _exact(<object>items[i])
            if nbytes <= 0:
                return None
            known = items[i]
        wanted[i] = nbytes
    core.tag(tag, ask.account)  # before anything is taken, so that a wrong one raises here
    granted.resize(count)
    if not core.c.take_many(ask, wanted, granted, core.last):
        core.signal_last()
        return None
    buffers = PyTuple_New(count)
    for i in range(count):
        PyTuple_SET_ITEM(buffers, i, _wrap(core, granted[i].block, granted[i].address, wanted[i], ask.stream, ask.account, tag))
    return _batch(core, <tuple>buffers)


cdef inline int64_t _exact(object size) noexcept:
    # The size as a C integer; -1 when it is no int, or larger than any block: the slow path says what is wrong with it.
    cdef int64_t nbytes = asyncmem_whole(<PyObject*>size)
    return -1 if nbytes > <int64_t>max_size else nbytes
