# A recorded program through a heap of its own.

cdef extern from "scheduler/replay.hpp" namespace "asyncmem::replay" nogil:
    const int call_count
    const char** call_names

    cdef struct Point:
        uint64_t nbytes
        double us

    cdef cppclass Bill:
        uint64_t calls[11]
        double us

    cdef struct Steps:
        const int32_t* slot
        const int64_t* nbytes
        const int32_t* stream
        const int64_t* time_us
        size_t count
        uint32_t slots, streams

    cdef cppclass Setup:
        Policy policy
        double lag_us, pace, sample_us
        uint64_t survey_at
        vector[Point] costs[11]

    cdef struct Sample:
        double time_us
        uint64_t requested, live, reserved, largest_hole

    cdef cppclass Waste:
        uint64_t bytes, largest
        double squares
        vector[uint64_t] stranded

    cdef cppclass Tally:
        bint completed
        uint64_t failed_step, failed_bytes, peak_requested, peak_live, peak_reserved
        uint64_t takes, frees, misses, foreign, waits
        double wait_us, end_us, loop_ns, empty_loop_ns
        Bill bill
        Waste waste
        vector[Sample] samples

    Tally run(const Steps& steps, const Setup& setup) except +


DRIVER_CALLS = tuple([call_names[i].decode() for i in range(call_count)])


cdef class _Column:
    # A contiguous buffer of integers, for as long as a replay reads it.
    cdef Py_buffer view

    def __cinit__(self, column, formats, count):
        PyObject_GetBuffer(column, &self.view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)
        if self.view.ndim != 1 or self.view.format not in formats or (count is not None and self.view.shape[0] != count):
            PyBuffer_Release(&self.view)
            raise ValueError("the columns must be contiguous integers of the right sizes, and of one length")

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


def replay_steps(
    columns, *, slots, streams, costs, policy, lag_us=0, pace=1, sample_us=0, survey_at=0,
):
    """Run a program's steps through a scheduler of its own and return a ReplayTally; replay.hpp explains the settings.

    Args:
        columns: Slot (int32), bytes or -1 to free (int64), stream (int32) and microseconds (int64) of each step.
        slots: How many there are.
        streams: Likewise.
        costs: A sequence of (bytes, microseconds) for each of `DRIVER_CALLS`.
        policy: The scheduler's settings by name, the heap's among them.
    """
    cdef Steps steps
    cdef Setup setup
    cdef Tally tally
    cdef vector[Point] points
    cdef _Column slot = _Column(columns[0], (b"i",), None)
    steps.count = slot.view.shape[0]
    cdef _Column nbytes = _Column(columns[1], (b"l", b"q"), steps.count)
    cdef _Column stream = _Column(columns[2], (b"i",), steps.count)
    cdef _Column time_us = _Column(columns[3], (b"l", b"q"), steps.count)
    steps.slot, steps.nbytes = <const int32_t*>slot.view.buf, <const int64_t*>nbytes.view.buf
    steps.stream, steps.time_us = <const int32_t*>stream.view.buf, <const int64_t*>time_us.view.buf
    steps.slots = _index(slots, "slots")
    steps.streams = max(_index(streams, "streams"), 1)
    if len(costs) != call_count:
        raise ValueError(f"costs must be of {call_count} calls")
    for call, curve in enumerate(costs):
        points.clear()
        for size, us in curve:
            points.push_back(Point(_whole(size, "bytes"), us))
        setup.costs[<size_t>call] = points
    setup.policy = _policy_in(policy)
    setup.lag_us, setup.pace = lag_us, pace
    setup.sample_us, setup.survey_at = sample_us, _whole(survey_at, "survey_at")
    with nogil:
        tally = run(steps, setup)
    waste = ReplayWaste(tally.waste.bytes, tally.waste.largest, tally.waste.squares, tuple(tally.waste.stranded))
    samples = tuple([ReplaySample(**tally.samples[i]) for i in range(tally.samples.size())])
    return ReplayTally(
        tally.completed, tally.failed_step, tally.failed_bytes, tally.peak_requested, tally.peak_live,
        tally.peak_reserved, tally.takes, tally.frees, tally.misses, tally.foreign, tally.waits, tally.wait_us,
        tuple([tally.bill.calls[i] for i in range(call_count)]), tally.bill.us, tally.end_us, waste, samples,
        tally.loop_ns, tally.empty_loop_ns)
