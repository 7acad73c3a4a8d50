# Memory that moves under reserved ranges of addresses; `paging.hpp` does it.

ctypedef pair[uint64_t, uint64_t] Span
ctypedef pair[Span, uint64_t] Move

cdef extern from "paging.hpp" namespace "asyncmem::gpu" nogil:
    cdef cppclass Outcome:
        Code code
        const char *call
    cdef cppclass Progress:
        size_t moved, unmapped, mapped
        Outcome outcome
    cdef cppclass CPaging "asyncmem::gpu::Paging":
        CPaging(CContext &)
        Progress remap(const vector[Move] &, const vector[Span] &, const vector[Span] &, const vector[int] &, uint64_t) except +
        Outcome allow(const vector[int] &, cbool, uint64_t) except +
        cbool bare(uint64_t, uint64_t)
        void forget()


@cython.no_gc
cdef class Paging:
    """Memory under reserved ranges. Who uses it makes the context current, and keeps others off it."""

    cdef CPaging *paging
    cdef Context owner

    def __cinit__(self, Context owner not None, /):
        self.owner = owner
        self.paging = new CPaging(owner.context[0])

    def __dealloc__(self):
        del self.paging

    def remap(self, moves, out, into, devices, uint64_t step, /):
        """Make moves, unmap spans, map others for devices to use (blocks); return how many of each, and the error."""
        cdef vector[Move] shared = moves
        cdef vector[Span] gone = out
        cdef vector[Span] wanted = into
        cdef vector[int] users = devices
        cdef Progress done
        with nogil:
            done = self.paging.remap(shared, gone, wanted, users, step)
        return done.moved, done.unmapped, done.mapped, self.error(done.outcome)

    def allow(self, devices, cbool allowed, uint64_t step, /):
        """Let devices use all that is mapped or forbid it (blocks), `step` bytes a call where handles allow that."""
        cdef vector[int] users = devices
        cdef Outcome outcome
        with nogil:
            outcome = self.paging.allow(users, allowed, step)
        error = self.error(outcome)
        if error is not None:
            raise error

    def bare(self, uint64_t address, uint64_t nbytes, /):
        """Return whether nothing is mapped in a range; what could not be undone before is tried again."""
        cdef cbool found
        with nogil:
            found = self.paging.bare(address, nbytes)
        return found

    def forget(self):
        """Take all for given back, where no call may be made any more."""
        self.paging.forget()

    cdef object error(self, Outcome outcome):
        if outcome.code == SUCCESS:
            return None
        return self.owner.failed((<bytes>outcome.call).decode(), outcome.code)
