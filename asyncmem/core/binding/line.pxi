# Line: the order of arrival. Compiled because every wait joins and leaves it (the row `handover` of the benchmarks); who
# is served next, and who may overtake whom, is decided in Python by its subclass.

cdef class Waiter:
    """One request's place in a queue: what it asks for, how urgent it is, and what became of it.

    The fields are those that the way of a plain request touches; `asyncmem.pool.waiting.Waiting` adds the rare ones.

    Attributes:
        nbytes: Bytes asked for, of all the parts of a batch together.
        total: Bytes that they take of the heap.
        priority: Larger is sooner.
        seq: Place in the order of arrival, given by the queue.
        mark: The queue's overtaking total when it joined.
        queue: Where it stands now, if it waits.
        provided: Whether growth that holds all of it is under way.
        pressed: Whether growth was refused it, so that it takes what it would rather leave.
    """

    cdef public int64_t nbytes, total, seq
    cdef public object priority, mark, queue
    cdef public object keeper, share, home, deadline, site, holder, promised, owner, tag, result, error
    cdef public object _callbacks, _sleepers
    cdef public double since
    cdef public uint32_t stream
    cdef public int awaited, tries
    cdef public bint batch, done, collected, asked_again, provided, pressed
    cdef public object timeout, inline, _sizes
    cdef PyObject* nap  # the compiled sleeper, which takes itself out before it dies
    cdef Cause cause  # who asks,
    cdef bint caused  # where that was noted

    def __cinit__(self):
        self.priority = 0
        self.inline = False
        self.promised = self._callbacks = self._sleepers = ()

    def __init__(self, nbytes, priority=0):
        self.nbytes = nbytes
        self.priority = priority

    def finish(self, result, error):
        """Settle it, with the turn held; whoever sleeps is woken by `wake` once the turn is free."""
        self.settle(result, error)

    def wake(self):
        """Wake the sleepers and run the callbacks of a settled request. Without the turn."""
        self.rouse()

    cdef inline void settle(self, object result, object error) noexcept:
        if self.caused and self.seq and not self.done:  # it stood in a queue
            (<Desk>self.keeper).note_wait(self, error)
        self.done = True
        self.owner = None
        self.result = result
        self.error = error

    cdef int rouse(self) except -1:
        if self.nap != NULL:
            (<Nap>self.nap).wake()
        if self._sleepers or self._callbacks:
            self._wake_others()
        return 0


cdef class Line:
    """Waiters in the order of arrival, with room for the order by size that the subclass keeps.

    Attributes:
        bytes: What the waiters ask for together.
        overtaken: Bytes granted so far past an older waiter.
        empty: Whether nobody stands here.
        urgent: How many have a priority other than 0.
        by_size: The waiters by size, of those that were filed so; emptied when the last waiter leaves.
        filed: How many places `by_size` has, those of waiters that left included.
    """

    cdef readonly int64_t bytes
    cdef public object overtaken
    cdef public dict by_size
    cdef public Py_ssize_t filed
    cdef readonly Py_ssize_t urgent
    cdef list arrivals  # None where the place is known to be empty
    cdef Py_ssize_t first, count
    cdef int64_t joined, known  # the last seq given, and the last one that was asked for by `unfiled`

    def __cinit__(self):
        self.arrivals = []
        self.by_size = {}
        self.overtaken = 0

    __class_getitem__ = classmethod(GenericAlias)

    def __len__(self):
        return self.count

    def __iter__(self):
        """Go through the waiters in the order of arrival."""
        return iter([one for one in self.arrivals[self.first:] if one is not None and (<Waiter>one).queue is self])

    @property
    def empty(self):
        return self.count == 0

    def join(self, Waiter waiter not None):
        """Put a waiter at the end of its priority."""
        self.put(waiter)

    def leave(self, Waiter waiter not None):
        """Take a waiter out, wherever it stands; one that has left already is left alone.

        That is a mark on the waiter, not a search: a storm of cancellations costs the same for each.
        """
        self.remove(waiter)

    def oldest(self):
        """Answer the waiter that has stood here longest."""
        return self.eldest()

    cdef int put(self, Waiter waiter) except -1:
        self.joined += 1
        waiter.seq = self.joined
        waiter.mark = self.overtaken
        waiter.queue = self
        self.arrivals.append(waiter)
        if waiter.priority != 0:
            self.urgent += 1
        self.count += 1
        self.bytes += waiter.nbytes
        return 0

    cdef int remove(self, Waiter waiter) except -1:
        if waiter.queue is not self:
            return 0
        waiter.queue = None
        if waiter.priority != 0:
            self.urgent -= 1
        self.count -= 1
        self.bytes -= waiter.nbytes
        if self.count == 0:
            self.arrivals.clear()
            self.first = 0
            if self.filed:
                self.filed = 0
                self.by_size.clear()
            return 0
        self.eldest()
        if self.first > 64 and 2 * self.first > len(self.arrivals):
            del self.arrivals[:self.first]
            self.first = 0
        if len(self.arrivals) - self.first > 2 * self.count + 64:
            self.arrivals = list(self)
            self.first = 0
        if self.filed > 2 * self.count + 64:
            self._sweep()
        return 0

    cdef Waiter eldest(self):
        while self.first < len(self.arrivals):
            one = self.arrivals[self.first]
            if one is not None and (<Waiter>one).queue is self:
                return <Waiter>one
            self.arrivals[self.first] = None
            self.first += 1
        return None

    def unfiled(self):
        """Answer the waiters that came since this was asked last."""
        found = []
        for one in reversed(self.arrivals):
            if one is None or (<Waiter>one).seq <= self.known:
                break
            if (<Waiter>one).queue is self:
                found.append(one)
        self.known = self.joined
        found.reverse()
        return found
