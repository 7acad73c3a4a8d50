# Core: a heap with what its buffers need: the device, the streams by number, tags, and the way up to the pool.

cdef unsigned int _generation = 0  # goes up in a forked child, where the driver's memory is not ours to touch


def _forked_child():
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked_child)


@cython.final
@cython.no_gc
cdef class Tag:
    # A tag's name and its live bytes: one object shared by all buffers of the tag.
    cdef str name
    cdef int64_t live


cdef class Desk


cdef class Waiter


cdef class Retire


@cython.final
cdef class Core(Heap):
    """A heap whose blocks are handed out as buffers of one device."""

    cdef readonly object device
    cdef public object pool
    cdef Desk desk  # the pool's, once it is open
    cdef readonly Retire retire  # what keeps the streams in order, where the doors may go to it themselves
    cdef readonly list stream_objects
    cdef readonly dict stream_ids
    cdef dict tags
    cdef PyObject* last_stream  # the two that were named last; kept alive by stream_objects
    cdef PyObject* other_stream
    cdef Tag last_tag
    cdef uint32_t last_index, other_index
    cdef unsigned int born
    cdef bint _open, _observed
    cdef bint fast  # open, not observed, and without a witness
    cdef Witness seen_by  # who notes who asks, while somebody wants to know
    cdef int witnesses  # how many do
    cdef int64_t overlap_bytes
    cdef double overlap_share
    cdef public int64_t overlap_least  # what `overlap` is at least, where it is a share and not none
    cdef public bint watch_captures  # whether the doors ask the driver if a named stream is being captured
    cdef int64_t fence_from  # bytes from which on a free at home may have a fence recorded; see Retire.fence_home
    cdef public int streak
    cdef readonly bint lacks_pages  # whether the latest grant missed for want of memory at its addresses (with the turn held)
    cdef int64_t _exported
    cdef object __weakref__

    def __init__(self, device, pool=None, /, **options):
        self.device = device
        self.pool = pool
        self.born = _generation
        self.fence_from = no_limit
        self.stream_objects = []
        self.stream_ids = {}
        self.tags = {}
        default = getattr(device, "default_stream", None)
        self.stream_objects.append(default)
        if default is not None:
            self.stream_ids[default] = 0

    @property
    def open(self):
        """Whether the fast doors may serve at all; False at birth."""
        return self._open

    @open.setter
    def open(self, bint value):
        self._open = value
        self.set_fast()

    @property
    def observed(self):
        """Whether somebody wants to see every request, so that the fast doors always miss."""
        return self._observed

    @observed.setter
    def observed(self, bint value):
        self._observed = value
        self.set_fast()

    cdef void set_fast(self) noexcept:
        self.fast = self._open and not self._observed and self.seen_by is None

    @property
    def witness(self):
        """Who notes who asks for memory, or None; `watch` sets it."""
        return self.seen_by

    def watch(self, Witness witness not None):
        """Have who asks for memory noted in the log from now on, until as many `unwatch` follow. One witness at a time."""
        if self.seen_by is not None and self.seen_by is not witness:
            raise ValueError("there is another witness")
        self.seen_by = witness
        self.witnesses += 1
        self.set_fast()

    def unwatch(self):
        """End one `watch`."""
        self.witnesses -= 1
        if self.witnesses == 0:
            self.seen_by = None
        self.set_fast()

    def see(self, Waiter waiter not None):
        """Note who makes a request; nothing where there is no witness."""
        if self.seen_by is not None:
            self.seen_by.see(&waiter.cause, waiter.tag)
            waiter.caused = True

    def blame(self, Waiter waiter):
        """Say for which request memory is taken from now on, None for no one (with the turn held)."""
        if waiter is None or not waiter.caused:
            self.blamed = NULL
        else:
            waiter.cause.missed = waiter.queue is not None
            waiter.cause.span_ns = <int64_t>(1e9 * <double>waiter.age)
            self.blamed = &waiter.cause

    def note(self, what, level=0, nbytes=0, address=0, seconds=0.0, stream=0, Waiter waiter=None):
        """Log what the pool has done; nothing where there is no log."""
        cdef LogRow row
        row.what, row.level = <LogWhat><int>what, level
        row.nbytes, row.address = _whole(nbytes, "nbytes"), _whole(address, "address")
        row.span_ns, row.stream = <int64_t>(1e9 * <double>seconds), stream
        if waiter is None or not waiter.caused:
            row.thread = thread_number()
        else:
            row.site, row.task, row.tag, row.thread = (
                waiter.cause.site, waiter.cause.task, waiter.cause.tag, waiter.cause.thread)
        self.c.note(row)

    @property
    def overlap(self):
        """The free memory up to which a door leaves a miss to the pool rather than make a stream wait for another one:
        bytes (an int), or a share (a float) of the most that has been live. 0 at birth."""
        return self.overlap_share if self.overlap_share else self.overlap_bytes

    @overlap.setter
    def overlap(self, value):
        self.overlap_share = value if isinstance(value, float) else 0.0
        self.overlap_bytes = 0 if isinstance(value, float) else value

    @property
    def forked(self):
        """Whether this process is a fork's child and the core its parent's: then nothing may be touched."""
        return self.born != _generation

    @property
    def exported_bytes(self):
        """Bytes of buffers that were freed while exported and whose blocks wait for the last export to die."""
        return self._exported

    def tag_bytes(self):
        """Answer the live bytes of every tag that has any, as asked for."""
        return {name: (<Tag>tag).live for name, tag in self.tags.items() if (<Tag>tag).live}

    def register_stream(self, stream):
        """Answer the stream's number, adding it to the heap at first sight; its object is kept alive."""
        index = self.stream_ids.get(stream)
        if index is None:
            index = self.c.add_stream()
            self.stream_objects.append(stream)
            self.stream_ids[stream] = index
        return index

    def grant(self, nbytes, stream_index=0, account=0, arena=-1, anywhere=False, tag=None):
        """Answer a buffer whose memory the stream may use at once, or None. Gates are ignored: the pool's slow path decides."""
        cdef uint64_t size = _size(nbytes)
        cdef Ask ask = self._ask(size, stream_index, account, arena, anywhere)
        self.tag(tag)
        ask.again = self.paged  # the door asked first
        cdef uint32_t block = self.c.take(ask, self.last)
        self.lacks_pages = self.last.reason == Reason.NoPages
        if not block:
            return None
        return self.keep_in_order(asyncmem_owned(_wrap(self, block, self.last.address, <int64_t>size, ask.stream, tag)))

    def grant_many(self, sizes, stream_index=0, account=0, arena=-1, anywhere=False, tag=None):
        """Answer a batch with one buffer a size, or None when not all fit. Zero sizes give empty buffers."""
        cdef Ask ask = self._ask(1, stream_index, account, arena, anywhere)
        cdef vector[uint64_t] wanted
        for size in sizes:
            wanted.push_back(0 if size == 0 and isinstance(size, int) else _size(size))
        ask.again = self.paged
        batch = self.take_batch(ask, wanted, tag, False)
        self.lacks_pages = batch is None and self.last.reason == Reason.NoPages
        if batch is not None:
            for buffer in (<Batch>batch).buffers:
                self.keep_in_order(buffer)
        return batch

    def adopt(self, block, nbytes, tag=None):
        """Wrap a block that was taken from this heap, or (0, 0) as an empty buffer."""
        cdef uint32_t index = _index(block, "block")
        if index == 0:
            if nbytes != 0:
                raise ValueError("block 0 is the empty buffer's: nbytes must be 0")
            return asyncmem_owned(_wrap(self, 0, 0, 0, 0, tag))
        cdef uint64_t size = _size(nbytes)
        return self.keep_in_order(asyncmem_owned(
            _wrap(self, index, self.c.address(index), <int64_t>size, self.c.home(index), tag)))

    def borrow(self, address, nbytes, stream_index, loan):
        """Wrap memory that is none of this heap's; `loan` is let go of once the buffer and its exports are gone.

        A true `loan.readonly` keeps everybody from writing. Owners must not hold the buffer.
        """
        buffer = asyncmem_owned(
            _wrap(self, 0, <uint64_t>address, <int64_t>nbytes, _index(stream_index, "stream"), None))
        buffer.notes = loan
        return buffer

    def adopt_many(self, blocks, sizes, tag=None):
        """Wrap blocks that were taken from this heap as one batch."""
        return _batch(self, tuple([self.adopt(block, size, tag) for block, size in zip(blocks, sizes, strict=True)]))

    cdef Tag tag(self, object name):
        if name is None:
            return None
        if type(name) is not str:
            raise TypeError(f"tag must be a str or None, got {type(name).__name__}")
        if self.last_tag is not None and self.last_tag.name is name:
            return self.last_tag
        cdef object found = self.tags.get(name)
        if found is None:
            if len(self.tags) >= 1024:  # tags that nothing carries any more, such as request numbers
                self.tags = {key: tag for key, tag in self.tags.items() if (<Tag>tag).live}
            found = Tag.__new__(Tag)
            (<Tag>found).name = name
            self.tags[name] = found
        self.last_tag = <Tag>found
        return <Tag>found

    cdef object take_batch(self, const Ask& ask, vector[uint64_t]& sizes, object tag, bint all_filled):
        # One lock for all. Empty buffers have no block: their sizes are left out of the take.
        cdef vector[uint64_t] filled
        cdef vector[uint64_t]* wanted = &sizes
        cdef vector[Granted] granted
        cdef Py_ssize_t i, count = sizes.size()
        cdef Granted* next
        cdef object buffers
        cdef PyObject* buffer
        self.tag(tag)  # before anything is taken, so that a wrong one raises here
        if not all_filled:
            for i in range(count):
                if sizes[i]:
                    filled.push_back(sizes[i])
            wanted = &filled
        granted.resize(wanted.size())
        if not self.c.take_many(ask, wanted.data(), wanted.size(), granted.data(), self.last):
            self.signal_last()
            return None
        next = granted.data()
        buffers = PyTuple_New(count)
        for i in range(count):
            if sizes[i]:
                buffer = _wrap(self, next.block, next.address, sizes[i], ask.stream, tag)
                next += 1
            else:
                buffer = _wrap(self, 0, 0, 0, ask.stream, tag)
            PyTuple_SET_ITEM(buffers, i, buffer)
        return _batch(self, <tuple>buffers)

    cdef void signal_last(self) noexcept:
        cdef uint32_t flags = self.last.flags
        self.last.flags = 0
        if flags:
            self.signal(flags)

    cdef void signal(self, uint32_t flags) noexcept:
        # Called at releases from anywhere, finalizers included: the pool's trouble must not become the caller's.
        if self.pool is None:
            return
        try:
            if flags != Flag.Waiting or self.desk is None or not self.desk.hand_over():
                self.pool._signal(flags)
        except BaseException as error:
            _report(error, self)

    cdef Buffer keep_in_order(self, Buffer buffer):
        # Nobody keeps this home alive, so the fence is recorded at the free: what is noted goes the way that does.
        if self.retire is not None and not self.retire.lane(buffer.home).lasting:
            buffer.note_user(buffer.home)
        return buffer

    cdef int index_of(self, object stream) except -2:
        """The number of a stream that is known and may go through the doors, else -1."""
        if stream is None:
            return 0
        if <PyObject*>stream == self.last_stream:
            return self.last_index
        if <PyObject*>stream == self.other_stream:  # a producer and a consumer take turns
            self.other_stream, self.last_stream = self.last_stream, self.other_stream
            self.other_index, self.last_index = self.last_index, self.other_index
            return self.last_index
        try:
            index = self.stream_ids.get(stream)
        except TypeError:  # unhashable: no stream of ours
            return -1
        if index is None or self.retire is not None and not self.retire.lane(index).lasting:
            return -1
        if self.stream_objects[index] is stream:
            self.other_stream, self.other_index = self.last_stream, self.last_index
            self.last_stream, self.last_index = <PyObject*>stream, index
        return index


cdef void _report(object error, object where) noexcept:
    # For what cannot be raised: to sys.unraisablehook.
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(where)


cdef inline PyObject* _wrap(
    Core core, uint32_t block, uint64_t address, int64_t nbytes, uint32_t home, object tag
) except NULL:
    # A buffer over a granted block, with one reference, the caller's.
    cdef PyObject* buffer = _new_buffer()
    Py_INCREF(core)
    (<Buffer>buffer).owner = <PyObject*>core
    (<Buffer>buffer).block = block
    (<Buffer>buffer).where = address
    (<Buffer>buffer).nbytes = nbytes
    (<Buffer>buffer).home = home
    (<Buffer>buffer).alive = True
    if tag is not None:
        _label(core, buffer, tag)
    if core.last.flags:
        core.signal_last()
    return buffer


cdef void _label(Core core, PyObject* buffer, object name) noexcept:
    cdef Tag tag = core.tag(name)
    _write(&(<Buffer>buffer).label, tag)
    tag.live += (<Buffer>buffer).nbytes
