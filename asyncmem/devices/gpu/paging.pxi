# Memory that moves under reserved ranges of addresses; `paging.hpp` does it.

cdef extern from "paging.hpp" namespace "asyncmem::gpu" nogil:
    cdef cppclass Outcome:
        Code code
        const char *call
    cdef struct Span:
        uint64_t address, nbytes
    cdef cppclass Progress:
        size_t unmapped, mapped
        Outcome outcome
    cdef cppclass CPaging "asyncmem::gpu::Paging":
        CPaging(CContext &)
        Progress remap(const vector[Span] &, const vector[Span] &, const vector[int] &, uint64_t) except +
        Outcome allow(const vector[int] &, cbool, uint64_t) except +
        cbool bare(const Span &)
        void forget()


cdef vector[Span] _spans(spans) except *:
    cdef vector[Span] found
    cdef Span one
    for address, nbytes in spans:
        one.address, one.nbytes = address, nbytes
        found.push_back(one)
    return found


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

    def remap(self, out, into, devices, uint64_t step, /):
        """Unmap spans, then map others for devices to use (blocks); return how many of each, and the error or None."""
        cdef vector[Span] gone = _spans(out)
        cdef vector[Span] wanted = _spans(into)
        cdef vector[int] users = devices
        cdef Progress done
        with nogil:
            done = self.paging.remap(gone, wanted, users, step)
        return done.unmapped, done.mapped, self.error(done.outcome)

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
        cdef Span one
        cdef cbool found
        one.address, one.nbytes = address, nbytes
        with nogil:
            found = self.paging.bare(one)
        return found

    def forget(self):
        """Take all for given back, where no call may be made any more."""
        self.paging.forget()

    cdef object error(self, Outcome outcome):
        if outcome.code == SUCCESS:
            return None
        return self.owner.failed((<bytes>outcome.call).decode(), outcome.code)
