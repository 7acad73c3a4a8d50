# Memory for libraries that ask with the interpreter's lock held: as objects of their own, such as CuPy, or by address.

ctypedef intptr_t (*StreamHere)() except? -1


@cython.final
cdef class PointerAllocator:
    """Allocates what a library asks for on one thread, as objects of the library's, which keep the buffers.

    Args:
        share: The pool, budget or lease.
        device: The number that the library has for its device.
        stream_here: The library's function in C, as Cython offers it, that returns the handle of the current stream.
        stream_of: Returns what means a stream to the pool's device, of its handle.
        memory: Makes the library's object of an address, bytes, what to keep, and the device.
        pointer: Makes its pointer of that and an offset.
        tag: A name under which statistics and errors count what is live.
        timeout: Seconds to block the thread for at most, where the share has no room; None does not wait.
    """

    cdef Allocator share
    cdef StreamHere stream_here
    cdef object device, stream_of, memory, pointer, tag, timeout
    cdef dict known  # streams by handles that no other can have, as the pool keeps them alive
    cdef intptr_t latest
    cdef object latest_stream

    def __cinit__(self, Allocator share not None, device, stream_here, stream_of, memory, pointer, *, tag, timeout=None):
        self.stream_here = <StreamHere>PyCapsule_GetPointer(stream_here, PyCapsule_GetName(stream_here))
        self.share, self.device, self.stream_of, self.memory, self.pointer = share, device, stream_of, memory, pointer
        self.tag, self.timeout, self.known = tag, timeout, {}

    def allocate(self, nbytes):
        """Return a pointer to memory that is ready on the stream that is current, and goes back behind that as it dies.

        Raises:
            OutOfMemoryError: There is no such memory, with all facts.
        """
        cdef intptr_t handle = self.stream_here()
        cdef object stream = None if handle == 0 else self.stream(handle)
        cdef object timeout = self.timeout
        if timeout is not None and self.share._core is not None and self.share._core.loop_here() is not None:
            timeout = None  # an event loop's thread does not wait
        cdef Buffer buffer = _allocate_for(self.share, nbytes, stream, self.tag, timeout)
        if buffer.noted != NULL:
            (<Notes>buffer.noted).site = None  # to drop it is no leak
        return self.pointer(self.memory(buffer._address, buffer.nbytes, buffer, self.device), 0)

    cdef object stream(self, intptr_t handle):
        if handle != self.latest:
            stream = self.known.get(handle)
            if stream is None:
                return self.find(handle)
            self.latest, self.latest_stream = handle, stream
        return self.latest_stream

    cdef object find(self, intptr_t handle):
        cdef Core core = self.share._core
        stream = self.stream_of(handle)
        if core is None:
            return stream
        cdef uint32_t index = core.stream_number(stream)
        cdef Lane* lane = core.retire.lane(index)
        if lane.native and lane.lasting:
            self.known[handle] = core.stream_objects[index]
        return stream


@cython.final
cdef class AddressedBuffers:
    """Buffers of a share for a library that frees by address, and names a stream each time.

    Args:
        share: The pool, budget or lease.
        find: Returns the pool's stream, of what is known, one of the library's and its handle. Known are streams of the
            pool by handles that are theirs for as long as these buffers are there: it may add some.
        tag: A name under which statistics and errors count what is live.
        timeout: Seconds to block the thread for at most, where the share has no room; None does not wait.
    """

    cdef Allocator share
    cdef object look, tag, timeout
    cdef dict known, live

    def __cinit__(self, Allocator share not None, find, *, tag, timeout=None):
        self.share, self.look, self.tag, self.timeout, self.known, self.live = share, find, tag, timeout, {}, {}

    def allocate(self, nbytes, stream):
        """Return the address of memory that is ready in the order of a stream; what is empty has none of its own."""
        cdef Buffer buffer = _allocate_for(self.share, nbytes, self.find(stream), self.tag, self.timeout)
        if buffer.nbytes:
            self.live[buffer._address] = buffer
        return buffer._address

    def free(self, address, nbytes, stream):
        """Take memory back, behind the work of a stream, from any thread."""
        if nbytes:
            (<Buffer?>self.live.pop(address)).free(self.find(stream))

    cdef object find(self, stream):
        cdef object handle = stream.__cuda_stream__()[1]
        return self.known.get(handle) or self.look(self.known, stream, handle)


cdef Buffer _allocate_for(Allocator share, object nbytes, object stream, object tag, object timeout):
    cdef Terms terms
    cdef Buffer buffer
    _read_terms(&terms, _NO_PRIORITY, timeout)
    buffer = asyncmem_owned(_allocate_now(share, nbytes, stream, tag, &terms, timeout))
    need_device_memory(share, buffer)
    return buffer


cpdef object need_device_memory(Allocator share, Buffer buffer):
    """Free a buffer of the host's memory and raise `InvalidRequest`: a library for GPUs cannot use that."""
    if buffer.owner != <PyObject*>share._core:
        buffer.free()
        raise InvalidRequest("share", share, 'one without fallback="host": this library takes no host memory')
