# Buffer: what a user holds. Dropping it gives its block back.

cdef char _nothing = 0  # where the buffer protocol points for an empty buffer

# An export that ends with the buffer's own object: a reader of a CUDA array interface keeps only what offered it.
cdef enum:
    _LENT = 1 << 30


# Slots that are mostly empty are plain pointers, NULL for None: filling and clearing a handful of object attributes is a
# chain of updates of None's reference count, which took half the time of a hit.

cdef inline object _read(PyObject* slot):
    return None if slot == NULL else <object>slot


cdef inline void _write(PyObject** slot, object value) noexcept:
    cdef PyObject* old = slot[0]
    if value is None:
        slot[0] = NULL
    else:
        Py_INCREF(value)
        slot[0] = <PyObject*>value
    Py_XDECREF(old)


@cython.final
@cython.no_gc
cdef class Buffer:
    """Memory on a device, yours until you free or drop it.

    Freeing returns the block to its home stream: later work of that stream may use it at once, other streams are ordered
    behind it first. Freeing twice does nothing; every other use of a freed buffer raises BufferReleased. Any thread may free.

    Attributes:
        nbytes: The bytes that were asked for.
        alive: Whether it has not been freed yet.
    """

    cdef PyObject* owner  # its Core
    cdef PyObject* label  # its Tag
    cdef PyObject* noted  # what the pool has noted about it
    cdef PyObject* late  # a 1-tuple of the stream named by a free() that waits for the last export
    cdef object __weakref__
    cdef readonly uint64_t _address
    cdef readonly int64_t nbytes
    cdef readonly uint32_t _block
    cdef uint32_t home
    cdef uint32_t held  # the number of its hold by the owner that entered it, 0 for none
    cdef int exports
    cdef readonly bint alive

    def __dealloc__(self):
        if self.alive or self.exports:
            self.drop()
        Py_XDECREF(self.label)
        Py_XDECREF(self.noted)
        Py_XDECREF(self.late)
        Py_XDECREF(self.owner)

    cdef inline void give(self) noexcept:
        # The one release of a buffer that only its home stream has used.
        cdef uint32_t flags
        cdef uint32_t block = self.leave_block()
        if block == 0 or (<Core>self.owner).born != _generation:
            return
        flags = (<Core>self.owner).c.free(block)
        if self.nbytes >= (<Core>self.owner).fence_from:
            self.fence_home()
        if flags:
            (<Core>self.owner).signal(flags)

    cdef void fence_home(self) noexcept:
        try:
            self.core().retire.fence_home(self.home, <uint64_t>self.nbytes)
        except BaseException as error:
            _report_or_raise_soon(error, self.core())

    cdef inline uint32_t leave_block(self) noexcept:
        # Its block, which is not this buffer's any more.
        cdef uint32_t block = self._block
        self._block = 0
        if self.label != NULL:
            (<Tag>self.label).live -= self.nbytes
        if self.held:
            self._let_go()
        return block

    cpdef void _let_go(self) noexcept:
        """Note that no owner holds it."""
        cdef uint32_t held = self.held
        self.held = 0
        if held and self.core().born == _generation:
            self.core().s.release(held)

    cpdef _hold(self, owner=None):
        """Note that the running owner, or the given one, holds it until it is freed or let go; nothing where one does."""
        cdef Core core = self.core()
        if not self.held and self._block and core.s != NULL:
            self.held = core.s.hold(core.owner() if owner is None else owner, self._block)

    cdef inline Core core(self):
        return <Core>self.owner

    @property
    def _notes(self):
        """What is noted about the buffer, None for most."""
        return _read(self.noted)

    cpdef Notes _noted(self):
        """Return its notes, new ones at first."""
        if self.noted == NULL:
            notes = Notes.__new__(Notes)
            _write(&self.noted, notes)
        return <Notes>self.noted

    cdef void drop(self) noexcept:
        # Its last reference is gone. It must not be shown to code that could keep it, if only in a traceback.
        if not self.alive:  # freed, and kept from then on by an export of this very object
            self.end_export()
            return
        self.alive = False
        if self.noted != NULL and (<Notes>self.noted).site is not None and self.core().born == _generation:
            try:
                self.core().pool._forgotten(self.nbytes, self.tag, (<Notes>self.noted).site)
            except BaseException as error:
                _report_or_raise_soon(error, self.core())
        if self.noted == NULL:
            self.finish(None)
        else:
            self.finish_unattended(None)

    cdef void end_export(self) noexcept:
        # The block of a freed buffer follows, long after the free.
        stream = None
        if self.late != NULL:
            stream = (<object>self.late)[0]
            (<Core>self.owner).exported_bytes -= self.nbytes
            _write(&self.late, None)
        self.finish_unattended(stream)

    cdef void finish_unattended(self, object stream) noexcept:
        # For a caller that cannot say that streams known by mere handles are still alive.
        cdef Retire retire = self.core().retire
        retire.unattended += 1
        self.finish(stream)
        retire.unattended -= 1

    cdef void finish(self, object stream) noexcept:
        # Release where an error cannot be raised: what cannot be ordered is owed to every stream.
        try:
            self.release(stream)
        except BaseException as error:
            _report_or_raise_soon(error, self.core())
            self.give_everywhere()

    cdef int release(self, object stream) except -1:
        # Give the block back behind the streams that use it and, where one is named, the one that used it last.
        cdef Core core = self.core()
        cdef Notes notes = None
        cdef int64_t last = -1
        cdef uint32_t flags
        if stream is not None and self._block and core.born == _generation:
            last = core.stream_number(stream)
        if self._block == 0 or core.born != _generation or self.noted == NULL and (last < 0 or last == self.home):
            self.give()
            _write(&self.noted, None)  # borrowed memory goes back to its owner
            return 0
        if self.noted != NULL:
            notes = <Notes>self.noted
            if notes.checked:
                core.device.checker.close_block(self._address)
            if notes.graph is not None and not notes.graph.released:
                self.leave_to_graph(notes.graph, notes.has_others(self.home) or last >= 0 and last != self.home)
                return 0
            if notes.graph is not None:  # it was launched on streams that are not known
                notes.add_user(core.retire.everywhere())
        flags = core.retire.give(self._block, <uint64_t>self.nbytes, self.home, last, notes)
        self.leave_block()
        _write(&self.noted, None)  # so that the dead buffer can be used again
        if flags:
            core.signal(flags)

    cdef int leave_to_graph(self, object graph, bint used_elsewhere) except -1:
        cdef uint32_t block = self._block
        nbytes = self._block_bytes
        (<dict?>graph.kept)[block] = nbytes
        self.leave_block()
        graph.keep(block, self.home, nbytes, used_elsewhere)

    cdef void give_everywhere(self) noexcept:
        cdef uint32_t flags
        if self._block == 0:
            return
        flags = self.core().c.free_everywhere(self.leave_block())
        if flags:
            self.core().signal(flags)

    def __dir__(self):
        return [name for name in object.__dir__(self) if name not in _BUFFER]

    def free(self, stream=None):
        """Give the memory back now. Does nothing when it was given back already.

        Args:
            stream: The stream that used it last, when that is not its home; the block then waits for that stream too.

        While a memoryview or DLPack export lives, the buffer dies at once and its block follows when the last one does.

        Raises:
            InvalidRequest: The stream is not one of this buffer's device; the buffer stays as it was.
        """
        if not self.alive:
            return
        if stream is None and self.noted == NULL and self.exports == 0:
            self.alive = False
            self.give()
        else:
            self.free_ordered(stream)

    cdef int free_ordered(self, object stream) except -1:
        cdef Core core = self.core()
        self.alive = False
        if core.born != _generation:
            return 0
        if self.exports:
            _write(&self.late, (stream,))
            core.exported_bytes += self.nbytes
            return 0
        try:
            self.release(stream)
        except BaseException:
            if self._block:
                self.alive = True  # the error loses nothing: the caller still holds it and may free it again
            raise

    def _set_home(self, uint32_t index):
        """Make stream number `index` the home, which is ordered behind the former one already."""
        self.need("hand_over()")
        if self._block:
            self.core().c.set_home(self._block, index)
        self.home = index
        self.core().keep_in_order(self)

    def _disown(self):
        """Return the block and die without freeing it: it is the caller's to free or to lease. Not while exported."""
        self.need("taking its block")
        if self.exports:
            raise BufferError("the buffer is exported")
        self.alive = False
        _write(&self.noted, None)
        return self.leave_block()

    @property
    def _lent(self):
        """Whether its address was read as a CUDA array interface: who did may use it for as long as this object lives."""
        return bool(self.exports & _LENT)

    def _renew(self):
        """Return a buffer with all that this one had, and die: who kept this one sees from then on that it is gone.

        For the pool. Not while exported; that its address was lent is forgotten.
        """
        cdef Buffer heir
        self.need("taking it over")
        if self.exports & ~_LENT:
            raise BufferError("the buffer is exported")
        heir = Buffer.__new__(Buffer)
        heir.owner, heir.label, heir.noted = self.owner, self.label, self.noted
        heir._address, heir.nbytes, heir._block, heir.home = self._address, self.nbytes, self._block, self.home
        heir.held, self.held = self.held, 0
        Py_XINCREF(self.owner)
        self.label = self.noted = NULL
        self._block = 0
        heir.alive = True
        self.exports = 0
        self.alive = False
        return heir

    def _lend(self, stream):
        """Order an export to a consumer's stream (DLPack's number), None for one that is not known. Does not block."""
        self.need("exporting it")
        self.used_by(stream, True)

    def _pin(self):
        """Return an object that counts as an export for as long as it lives."""
        self.need("exporting it")
        return _export(self)

    cdef void unexported(self) noexcept:
        self.exports -= 1
        if not self.exports and self.late != NULL:
            self.end_export()

    cdef int need(self, str action) except -1:
        if not self.alive:
            raise BufferReleased(self.nbytes, tag=self.tag, action=action)

    @property
    def address(self):
        """Device address of the first byte; 0 for an empty buffer."""
        self.need("address")
        return self._address

    @property
    def _block_bytes(self):
        # Of the block behind it, rounded up; 0 for an empty, borrowed or released buffer.
        return self.core().c.info(self._block).nbytes if self._block else 0

    @property
    def device(self):
        """The device that owns the memory."""
        return self.core().device

    @property
    def location(self):
        """The kind of that device: "cuda", "host", "simulated"."""
        return self.core().device.kind

    @property
    def stream(self):
        """The home stream: the one it was allocated for or handed over to."""
        return self.core().stream_objects[self.home]

    @property
    def readonly(self):
        """Whether it may not be written to: memory borrowed as read-only."""
        return self.is_borrowed() and (<Notes>self.noted).loan.readonly

    cdef inline bint is_borrowed(self) noexcept:
        return self.noted != NULL and (<Notes>self.noted).loan is not None

    @property
    def tag(self):
        """The tag it was allocated with, or None."""
        return None if self.label == NULL else (<Tag>self.label).name

    @property
    def _home(self):
        return self.home

    @property
    def _core(self):
        return self.core()

    @property
    def _account(self):
        return self.core().c.info(self._block).account if self._block else 0

    def __len__(self):
        return self.nbytes

    def __bool__(self):
        return True

    def __repr__(self):
        state = f"at {self._address:#x}" if self.alive else "freed"
        tag = "" if self.label == NULL else f" tag={_quoted((<Tag>self.label).name)}"
        device = self.core().device
        return f"<Buffer {self.nbytes} B {state} on {_printable(str(getattr(device, 'name', device)))}{tag}>"

    def __enter__(self):
        self.need("with")
        self._hold()
        return self

    def __exit__(self, *details):
        self.free()

    def __aenter__(self):
        return _granted(self.__enter__(), self.nbytes)

    def __aexit__(self, *details):
        self.__exit__()
        return _granted(None, -1)

    def use_on(self, stream):
        """Let another stream use it from here on: that stream waits for the home's work so far, and its own later work
        is waited for before the memory is used again. Does not block."""
        self.need("use_on()")
        self.used_by(stream, False)

    cdef int used_by(self, object stream, bint may_end) except -1:
        # From here on, by another stream, None for all of them; by one that `may_end` before the buffer is freed.
        cdef Core core = self.core()
        cdef uint32_t index
        if self.is_borrowed():
            core.pool._use_on(self, stream)
            return 0
        if stream is None:
            index = core.retire.everywhere()
        else:
            index = core.stream_number(stream)
            self.follow(index)
            if may_end and index != self.home and not core.retire.lane(index).lasting:
                index = core.retire.everywhere()  # nothing can be asked of a mere number then
        if index != self.home:
            self._noted().add_user(index)

    def hand_over(self, stream, *, ordered=False):
        """Make another stream the home, ordered behind the former one. Does not block.

        Args:
            stream: The stream; None for the device's default stream.
            ordered: Whether you have ordered it behind all work on the buffer yourself, so that it waits for nothing.
        """
        self.need("hand_over()")
        if self.is_borrowed():
            self.core().pool._hand_over(self, stream)
            return
        cdef uint32_t index = self.core().stream_number(stream)
        if index != self.home:
            if not ordered:
                self.follow(index)
            self._set_home(index)

    cdef int follow(self, uint32_t index) except -1:
        # Order a stream behind the home.
        cdef Core core = self.core()
        if not core.retire.order(self.home, index):
            captured = core.stream_objects[index if core.retire.capturing(index) else self.home]
            raise InvalidRequest("stream", captured, "a stream that is not being captured",
                                 hint="order it before the capture begins, or inside by events of the library that captures")

    def to_device(self):
        """Move a buffer that fell back to the host to the device it was asked for. Awaitable."""
        self.need("to_device()")
        return self.hooks()._to_device(self)

    def copy_from(self, source, *, stream=None):
        """Start copying host memory or another buffer to the first bytes of this one, and return a Copy to await.

        It comes behind what the home and `stream` were given so far, and later work of the home comes behind it. No
        other work may use the bytes until it is done. Freeing either side meanwhile is safe; host memory is kept. Cancelling
        the await stops nothing. Where the device says that copying would hold up the caller, as CUDA does for memory
        that is not page-locked, a thread makes the copy: then await it before submitting what needs the bytes.

        Args:
            source: Anything with the buffer protocol, contiguous, or a buffer or array of any device; at most nbytes.
            stream: The stream that copies; None for the home.

        Raises:
            InvalidRequest: It is none of these, is longer, or a stream is being captured.
            DeviceError: The device refused to begin. What it says later is raised at the await.
        """
        return self._copy(self.nbytes, source, stream, True, 0)

    def copy_to(self, target, *, stream=None):
        """Start copying to host memory, or to another buffer, and return a Copy to await.

        As copy_from, the other way round: `target`, if the host's, gets as many of the first bytes as it is long, and has
        them once the await returns. Later work of the home is not held back: let it only read, or await the copy first.
        """
        return self._copy(self.nbytes, target, stream, False, 0)

    def copy_to_device(self, other, *, stream=None):
        """Start copying all bytes to another buffer, of this device or of a peer, and return a Copy to await.

        In the order of both homes: behind what they were given so far, and later work of the other's home behind it.

        Args:
            other: A buffer or an array with at least as many bytes.
            stream: The stream that copies, of either device; None for the home.
        """
        if not isinstance(other, (Buffer, _array_type)):
            raise InvalidRequest("other", other, "a buffer or an array over one")
        return self._copy(self.nbytes, other, stream, False, 0)

    def _copy(self, nbytes, other, stream, into, offset):
        self.need("copying")
        return self.hooks()._copy(self, nbytes, other, stream, into, offset)

    def pin(self):
        """Keep the address and the memory behind it until the answer's `unpin()`, the end of its `with`, or its drop.

        Meanwhile free() ends the buffer, but its memory is neither handed out again nor given back to the device: for
        libraries that register memory by address. Pins count; the last one lets go.
        """
        self.need("pin()")
        return self.hooks()._pin(self)

    cdef object hooks(self):
        if self.core().pool is None:
            raise RuntimeError("the pool of this buffer is gone: it can only be read and freed")
        return self.core().pool

    def view(self, dtype="uint8", shape=None, offset=0):
        """Return a typed array over the whole buffer or a part of it; it keeps the buffer alive, not unfreed.

        Args:
            dtype: A numpy dtype or its name, "bfloat16", or a float8 name such as "float8_e4m3fn".
            shape: Its shape; None for one dimension over all bytes.
            offset: Bytes before its first element, a multiple of the element's own.
        """
        self.need("view()")
        return _array_type(self, dtype, shape, offset)

    def __getbuffer__(self, Py_buffer* view, int flags):
        self.need("the buffer protocol")
        if not self.core().device.host_readable:
            raise BufferError(f"{self.location} memory cannot be read by the host: copy it there first")
        cdef void* start = <void*>&_nothing if self._address == 0 else <void*><size_t>self._address
        PyBuffer_FillInfo(view, self, start, self.nbytes, self.readonly, flags)
        self.exports += 1

    def __releasebuffer__(self, Py_buffer* view):
        self.unexported()

    @property
    def __array_interface__(self):
        return self.view().__array_interface__

    @property
    def __cuda_array_interface__(self):
        interface = self.view().__cuda_array_interface__
        self.exports |= _LENT
        return interface

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Export the bytes as uint8 by the DLPack protocol; the capsule counts as an export."""
        return self.view().__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self):
        """Return (device type, number) by the DLPack protocol."""
        return self.core().device.dlpack_device


@cython.final
@cython.no_gc
cdef class Export:
    # Holds a buffer exported for as long as it lives.
    cdef Buffer buffer

    def __dealloc__(self):
        self.buffer.unexported()


cdef Export _export(Buffer buffer):
    cdef Export export = Export.__new__(Export)
    export.buffer = buffer
    buffer.exports += 1
    return export


cdef object _array_type


def set_array_type(kind):
    """Set the class of the arrays that `Buffer.view` makes: the core knows none itself."""
    global _array_type
    _array_type = kind
