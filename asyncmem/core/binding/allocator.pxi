# Allocator: the doors. A hit is served here; everything else is the subclass's, in Python.

cdef class Allocator:
    """Serve buffers: at once when mapped memory allows, else by the slow methods of the subclass."""

    cdef Core core
    cdef uint32_t account
    cdef int32_t arena
    cdef object __weakref__

    def _attach(self, Core core, account=0, arena=-1):
        """Connect the doors to a core, its account and (for a lease) its arena."""
        self.core = core
        self.account = _index(account, "account")
        self.arena = -1 if arena == -1 else <int32_t>_index(arena, "arena")
        if type(self) is not Allocator:
            for name in (b"allocate", b"allocate_async", b"try_allocate", b"allocate_batch"):
                asyncmem_own_method(type(self), name)

    @property
    def _core(self):
        return self.core

    @property
    def _account(self):
        return self.account

    @property
    def _arena(self):
        return self.arena

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
        return asyncmem_owned(_allocate_now(self, size, stream, tag, priority, timeout))

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
        return asyncmem_owned(_allocate_soon(self, size, stream, tag, priority, timeout))

    def try_allocate(self, size, *, stream=None, tag=None):
        """Answer a buffer if that takes no waiting or growing and has nobody wait longer, else None. From any thread."""
        cdef PyObject* buffer = _take(self, size, stream, tag)
        if buffer != NULL:
            return asyncmem_owned(buffer)
        return self._try(size, stream, tag)

    def allocate_batch(self, sizes, *, stream=None, tag=None, priority=0, timeout=None):
        """Start a request for one buffer a size, all or nothing, and answer it as allocate_async does.

        Args:
            sizes: Bytes or texts. Similar sizes are laid side by side; the batch has the order asked.
            stream: The home stream; None for the device's default stream.
            tag: A name under which statistics and errors count them.
            priority: Higher is served first among those who wait.
            timeout: Seconds from this call after which the await raises PoolTimeout.
        """
        cdef Core core = self.core
        cdef object batch
        if core is not None and core.streak < 1000:
            batch = _take_batch(self, sizes, stream, tag)
            if batch is not None:
                core.streak += 1
                return _granted(batch, 0)
        return self._request_batch(sizes, stream, tag, priority, timeout)


cdef inline PyObject* _allocate_now(
    Allocator door, object size, object stream, object tag, object priority, object timeout
) except NULL:
    # allocate(), with one reference, the caller's.
    cdef PyObject* buffer = _take(door, size, stream, tag)
    if buffer != NULL:
        return buffer
    return _counted(door._allocate(size, stream, tag, priority, timeout))


cdef inline PyObject* _allocate_soon(
    Allocator door, object size, object stream, object tag, object priority, object timeout
) except NULL:
    # allocate_async(), with one reference, the caller's.
    cdef PyObject* buffer
    # A loop whose every await is a hit would never let another task run: now and then one takes the slow way.
    if door.core is not None and door.core.streak < 1000:
        buffer = _take(door, size, stream, tag)
        if buffer != NULL:
            door.core.streak += 1
            return _ready(buffer, (<Buffer>buffer).nbytes)
        if door.core.desk is not None and priority == 0 and timeout is None:
            ticket = door.core.desk.queue_up(door, size, stream, tag)
            if ticket is not None:
                return _counted(ticket)
    return _counted(door._request(size, stream, tag, priority, timeout))


cdef inline PyObject* _counted(object answer) noexcept:
    # With one reference more, the caller's.
    Py_INCREF(answer)
    return <PyObject*>answer


cdef inline bint _ask(Allocator door, Ask* ask, object stream, object tag) except -1:
    # Whether a fast door may serve this at all; fills in all but the size.
    cdef int index = 0
    cdef bint fast
    if door.core is None or door.core.born != _generation:
        return False
    fast = door.core.fast
    if not fast and (door.core.seen_by is None or not door.core._open or door.core._observed):
        return False
    if tag is not None and type(tag) is not str:
        return False
    if stream is not None:
        index = door.core.index_of(stream)
        if index < 0 or (door.core.watch_captures and _is_captured(door.core, index)):
            return False
    ask.stream = index
    ask.account = door.account
    ask.arena = door.arena
    ask.anywhere = False
    ask.door = True
    ask.again = False
    ask.caused = not fast
    if not fast:
        door.core.seen_by.see(&ask.cause, tag)
    return True


cdef bint _is_captured(Core core, uint32_t index) except -1:
    return core.retire is None or core.retire.is_capturing(index)


cdef inline PyObject* _take(Allocator door, object size, object stream, object tag) except? NULL:
    # A buffer with one reference, the caller's; NULL for a miss.
    cdef Ask ask
    cdef uint32_t block
    cdef int64_t nbytes
    nbytes = _exact(size)
    if nbytes <= 0 or not _ask(door, &ask, stream, tag):
        return NULL
    ask.nbytes = nbytes
    block = door.core.c.take(ask, door.core.last)
    if block == 0 and door.core.retire is not None:
        block = door.core.retire.find_more(ask)
    if block == 0:
        return NULL
    return _wrap(door.core, block, door.core.last.address, nbytes, ask.stream, tag)


cdef extern from "Python.h":
    PyObject** asyncmem_items "PySequence_Fast_ITEMS" (object sizes)


cdef object _take_batch(Allocator door, object sizes, object stream, object tag):
    cdef Ask ask
    cdef vector[uint64_t] wanted
    cdef int64_t nbytes = 0
    cdef PyObject* known = NULL  # batches mostly repeat one int
    cdef PyObject** items
    cdef Py_ssize_t i, count
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
    return door.core.take_batch(ask, wanted, tag, True)


cdef inline int64_t _exact(object size) noexcept:
    # The size as a C integer; -1 when it is no int, or larger than any block: the slow path says what is wrong with it.
    cdef int64_t nbytes = asyncmem_whole(<PyObject*>size)
    return -1 if nbytes > <int64_t>max_size else nbytes
