# Turn: the pool's one lock. Compiled because every wait takes it three times (the row `handover` of the benchmarks).

cdef extern from "pythread.h":
    ctypedef void* PyThread_type_lock
    PyThread_type_lock PyThread_allocate_lock() noexcept
    void PyThread_free_lock(PyThread_type_lock) noexcept
    int PyThread_acquire_lock(PyThread_type_lock, int wait) noexcept nogil
    void PyThread_release_lock(PyThread_type_lock) noexcept nogil
    unsigned long PyThread_get_thread_ident() noexcept


@cython.final
cdef class Turn:
    """Mutual exclusion over the pool's decisions, built so that a finalizer can never block on it.

    A buffer may be dropped anywhere: by the garbage collector in the middle of the pool's own code, in another thread,
    in a signal handler. Such a drop must not wait for the lock, and its wake-up must not get lost. So whoever cannot
    take the lock at once leaves a note, and whoever holds the lock settles all notes before it lets go, and looks once
    more after.

    Args:
        settle: Called with the lock held, before each release: pumps the queues and answers what to call once the
            lock is free (wake-ups and orders to the worker). Must not raise.
    """

    cdef PyThread_type_lock lock
    cdef object settle, notes

    def __cinit__(self, settle):
        self.settle = settle
        self.notes = deque()
        self.lock = PyThread_allocate_lock()
        if self.lock == NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.lock != NULL:
            PyThread_free_lock(self.lock)

    def __enter__(self):
        """Wait for the lock. Not for finalizers, which use `post`."""
        self.acquire()

    def __exit__(self, *details):
        """Settle what is owed and let go."""
        self.leave()

    cpdef acquire(self):
        """Wait for the lock, as ``with`` does; `leave` it in a ``finally``."""
        if not PyThread_acquire_lock(self.lock, 0):
            with nogil:
                PyThread_acquire_lock(self.lock, 1)

    cpdef leave(self):
        """Settle what is owed and let go of the lock."""
        while True:
            owed = []
            try:
                while True:
                    while self.notes:
                        self.notes.popleft()()
                    owed += self.settle()
                    if not self.notes:  # what settling itself raised is heard before anybody is woken
                        break
            finally:
                PyThread_release_lock(self.lock)  # also after a defect, which would be a hang otherwise
            for call in owed:
                try:
                    call()
                except Exception as error:  # whoever comes after it must be woken all the same
                    _report(error, call)
            # A note that came while the lock was held was left to us; one that comes now finds the lock free.
            if not self.notes or not PyThread_acquire_lock(self.lock, 0):
                return

    cdef bint take_quickly(self) except -1:
        # Take the lock if it is free and nobody left a note; then `leave`, or `let_go` where nothing is owed.
        return not self.notes and PyThread_acquire_lock(self.lock, 0)

    cdef int let_go(self) except -1:
        # Leave after a step that changed nothing that the pump would look at.
        if not self.notes:
            PyThread_release_lock(self.lock)
            if not self.notes or not PyThread_acquire_lock(self.lock, 0):
                return 0
        self.leave()
        return 0

    def renew(self):
        """Start over in a forked child, where whoever held the lock does not exist."""
        self.lock = PyThread_allocate_lock()
        self.notes.clear()

    def post(self, note):
        """Have a note run with the lock held, now or by whoever holds it; never waits. From any thread or finalizer."""
        self.notes.append(note)
        if PyThread_acquire_lock(self.lock, 0):
            self.leave()
