# distutils: language = c++
# cython: language_level=3, binding=False, boundscheck=False, wraparound=False, initializedcheck=False
# A copied or unpickled fence would be given back twice; signatures are for help() and for the test of the stub.
# cython: auto_pickle=False, embedsignature=True, embedsignature.format=clinic
"""The driver's hot calls by function pointer: the primary context, fences, streams, mapped memory, notices of fences.

Every driver call is made without the interpreter's lock. No call is made in a forked child or at the interpreter's end.
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector

cdef extern from "<atomic>" namespace "std" nogil:
    cdef cppclass atomic[T]:
        T load()

cdef extern from "binding/types.h":
    int asyncmem_is_ending() nogil  # asked without the interpreter's lock
    void asyncmem_make_inside(object cls) noexcept

cdef extern from "fence_calls.h" nogil:
    ctypedef struct AsyncmemFenceCalls:
        void *context

cdef extern from "table.hpp" namespace "asyncmem::gpu" nogil:
    ctypedef int Code
    ctypedef void *Handle
    Code SUCCESS "asyncmem::gpu::success"
    Code NOT_INITIALIZED "asyncmem::gpu::not_initialized"
    Code DEINITIALIZED "asyncmem::gpu::deinitialized"
    Code NOT_READY "asyncmem::gpu::not_ready"
    cdef cppclass Table:
        uint64_t legacy
        Code cuInit(unsigned)
        Code cuDriverGetVersion(int *)
        Code cuGetErrorName(Code, const char **)
        Code hipGetLastError()
        Code cuDeviceGetCount(int *)
        Code cuStreamGetId(Handle, unsigned long long *)
        Code cuStreamGetCtx(Handle, Handle *)
        Code cuStreamGetCaptureInfo(Handle, int *, unsigned long long *, Handle *, const Handle **, size_t *)
    string load_cuda(const Table **)
    string load_hip(const char *, const Table **)
    void set_finalizing(int (*)())
    void started()
    cbool is_gone "asyncmem::gpu::gone"()
    Handle as_handle(uint64_t)

cdef extern from "context.hpp" namespace "asyncmem::gpu" nogil:
    cdef cppclass CFence "asyncmem::gpu::Fence":
        atomic[int] references
    cdef cppclass CContext "asyncmem::gpu::Context":
        const Table &driver
        AsyncmemFenceCalls calls
        atomic[uint64_t] call_count
        atomic[uint64_t] over_budget
        @staticmethod
        Code open(const Table &, int, CContext **)
        Handle handle()
        int device()
        void use()
        void end_use()
        Code record(uint64_t, CFence **)
        Code record_all(CFence **)
        Code query(CFence *)
        Code wait(uint64_t, CFence *)
        int capturing(uint64_t)
        void release(CFence *)
        void share(CFence *)
        Code block_for(CFence *, int64_t, int64_t)
        Code create_stream(uint64_t *)
        void destroy_stream(uint64_t)
        void add_stream(uint64_t)
        void remove_stream(uint64_t)
        void begin_captures()
        void end_captures()
        Code listen()
        void stop_listening()
    cdef cppclass Entered:
        Entered(CContext &)
        Code code()

cdef extern from "watch.hpp" namespace "asyncmem::gpu" nogil:
    cdef cppclass CSink "asyncmem::gpu::Sink":
        int descriptor()
        vector[pair[uint64_t, Code]] take()
        void wake()
    cdef cppclass CWatcher "asyncmem::gpu::Watcher":
        void watch(CFence *, shared_ptr[CSink], uint64_t) except +
        void forget(const CSink *, uint64_t)
        void stop(cbool)
    shared_ptr[CWatcher] make_watcher(CContext &)

set_finalizing(asyncmem_is_ending)


cdef class Library:
    """A driver's library, found at run time."""

    cdef const Table *table

    def load_cuda(self):
        """Load CUDA's driver; return why it cannot be, or nothing."""
        return (<bytes>load_cuda(&self.table)).decode(errors="replace")

    def load_hip(self, bytes library, /):
        """Load HIP's runtime from a file, the first time; return why it cannot be, or nothing."""
        return (<bytes>load_hip(library, &self.table)).decode(errors="replace")

    @property
    def legacy(self):
        """The handle by which its legacy default stream is named."""
        return self.known().legacy

    def start(self):
        """Start it, once it is loaded (blocks), and return its code."""
        cdef Code code
        cdef const Table *table = self.known()
        if is_gone():
            return NOT_INITIALIZED
        with nogil:
            code = table.cuInit(0)
        if code == SUCCESS:
            started()
        return code

    def version(self):
        """Return its version, such as 12040 of CUDA or 60342134 of HIP, or 0."""
        cdef int found = 0
        cdef const Table *table = self.known()
        if not is_gone():
            with nogil:
                table.cuDriverGetVersion(&found)
        return found

    def device_count(self):
        """Return how many devices this process may see; where the driver fails, minus its code."""
        cdef int found = 0
        cdef Code code
        cdef const Table *table = self.known()
        with nogil:
            code = table.cuDeviceGetCount(&found)
        return -code if code else found

    cdef const Table *known(self) except NULL:
        if self.table == NULL:
            raise RuntimeError("the driver's library is not loaded")
        return self.table

    def error_name(self, int code):
        """Return the driver's name of a code; nothing where it has none."""
        cdef const char *name = NULL
        if self.table == NULL or is_gone() or self.table.cuGetErrorName(code, &name) != SUCCESS or name == NULL:
            return ""
        return name.decode(errors="replace")

    def forget_error(self):
        """Clear the driver's last error of this thread, where it keeps one."""
        if self.table != NULL and not is_gone():
            self.table.hipGetLastError()


def gone():
    """Return whether no driver call may be made any more: the interpreter is ending, or this is a forked child."""
    return is_gone()


cdef inline int check(Context context, str call, Code code) except -1:
    """Raise the error for a code, unless it is success."""
    if code != SUCCESS:
        raise context.failed(call, code)
    return 0


# A collector must not clear what is needed to release the rest; none of these is ever part of a cycle.
@cython.no_gc
cdef class Context:
    """One use of a device's primary context, which is retained for as long as there are any."""

    cdef CContext *context
    cdef object failed
    cdef cbool used

    def __cinit__(self, Library library not None, int ordinal, failed, /):
        """Retain the context (blocks). `failed` makes the error to raise from a call's name and its code."""
        cdef Code code
        cdef CContext *context = NULL
        cdef const Table *table = library.known()
        self.failed = failed
        with nogil:
            code = CContext.open(table[0], ordinal, &context)
        check(self, "cuDevicePrimaryCtxRetain", code)
        self.context = context
        self.used = True

    def __dealloc__(self):
        self.close()

    def close(self):
        """End this use, once (blocks where it is the last); the object serves the others."""
        if self.used:
            self.used = False
            with nogil:
                self.context.end_use()

    @property
    def handle(self):
        """The context, as the driver knows it."""
        return <uintptr_t>self.context.handle()

    @property
    def device(self):
        """The device, as the driver knows it."""
        return self.context.device()

    @property
    def fence_calls(self):
        """The address of the calls that compiled code makes by itself."""
        return <uintptr_t>&self.context.calls

    @property
    def call_count(self):
        """How many driver calls have been made through the context."""
        return self.context.call_count.load()

    @property
    def over_budget(self):
        """How many notices there have been that the process has more memory than it should."""
        return self.context.over_budget.load()

    def use(self):
        """Begin another use, to be ended by `end_use`."""
        self.context.use()

    def end_use(self):
        """End one use; the last one releases the context (blocks)."""
        with nogil:
            self.context.end_use()

    def entered(self):
        """Make the context current within a `with`, on this thread, undisturbed by graph captures."""
        return Scope(self)

    def paging(self):
        """Begin to map memory in reserved ranges; nothing is mapped yet."""
        return Paging(self)

    def record(self, uint64_t stream, /):
        """Record a fence behind all that was submitted to a stream so far."""
        cdef CFence *fence = NULL
        cdef Code code
        with nogil:
            code = self.context.record(stream, &fence)
        check(self, "cuEventRecord", code)
        return _fence(self, fence)

    def record_all(self):
        """Record a fence behind all that was submitted to every stream so far."""
        cdef CFence *fence = NULL
        cdef Code code
        with nogil:
            code = self.context.record_all(&fence)
        check(self, "cuCtxRecordEvent", code)
        return _fence(self, fence)

    def wait(self, uint64_t stream, Fence fence not None, /):
        """Order later work of a stream behind a fence, which may be another device's."""
        cdef Code code
        with nogil:
            code = self.context.wait(stream, fence.fence)
        check(self, "cuStreamWaitEvent", code)

    def capturing(self, uint64_t stream, /):
        """Return whether what is submitted to a stream is captured into a graph."""
        cdef int answer
        with nogil:
            answer = self.context.capturing(stream)
        check(self, "cuStreamIsCapturing", -min(answer, 0))
        return answer == 1

    def create_stream(self):
        """Make a non-blocking stream."""
        cdef uint64_t stream = 0
        cdef Code code
        with nogil:
            code = self.context.create_stream(&stream)
        check(self, "cuStreamCreate", code)
        return stream

    def destroy_stream(self, uint64_t stream, /):
        """Destroy a stream that `create_stream` made; what is queued there still runs."""
        with nogil:
            self.context.destroy_stream(stream)

    def add_stream(self, uint64_t stream, /):
        """Ask one more stream, of another library, whether it is captured, before `record_all`."""
        with nogil:  # the holder of its lock may be in the driver, which may wait for a callback
            self.context.add_stream(stream)

    def remove_stream(self, uint64_t stream, /):
        """Count it no more."""
        with nogil:
            self.context.remove_stream(stream)

    def begin_captures(self):
        """From here on any stream may be captured: `record_all` refuses. Ended by `end_captures`, each time once."""
        with nogil:
            self.context.begin_captures()

    def end_captures(self):
        """End what `begin_captures` began."""
        self.context.end_captures()

    def stream_id(self, uint64_t stream, /):
        """Return the stream's number, which no other stream of this process ever has. Asking ends a capture on it."""
        cdef unsigned long long number = 0
        cdef Code code
        with nogil:
            code = DEINITIALIZED if is_gone() else self.context.driver.cuStreamGetId(as_handle(stream), &number)
        check(self, "cuStreamGetId", code)
        return number

    def capture_of(self, uint64_t stream, /):
        """Return the number of the capture that an explicit stream is in, 0 for none, -1 for one that has failed."""
        cdef int status = 0
        cdef unsigned long long number = 0
        cdef Code code
        with nogil:
            code = DEINITIALIZED if is_gone() else self.context.driver.cuStreamGetCaptureInfo(
                as_handle(stream), &status, &number, NULL, NULL, NULL)
        check(self, "cuStreamGetCaptureInfo", code)
        return (number or -1) if status else 0

    def stream_context(self, uint64_t stream, /):
        """Return the context that a stream belongs to."""
        cdef Handle found = NULL
        cdef Code code
        with nogil:
            code = DEINITIALIZED if is_gone() else self.context.driver.cuStreamGetCtx(as_handle(stream), &found)
        check(self, "cuStreamGetCtx", code)
        return <uintptr_t>found

    def listen(self):
        """Begin to count notices of being over budget; False where the driver has none."""
        cdef Code code
        with nogil:
            code = self.context.listen()
        return code == SUCCESS

    def stop_listening(self):
        """End what `listen` has begun, once."""
        with nogil:
            self.context.stop_listening()


@cython.no_gc
cdef class Scope:
    """What `Context.entered` returns."""

    cdef Context owner
    cdef Entered *entered

    def __cinit__(self, Context owner not None, /):
        self.owner = owner
        self.entered = NULL

    def __enter__(self):
        cdef Code code
        with nogil:
            self.entered = new Entered(self.owner.context[0])
            code = self.entered.code()
        if code != SUCCESS:
            self._leave()
        check(self.owner, "cuCtxPushCurrent", code)
        return self

    def __exit__(self, *_error):
        self._leave()

    cdef _leave(self):
        cdef Entered *entered = self.entered
        self.entered = NULL
        with nogil:
            del entered


include "paging.pxi"


@cython.no_gc
cdef class Fence:
    """A point in a stream, by its event. Forgetting it gives the event back for the next."""

    cdef CFence *fence
    cdef Context owner

    def __dealloc__(self):
        cdef CFence *fence = self.fence
        if fence != NULL:
            with nogil:
                self.owner.context.release(fence)

    def done(self):
        """Return whether the device has reached it."""
        cdef Code code
        with nogil:
            code = self.owner.context.query(self.fence)
        if code == NOT_READY:
            return False
        check(self.owner, "cuEventQuery", code)
        return True

    def block(self, int64_t timeout, /):
        """Wait on this thread (blocks), at most so many microseconds, or for ever below 0; False if it was not reached.

        Signals are heard.
        """
        cdef int64_t waited = 0
        cdef int64_t part
        cdef Code code
        while True:
            part = 50_000 if timeout < 0 else min(50_000, timeout - waited)
            with nogil:
                code = self.owner.context.block_for(self.fence, waited, part)
            if code == SUCCESS:
                return True
            if code != NOT_READY:
                check(self.owner, "cuEventQuery", code)
            PyErr_CheckSignals()
            waited += part
            if 0 <= timeout <= waited:
                return False


asyncmem_make_inside(Fence)


cdef Fence _fence(Context owner, CFence *made):
    cdef Fence fence = Fence.__new__(Fence)
    fence.owner = owner
    fence.fence = made
    return fence


cdef class Sink:
    """Where notices of fences arrive. Its descriptor is readable while there are some."""

    cdef shared_ptr[CSink] sink

    def __cinit__(self):
        self.sink = make_shared[CSink]()
        if self.sink.get().descriptor() < 0:
            raise OSError("eventfd: there are no more file descriptors")

    def fileno(self):
        """The descriptor to wait for; it is closed with the sink."""
        return self.sink.get().descriptor()

    def take(self):
        """Take what has arrived: pairs of the token and 0, or the code with which the device was lost."""
        return self.sink.get().take()

    def wake(self):
        """Make the descriptor readable although nothing has arrived."""
        self.sink.get().wake()


@cython.no_gc
cdef class Watcher:
    """Learns on a native thread that fences are reached, and tells sinks."""

    cdef shared_ptr[CWatcher] watcher
    cdef Context owner

    def __cinit__(self, Context owner not None, /):
        self.owner = owner
        self.watcher = make_watcher(owner.context[0])

    def __dealloc__(self):
        if self.watcher.get() != NULL and not is_gone():
            self.watcher.get().stop(False)

    def watch(self, Fence fence not None, Sink sink not None, uint64_t token, /):
        """Notify `sink` once, by `token`, when the fence is reached or the device is lost."""
        check(self.owner, "cuEventQuery", DEINITIALIZED if is_gone() else SUCCESS)
        cdef CFence *shared = fence.fence
        cdef CWatcher *watcher = self.watcher.get()
        cdef shared_ptr[CSink] goal = sink.sink
        self.owner.context.share(shared)
        try:
            with nogil:
                watcher.watch(shared, goal, token)
        except BaseException:
            self.owner.context.release(shared)
            raise

    def forget(self, Sink sink not None, uint64_t token, /):
        """Cancel the notice; one that is on its way comes all the same."""
        cdef CWatcher *watcher = self.watcher.get()
        cdef const CSink *goal = sink.sink.get()
        if not is_gone():  # a forked child has no thread, and its locks may be held for ever
            with nogil:
                watcher.forget(goal, token)

    def stop(self):
        """Wait until all that is watched has been notified (blocks); then there is no thread any more."""
        cdef CWatcher *watcher = self.watcher.get()
        if not is_gone():
            with nogil:
                watcher.stop(True)
