# Route: where a thread's allocations come from, for libraries that ask in C. What may take the interpreter's lock of them.

cdef extern from "binding/routes.hpp" namespace "asyncmem" nogil:
    cdef struct RouteCounts:
        int64_t live, peak, taken, freed, blocks, peak_blocks, blocks_taken, blocks_freed

    cdef cppclass CRoute "asyncmem::Route":
        void* object
        bint open
        CRoute* outer

    # Its lock is no type that Cython could hold, so C++ makes and shuts it.
    CRoute* asyncmem_new_route "asyncmem::new_route"(
        CHeap* heap, const AsyncmemFenceCalls* calls, void* object, int device, uint32_t account, int32_t arena,
        uint32_t everywhere, bint names_streams) except +
    void asyncmem_set_open "asyncmem::set_open"(CRoute* route, bint open)
    void asyncmem_know "asyncmem::know"(CRoute* route, uint64_t stream, uint32_t number) except +

    cdef cppclass Routes:
        void* (*missed)(CRoute* route, size_t nbytes, uint64_t stream) noexcept
        void add(CRoute& route, void* address, uint32_t block, size_t nbytes, bint everywhere) except +
        void use(CRoute& route)
        bint drop(CRoute& route)
        void install(CRoute& route)
        RouteCounts counts(const CRoute& route)
        void reset_peaks(CRoute& route)
        CRoute* wait_for_route(uint32_t& flags, int& owes) except +
        void fork()

    Routes& asyncmem_routes "asyncmem::Routes::all"()
    CRoute*& asyncmem_here "asyncmem::Routes::here"()
    string& asyncmem_failure "asyncmem::Routes::failure"()
    void* route_allocate(size_t nbytes, int device, void* stream)
    void* route_allocate_or_throw(size_t nbytes, int device, void* stream) except +
    void route_name_stream(void* address, void* stream)
    void route_release(void* address, size_t nbytes, int device, void* stream)

cdef object _route_thread = None  # tells pools what was freed; started with the first route


@cython.final
cdef class Route:
    """Where the allocations of one thread come from, for a library that asks by `ROUTE_CALLS`.

    Args:
        share: The pool, budget or lease.
        device: The number that the library has for its device.
        stream_of: Returns what means a stream to the pool's device, of its handle.
        tag: A name under which statistics and errors count what is live by this route.
        timeout: Seconds to block the thread for at most, where the share has no room; None does not wait.
        names_streams: The library frees each block on the stream that it asked for, and names others that use it, if
            any: memory goes back behind these.

    Attributes:
        failure: Why the latest allocation failed, None where it did not.
    """

    cdef CRoute* c
    cdef readonly Core core
    cdef readonly Allocator share
    cdef readonly str tag
    cdef readonly uint32_t account
    cdef object stream_of, timeout
    cdef public object failure
    cdef bint inside, names_streams

    def __cinit__(self, Allocator share not None, int device, stream_of, *, str tag=None, timeout=None, names_streams=False):
        cdef Core core = share._core
        if core is None or core.s == NULL or core.born != _generation:
            core = share._open_core()  # raises where it is closed
        self.core, self.share, self.account = core, share, share._account
        self.stream_of, self.tag, self.timeout = stream_of, tag, timeout
        self.names_streams = names_streams and core.retire.late_fences
        core.c.set_guarded(False)  # from now on, not all who come have the interpreter's lock
        self.c = asyncmem_new_route(
            core.c, core.retire.calls if core.can_capture else NULL, <void*>self, device, share._account, share._arena,
            core.retire.everywhere(), self.names_streams)
        asyncmem_know(self.c, 0, 0)
        _start_route_thread()

    def __dealloc__(self):
        del self.c

    def enter(self):
        """Serve this thread's allocations, until `leave`."""
        self.begin()
        self.c.outer = asyncmem_here()
        (&asyncmem_here())[0] = self.c

    def install(self):
        """Serve all threads that have entered no route of its device, until the process ends."""
        self.begin()
        asyncmem_routes().install(self.c[0])

    cdef int begin(self) except -1:
        # Serve allocations by it, until as many `end` follow.
        asyncmem_routes().use(self.c[0])
        if self not in self.core.routes:
            self.core.routes[self] = None
            Py_INCREF(self)  # what it has served is freed by its pointer, also when nothing else refers to it or its pool
        self.inside = True
        self.set_open()

    def leave(self):
        """End that. On the same thread, and the innermost first."""
        if asyncmem_here() != self.c:
            raise RuntimeError("a route is left on the thread that entered it, after all that were entered later")
        (&asyncmem_here())[0] = self.c.outer
        self.end()

    cdef int end(self) except -1:
        self.inside = False
        self.set_open()
        self.drop()

    @property
    def live(self):
        """The bytes that are live by it."""
        return asyncmem_routes().counts(self.c[0]).live

    def counts(self):
        """Return (live, peak, taken, freed) of bytes, and of blocks, since it began; peaks since `reset_peaks`."""
        cdef RouteCounts found = asyncmem_routes().counts(self.c[0])
        return ((found.live, found.peak, found.taken, found.freed),
                (found.blocks, found.peak_blocks, found.blocks_taken, found.blocks_freed))

    def reset_peaks(self):
        """Start the peaks again from what there is now."""
        asyncmem_routes().reset_peaks(self.c[0])

    cdef void set_open(self) noexcept:
        # Whether what is free may be taken past the interpreter's lock. Once it may not, nothing is being taken.
        asyncmem_set_open(self.c, self.inside and self.core.fast and not self.share.closing)

    cdef int drop(self) except -1:
        if asyncmem_routes().drop(self.c[0]):
            del self.core.routes[self]
            Py_DECREF(self)
        return 0

    cdef void* serve(self, size_t nbytes, uint64_t stream) except NULL:
        # What cannot be served at once. The calling thread may block, with the interpreter's lock released.
        cdef object meant = self.stream_of(stream) if stream else None
        cdef Core core = self.core
        if core.can_capture and core.may_be_captured(core.stream_number(meant)):
            raise InvalidRequest("stream", meant, "one that is not being captured: a graph would keep using the memory")
        cdef object timeout = None if core.loop_here() is not None else self.timeout  # an event loop's thread does not wait
        cdef Buffer buffer = self.share.allocate(nbytes, stream=meant, tag=self.tag, timeout=timeout)
        cdef void* address = <void*><size_t>buffer._address
        cdef Lane* lane
        need_device_memory(self.share, buffer)
        lane = core.retire.lane(buffer.home)
        if lane.native and lane.lasting:
            asyncmem_know(self.c, stream, buffer.home)
        asyncmem_routes().add(self.c[0], address, buffer._block, nbytes, not (self.names_streams and lane.lasting))
        buffer._disown()
        return address

    cdef void attend(self, uint32_t flags, bint owes) noexcept:
        # Something was freed, or a mark was crossed.
        if self.core.born != _generation:
            return
        if owes:
            self.record_everywhere()
            flags |= FLAG_WAITING
        self.core.c.expect_news(-1)
        if flags:
            self.core.signal(flags)

    cdef void record_everywhere(self) noexcept:
        try:
            self.core.retire.fence(self.core.retire.everywhere())
        except DeviceError:  # it is owed, and raised where a caller waits for it
            pass
        except BaseException as error:
            _report_or_raise_soon(error, self.core)


cdef void* _missed(CRoute* c, size_t nbytes, uint64_t stream) noexcept with gil:
    cdef Route route
    if asyncmem_is_ending():
        return NULL
    route = <Route>c.object
    try:
        found = route.serve(nbytes, stream)
        route.failure = None
        return found
    except BaseException as error:
        route.failure = error
        text = f"CUDA out of memory. {error}" if isinstance(error, TimeoutError) else str(error)
        (&asyncmem_failure())[0] = text.encode("utf-8", "replace")
        return NULL


asyncmem_routes().missed = _missed


cdef int _start_route_thread() except -1:
    global _route_thread
    if _route_thread is None:
        _route_thread = threading.Thread(target=_serve_routes, name="asyncmem routes", daemon=True)
        _route_thread.start()
    return 0


def _serve_routes():
    cdef CRoute* c
    cdef uint32_t flags = 0
    cdef int owes = 0
    cdef Route route
    while True:
        with nogil:
            c = asyncmem_routes().wait_for_route(flags, owes)
        route = <Route>c.object
        route.attend(flags, owes)
        route.drop()
        route = None


def route_failure():
    """Return why the latest allocation on this thread failed, and forget it; None where it did not, or has no route."""
    cdef Route route
    if asyncmem_here() == NULL:
        return None
    route = <Route>asyncmem_here().object
    failure, route.failure = route.failure, None
    return failure


ROUTE_CALLS = (<size_t>&route_allocate, <size_t>&route_release)
"""The addresses of `void* allocate(size_t, int device, void* stream)` and `void release(void*, size_t, int, void*)`."""

PROCESS_CALLS = (<size_t>&route_allocate_or_throw, <size_t>&route_release, <size_t>&route_name_stream)
"""The same for a library that looks at no result, so the first throws a `std::runtime_error`; and
`void name_stream(void* address, void* stream)`, for each other stream that uses a block."""
