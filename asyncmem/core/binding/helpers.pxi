# Calls that the main thread leaves to others.

cdef extern from "binding/helpers.hpp" namespace "asyncmem" nogil:
    uint64_t calls_left()
    uint64_t calls_ended()
    bint leave_call(uint64_t ended)
    void end_call(uint64_t left, bint idle)


def look_out_for_end():
    """Look out for the end of a call that was left to another thread, for a moment; return whether one has ended."""
    cdef uint64_t ended = calls_ended()
    cdef bint seen
    with nogil:
        seen = leave_call(ended)
    return seen


def next_call(calls):
    """Say that a call has ended, and return the next one of a queue (blocks); looks out for it before it sleeps."""
    cdef uint64_t left = calls_left()
    cdef bint idle = calls.empty()  # what comes from now on is counted
    with nogil:
        end_call(left, idle)
    return calls.get()
