# Witness: who asks for memory and from where, as numbers; each name is kept once.

cdef extern from "Python.h":
    ctypedef struct PyFrameObject
    ctypedef struct PyCodeObject
    PyFrameObject* PyEval_GetFrame() noexcept  # borrowed
    PyFrameObject* PyFrame_GetBack(PyFrameObject* frame) noexcept
    PyCodeObject* PyFrame_GetCode(PyFrameObject* frame) noexcept
    int PyFrame_GetLasti(PyFrameObject* frame) noexcept
    int PyFrame_GetLineNumber(PyFrameObject* frame) noexcept


cdef enum:
    _MOST_FRAMES = 128
    _MOST_TAGS = 65535
    _MOST_TASKS = 1 << 20


cdef class Witness:
    """Notes the callers of requests, while a pool's log is read.

    Number 0 of each kind stands for what is not known. Lists only grow, so a reader of one up to some length reads on
    from there.

    Args:
        named: The context variable of the tag for what is asked for without one.
        quiet: Folders whose frames are passed over: who called them is who asked.
        heard: Folders inside of those whose frames count all the same.

    Attributes:
        frames: How many frames of a call are kept.
        places: (file, line, function) of each line that was seen.
        sites: (place, site of its caller or 0) of each call that was seen, innermost frame first.
        tasks: Names of tasks.
        tags: Tags.
        threads: Names of threads, None for those that only freed.
    """

    cdef public int frames
    cdef readonly list places, sites, tasks, tags, threads
    cdef object named
    cdef tuple quiet, heard
    cdef dict task_numbers, tag_numbers
    cdef list codes  # so that no other code takes the place of one that is known
    cdef unordered_map[uint64_t, uint32_t] known  # place, by code and instruction; 0 for one to pass over
    cdef unordered_map[uint64_t, uint32_t] joined  # site, by its caller's and its place
    cdef object __weakref__

    def __cinit__(self, named, quiet=(), heard=(), frames=1):
        self.named, self.quiet, self.heard, self.frames = named, quiet, heard, frames
        self.places, self.sites, self.tasks, self.tags, self.threads = [None], [(0, 0)], [""], [""], [None]
        self.task_numbers, self.tag_numbers, self.codes = {}, {}, []

    cdef void see(self, Cause* cause, object tag) noexcept:
        # Before the memory is taken, so that a row is whole from the start. Fails no request: what is unknown stays 0.
        cause.span_ns, cause.missed = 0, False
        cause.caller = Caller(0, 0, 0, 0)
        cause.caller.thread = self.thread_here()
        cause.caller.site = self.site_here()
        cause.caller.task = self.task_here()
        cause.caller.tag = self.tag_here(tag)

    cdef uint16_t thread_here(self) except? 0:
        cdef uint16_t number = thread_number()
        while len(self.threads) <= number:
            self.threads.append(None)
        if number and self.threads[number] is None:
            self.threads[number] = _thread_name()
        return number

    cdef uint16_t tag_here(self, object tag) except? 0:
        cdef PyObject* named = NULL
        if tag is None:
            PyContextVar_Get(self.named, NULL, &named)
            if named == NULL:
                return 0
            tag = <object>named
            Py_DECREF(tag)
            if tag is None:
                return 0
        return _numbered(self.tag_numbers, self.tags, tag, _MOST_TAGS)

    cdef uint32_t task_here(self) except? 0:
        loop = _running_loop()
        task = _task_here(loop)
        if task is None:
            return 0
        return _numbered(self.task_numbers, self.tasks, task.name if loop is None else task.get_name(), _MOST_TASKS)

    cdef uint32_t site_here(self) except? 0:
        cdef uint32_t seen[_MOST_FRAMES]
        cdef int count = 0, most = min(self.frames, <int>_MOST_FRAMES)
        cdef uint32_t place, site = 0
        cdef PyFrameObject* back
        cdef PyFrameObject* frame = PyEval_GetFrame()
        Py_XINCREF(<PyObject*>frame)
        while frame != NULL and count < most:
            place = self.place_of(frame)
            if place:
                seen[count] = place
                count += 1
            if count < most:
                back = PyFrame_GetBack(frame)
                Py_XDECREF(<PyObject*>frame)
                frame = back
        Py_XDECREF(<PyObject*>frame)
        while count:
            count -= 1
            site = self.join(site, seen[count])
        return site

    cdef uint32_t join(self, uint32_t caller, uint32_t place) except 0:
        cdef uint64_t key = <uint64_t>caller << 32 | place
        found = self.joined.find(key)
        if found != self.joined.end():
            return deref(found).second
        # Making an object may run others' code, which may come here too: the number is what came of it.
        self.sites.append((place, caller))
        cdef uint32_t site = len(self.sites) - 1
        self.joined[key] = site
        return site

    cdef uint32_t place_of(self, PyFrameObject* frame) except? 0:
        cdef PyObject* code = <PyObject*>PyFrame_GetCode(frame)
        # Instructions are two bytes each, and addresses multiples of 16 below 2**48.
        cdef uint64_t key = <uint64_t>(<size_t>code >> 4) << 20 | <uint64_t>((PyFrame_GetLasti(frame) >> 1) & 0xFFFFF)
        found = self.known.find(key)
        if found != self.known.end():
            Py_XDECREF(code)
            return deref(found).second
        cdef object seen = <object>code
        Py_XDECREF(code)
        cdef uint32_t place = 0
        if not seen.co_filename.startswith(self.quiet) or seen.co_filename.startswith(self.heard):
            self.places.append((seen.co_filename, PyFrame_GetLineNumber(frame), seen.co_qualname))
            place = len(self.places) - 1
        self.codes.append(seen)
        self.known[key] = place
        return place


cdef uint32_t _numbered(dict numbers, list names, object name, Py_ssize_t most) except? 0:
    number = numbers.get(name)
    if number is None:
        if len(names) >= most:
            return 0
        names.append(str(name))
        number = len(names) - 1
        numbers[name] = number
    return number


cdef object _thread_name():
    # Asked of the table, because `current_thread()` would invent an object for a thread that Python has not started.
    thread = threading._active.get(PyThread_get_thread_ident())
    return f"thread {PyThread_get_thread_ident()}" if thread is None else thread.name


cdef object _current_task = asyncio.current_task if sys.version_info >= (3, 12) else vars(asyncio.tasks)["_current_tasks"].get


def log_time_ns():
    """Return the time that a log would note now."""
    return log_now()


cdef object _task_here(object loop):
    # The task that runs on this thread, of a loop of asyncio or, where none runs, of trio; None outside of any.
    if loop is not None:
        return _current_task(loop)
    trio = sys.modules.get("trio")
    return trio.lowlevel.current_task() if trio is not None and trio.lowlevel.in_trio_task() else None
