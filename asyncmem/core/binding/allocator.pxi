# Allocator: how memory is asked for. A hit is served at once; every other request goes to the scheduler.

cdef class Allocator:
    """Allocates buffers: the base of pool, budget and lease."""

    cdef readonly Core _core
    cdef readonly uint32_t _account
    cdef readonly int32_t _arena
    cdef object __weakref__

    def _attach(self, Core core, account=0, arena=-1):
        """Connect it to a core, its account and (for a lease) its arena."""
        self._core = core
        self._account = _index(account, "account")
        self._arena = -1 if arena == -1 else <int32_t>_index(arena, "arena")
        if type(self) is not Allocator:
            for name in (b"allocate", b"allocate_async", b"try_allocate", b"allocate_batch"):
                asyncmem_own_method(type(self), name)

    def allocate(self, size, *, stream=None, tag=None, priority=0, timeout=None):
        """Answer a buffer, from any thread, without awaiting.

        Args:
            size: Bytes, or text such as "64 MiB". Zero gives a valid empty buffer.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count it.
            priority: Higher is served first among those who wait.
            timeout: Seconds to block this thread for, at most; None does not wait.

        Raises:
            InvalidRequest: An argument that cannot be right; a nonzero timeout on a running event loop's thread.
            OutOfMemoryError: There is no such memory, with all facts.
        """
        cdef Call call
        _read_call(&call, priority, timeout)
        return asyncmem_owned(_allocate_now(self, size, stream, tag, &call, timeout))

    def allocate_async(self, size, *, stream=None, tag=None, priority=0, timeout=None):
        """Start a request now and answer it: await it, enter it by `async with`, or give it to a task group.

        A hit is granted before this returns, and awaiting it takes no iteration of the loop. A request dropped unawaited
        gives its memory or its place in the queue back; a cancelled await means that nothing was allocated.

        Args:
            size: Bytes, or text such as "64 MiB". Zero gives a valid empty buffer.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count it.
            priority: Higher is served first among those who wait.
            timeout: Seconds from this call after which the await raises PoolTimeout.

        Raises:
            InvalidRequest: An argument that cannot be right. Everything else is raised at the await.
        """
        cdef Call call
        _read_call(&call, priority, timeout)
        return asyncmem_owned(_allocate_soon(self, size, stream, tag, &call, timeout))

    def try_allocate(self, size, *, stream=None, tag=None):
        """Answer a buffer if that takes no waiting or growing and has nobody wait longer, else None. From any thread."""
        cdef PyObject* buffer = _take(self, size, stream, tag)
        cdef Call call
        cdef Request request
        if buffer != NULL:
            return asyncmem_owned(buffer)
        _plain_call(&call)
        call.calls, call.effort = True, Effort.Take
        request = _submit(self, size, False, stream, tag, &call, None)
        if not request.ended:  # another thread's look at fences is under way, and would be waited for
            request._core.s.fail(request._id, CReason.NoMemory, request._core.now())
            request._core.carry_out()
        if not request.ended or request.failure is _NOTHING:
            return None
        return request.result()

    def allocate_batch(self, sizes, *, stream=None, tag=None, priority=0, timeout=None):
        """Start a request for one buffer a size, all or nothing, and answer it as allocate_async does.

        Args:
            sizes: Bytes or texts. Similar sizes are laid side by side; the batch has the order asked.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count them.
            priority: Higher is served first among those who wait.
            timeout: Seconds from this call after which the await raises PoolTimeout.
        """
        cdef Core core = self._core
        cdef object batch
        cdef Call call
        _read_call(&call, priority, timeout)
        if core is not None and core.streak < 1000:
            batch = _take_batch(self, sizes, stream, tag)
            if batch is not None:
                core.streak += 1
                return _granted(batch, 0)
        return _soon(_submit(self, sizes, True, stream, tag, &call, timeout))


# How a request was made, beside what for.
cdef struct Call:
    int32_t priority
    double timeout  # seconds
    bint timed, calls
    Effort effort


cdef inline void _plain_call(Call* call) noexcept:
    # As it is where only the size and the stream are named.
    call.priority, call.timeout, call.timed = 0, 0, False
    call.calls, call.effort = False, Effort.All


cdef int _read_call(Call* call, object priority, object timeout) except -1:
    # Before anything else, so that wrong arguments are refused whatever becomes of the request.
    _plain_call(call)
    if priority is not _NO_PRIORITY:
        call.priority = parse_priority(priority)
    if timeout is not None:
        call.timed, call.timeout = True, _parse_duration(timeout)
    return 0


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
    Allocator door, object size, object stream, object tag, Call* call, object timeout
) except NULL:
    # allocate(), with one reference, the caller's.
    cdef PyObject* buffer = _take(door, size, stream, tag)
    if buffer != NULL:
        return buffer
    return _counted(_wait_here(door, size, stream, tag, call, timeout))


cdef object _wait_here(Allocator door, object size, object stream, object tag, Call* call, object timeout):
    # A request that this thread sees through.
    call.calls = True
    cdef Request request = _submit(door, size, False, stream, tag, call, timeout)
    try:
        if not request.ended:
            request._core.pool._serve(request)
    finally:
        request._core.take_over(request)
    return request.result()


cdef inline PyObject* _allocate_soon(
    Allocator door, object size, object stream, object tag, Call* call, object timeout
) except NULL:
    # allocate_async(), with one reference, the caller's.
    cdef PyObject* buffer
    # A loop whose every await is a hit would never let another task run: now and then one is polite.
    if door._core is not None and door._core.streak < 1000:
        buffer = _take(door, size, stream, tag)
        if buffer != NULL:
            door._core.streak += 1
            return _ready(buffer, (<Buffer>buffer).nbytes)
    return _counted(_soon(_submit(door, size, False, stream, tag, call, timeout)))


cdef object _soon(Request request):
    # What has its memory already is handed over without a turn of the loop, unless it is time for one.
    cdef Core core = request._core
    if core is not None and core.streak >= 1000:
        core.streak = 0
        request.polite = True
        return request
    if not request.ended or request.failure is not None:
        return request
    found, request.found = request.found, None
    return _granted(found, found.nbytes)


cdef Request _submit(Allocator door, object size, bint batch, object stream, object tag, Call* call, object timeout):
    # Read the rest of the arguments, and give the request to the scheduler. It may have ended when this returns.
    cdef Core core = door._core
    cdef Request request = Request.__new__(Request)
    cdef Ask ask
    cdef Terms terms
    cdef int index = 0
    if core is None or core.s == NULL or core.born != _generation:
        core = door._open_core()  # raises where it is closed
    request._core, request._share = core, door
    if batch:
        request.sizes = tuple([_read_size(one) for one in size])
        request.nbytes = min(sum(request.sizes), <int64_t>max_size * 2)
    else:
        request.nbytes = _read_size(size)
    if tag is not None and not isinstance(tag, str):
        raise InvalidRequest("tag", tag, "text or None")
    request.tag = tag
    if stream is not None:
        index = core.index_of(stream)
        if index < 0:
            index = core.pool.stream_index(stream)
    ask.nbytes, ask.stream, ask.account, ask.arena = request.nbytes, index, door._account, door._arena
    ask.anywhere = ask.door = ask.again = False
    core.cause(&ask, tag)
    terms.captured = False
    if core.can_capture and (stream is not None or core.observed) and core.may_be_captured(index):
        request._capture = core.pool.captures.admit(index)
        terms.captured = True
        ask.stream = core.pool.executor.quiet()
    request.stream = ask.stream
    if core.tracking:
        request._site = core.pool._call_site()
    if core.noting:
        request._holder = core.pool._holder()
    request._timeout = timeout
    terms.priority, terms.effort, terms.calls, terms.on_loop = call.priority, call.effort, call.calls, False
    terms.deadline, terms.waits = never, True
    if call.calls:
        terms.on_loop = core.loop_here() is not None
        if call.timed and call.timeout > 0 and terms.on_loop:
            raise InvalidRequest(
                "timeout", timeout, "0 or None on an event loop's thread", hint="await allocate_async instead")
        terms.waits = call.timed and call.timeout > 0
        request._jobs, request._gate = [], _SimpleQueue()
    elif not call.timed and core.default_timeout is not None:
        call.timed, call.timeout, request._timeout = True, core.default_timeout, core.default_timeout
    if call.timed:
        terms.deadline = core.now() + call.timeout
        if call.timeout <= 0:
            terms.effort = Effort.Tidy
    request.until = terms.deadline
    if not call.calls:
        request.loop = core.loop_here()
    if request._capture is not None and core.pool._reuse(request):
        return request
    core.submit(request, ask, terms)
    return request


cdef object _SimpleQueue = queue.SimpleQueue


cdef int64_t _read_size(object size) except -1:
    cdef int64_t nbytes = asyncmem_whole(<PyObject*>size)
    if 0 <= nbytes <= <int64_t>max_size:
        return nbytes
    return _parse_size(size)


cdef inline PyObject* _counted(object answer) noexcept:
    # With one reference more, the caller's.
    Py_INCREF(answer)
    return <PyObject*>answer


cdef inline bint _ask(Allocator door, Ask* ask, object stream, object tag) except -1:
    # Whether a fast door may serve this at all; fills in all but the size.
    cdef int index = 0
    cdef bint fast
    if door._core is None or door._core.born != _generation:
        return False
    fast = door._core.fast
    if not fast and (door._core.witness is None or not door._core._open or door._core.observed):
        return False
    if tag is not None and type(tag) is not str:
        return False
    if stream is not None:
        index = door._core.index_of(stream)
        if index < 0 or (door._core.watch_captures and _is_captured(door._core, index)):
            return False
    ask.stream = index
    ask.account = door._account
    ask.arena = door._arena
    ask.anywhere = False
    ask.door = True
    ask.again = False
    ask.caused = not fast
    if not fast:
        door._core.witness.see(&ask.cause, tag)
    return True


cdef bint _is_captured(Core core, uint32_t index) except -1:
    return core.retire is None or core.retire.capturing(index)


cdef inline PyObject* _take(Allocator door, object size, object stream, object tag) except? NULL:
    # A buffer with one reference, the caller's; NULL for a miss.
    cdef Ask ask
    cdef uint32_t block
    cdef int64_t nbytes
    nbytes = _exact(size)
    if nbytes <= 0 or not _ask(door, &ask, stream, tag):
        return NULL
    ask.nbytes = nbytes
    block = door._core.c.take(ask, door._core.last)
    if block == 0:
        return NULL
    return _wrap(door._core, block, door._core.last.address, nbytes, ask.stream, ask.account, tag)


cdef extern from "Python.h":
    PyObject** asyncmem_items "PySequence_Fast_ITEMS" (object sizes)


cdef object _take_batch(Allocator door, object sizes, object stream, object tag):
    # One lock for all; None for a miss.
    cdef Core core = door._core
    cdef Ask ask
    cdef vector[uint64_t] wanted
    cdef vector[Granted] granted
    cdef int64_t nbytes = 0
    cdef PyObject* known = NULL  # batches mostly repeat one int
    cdef PyObject** items
    cdef Py_ssize_t i, count
    cdef object buffers
    if type(sizes) not in (list, tuple) or not _ask(door, &ask, stream, tag):
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
    if not core.c.take_many(ask, wanted.data(), count, granted.data(), core.last):
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
