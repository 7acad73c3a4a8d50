# Lanes: the streams of a pool by number, the fences recorded on them, and the driver calls about both.

cdef extern from "fence_calls.h":
    enum:
        ASYNCMEM_CAPTURED

    ctypedef struct AsyncmemFenceCalls:
        void* context
        int (*record)(void* context, uint64_t stream, void** fence) noexcept nogil
        int (*order)(void* context, uint64_t earlier, uint64_t later, void** fence, int* refused) noexcept nogil
        int (*record_all)(void* context, void** fence) noexcept nogil
        int (*query)(void* context, void* fence) noexcept nogil
        int (*wait)(void* context, uint64_t stream, void* fence) noexcept nogil
        int (*block)(void* context, void* fence) noexcept nogil
        int (*capturing)(void* context, uint64_t stream) noexcept nogil
        void (*release)(void* context, void* fence) noexcept nogil

cdef extern from "binding/fences.hpp" namespace "asyncmem":
    cdef struct Fence:
        void* made
        uint64_t epoch
        uint32_t users
        bint native

    cdef cppclass Lane:
        uint64_t handle
        bint native, lasting, everywhere, owed
        uint32_t unfenced
        uint64_t unfenced_bytes
        bint empty()
        size_t size()
        Fence* at(size_t i)
        bint crowded()
        void looked()
        bint push(Fence* fence) except +
        Fence* covering(uint64_t epoch)
        size_t pop(uint64_t epoch, vector[Fence*]& dropped) except +

    cdef cppclass FencePool:
        Fence* take() except +
        void put(Fence* fence)

cdef extern from "binding/types.h":
    bint asyncmem_is_ending() noexcept

cdef extern from "Python.h":
    void* PyLong_AsVoidPtr(object value) except? NULL


cdef int _ASLEEP = -0x7FFFFFFF

cdef str _RESTING = "no driver call after a fork or at the interpreter's end"
cdef str _CAPTURED = "the stream is being captured"


# A Retire that the garbage collector cleared would leave its heap before the buffers that still use both.
@cython.no_gc_clear
cdef class Lanes:
    """What `Retire` knows of its streams. Fences belong to their lane, and to each caller that asks or waits for one just now.

    The interpreter's lock guards all of this. It is released around every driver call, since a driver's callback may
    want it; so whatever a call is about is held by a use of its own, and everything else is looked at again after it.
    """

    cdef readonly dict ids
    cdef readonly list streams
    cdef readonly object _heap, _device
    cdef Core core  # the heap, where it is a pool's
    cdef CHeap* c  # likewise, where no Python stands in between
    cdef const AsyncmemFenceCalls* calls
    cdef vector[Lane*] lanes
    cdef FencePool pool
    cdef unsigned int born
    cdef int64_t records, waits, queries

    def __cinit__(self, heap, device, **options):
        self.born = _generation
        self._heap, self._device = heap, device
        if type(heap) is Core or type(heap) is Heap:
            self.c = (<Heap>heap).c
        if isinstance(heap, Core):
            self.core = heap
            self.ids, self.streams = self.core.stream_ids, self.core.stream_objects
        else:
            self.ids, self.streams = {device.default_stream: 0}, [device.default_stream]
        self.calls = <const AsyncmemFenceCalls*>PyLong_AsVoidPtr(device.fence_calls)
        self.lane(0)

    def __dealloc__(self):
        cdef vector[Fence*] dropped
        cdef size_t i
        for i in range(self.lanes.size()):
            self.lanes[i].pop(no_limit, dropped)
            del self.lanes[i]
        self.release(dropped)

    cdef inline Lane* lane(self, uint32_t index) except NULL:
        if index >= self.lanes.size():
            self.add_lanes(index)
        return self.lanes[index]

    cdef int add_lanes(self, uint32_t last) except -1:
        cdef Lane* fresh
        cdef bint native, lasting
        cdef uint64_t handle
        while last >= self.lanes.size():
            stream = self.streams[self.lanes.size()]
            lasting = stream is None or stream.lasting
            native = self.calls != NULL and (stream is None or stream.native)
            handle = stream.handle if native and stream is not None else 0
            fresh = new Lane()
            fresh.everywhere, fresh.lasting, fresh.native, fresh.handle = stream is None, lasting, native, handle
            self.lanes.push_back(fresh)

    # -- epochs, in the heap's own words or in those of a heap written in Python -------------------------------------

    cdef uint64_t close(self, uint32_t index) except 0:
        # Frees that wait for the next fence are counted anew first: those that come meanwhile may join either epoch.
        cdef Lane* lane = self.lane(index)
        lane.unfenced = 0
        lane.unfenced_bytes = 0
        lane.owed = False
        return self.c.close_epoch(index) if self.c != NULL else self._heap.close_epoch(index)

    cdef uint64_t open_epoch(self, uint32_t index) except 0:
        return self.c.epochs(index).open if self.c != NULL else self._heap.open_epoch(index)

    cdef bint is_done(self, uint32_t index, uint64_t epoch) except -1:
        return epoch <= self.c.epochs(index).done if self.c != NULL else self._heap.entry_state(index, epoch) == 2

    cdef int publish(self, uint32_t index, uint64_t epoch) except -1:
        if self.c != NULL:
            self.c.publish(index, epoch)
        else:
            self._heap.publish(index, epoch)

    cdef int mark_done(self, uint32_t index, uint64_t epoch) except -1:
        if self.c != NULL:
            self.c.mark_done(index, epoch)
        else:
            self._heap.mark_done(index, epoch)

    # -- fences ------------------------------------------------------------------------------------------------------

    cdef bint asleep(self) noexcept:
        # The driver belongs to the parent of a forked process, and may be gone when the interpreter ends.
        return self.born != _generation or asyncmem_is_ending()

    cdef int awake(self, str call) except -1:
        if self.asleep():
            raise self.refused(call, _RESTING)

    cdef object refused(self, str call, str why, int code=0):
        return DeviceError(call, code=code, code_name=why, device=self._device.name)

    cdef object captured(self):
        return self.refused("record", _CAPTURED, DeviceError.CAPTURE_UNSUPPORTED)

    cdef object error(self, str call, int code):
        return self._device.fence_error(call, code)

    cdef Fence* record(self, uint32_t index, uint64_t epoch, bint named) except NULL:
        # A fence behind a closed epoch, published; the caller drops it. `named`: the caller has just named the stream, so it is alive.
        cdef Lane* lane = self.lane(index)
        cdef Fence* fence
        cdef void* made = NULL
        cdef int code
        if lane.native:
            code = self.record_natively(lane, &made)
            if code:
                raise self.refusal(lane, code)
        else:
            # Where no reference keeps the stream alive, its number may be another stream's by now.
            try:
                recorded = self.device_fence(index, lane.everywhere or not (lane.lasting or named))
            except BaseException:
                lane.owed = True
                raise
            Py_INCREF(recorded)
            made = <void*>recorded
        fence = self.keep(lane, epoch, made)
        self.publish(index, epoch)
        return fence

    cdef Fence* keep(self, Lane* lane, uint64_t epoch, void* made) except NULL:
        # Findable before it is published: a caller that learns of a fence must be able to wait for it.
        cdef Fence* fence = self.pool.take()
        fence.made = made
        fence.epoch = epoch
        fence.users = 1
        fence.native = lane.native
        self.records += 1
        lane.push(fence)
        return fence

    cdef int record_natively(self, Lane* lane, void** made) noexcept:
        # 0, or why not, for `refusal`. A failure leaves the lane owing a fence.
        cdef int code = _ASLEEP
        if not self.asleep():
            with nogil:
                if lane.everywhere:
                    code = self.calls.record_all(self.calls.context, made)
                else:
                    code = self.calls.record(self.calls.context, lane.handle, made)
        if code:
            lane.owed = True
        return code

    cdef int order_natively(self, Lane* home, Lane* other, void** made, int* refused) noexcept:
        # The same, and a wait of the other stream, whose code goes to `refused`.
        cdef int code = _ASLEEP
        if not self.asleep():
            with nogil:
                code = self.calls.order(self.calls.context, home.handle, other.handle, made, refused)
        if code:
            home.owed = True
        return code

    cdef object refusal(self, Lane* lane, int code):
        if code == _ASLEEP:
            return self.refused("record", _RESTING)
        if code == ASYNCMEM_CAPTURED:
            return self.captured()
        if code < 0:
            return self.error("capturing", -code)
        return self.error("record_all" if lane.everywhere else "record", code)

    cdef object object_fence(self, uint32_t index):
        # A fence of the device's own, for a stream that only the device can make wait.
        fence = self.device_fence(index, self.lane(index).everywhere)
        self.records += 1
        return fence

    cdef object device_fence(self, uint32_t index, bint everywhere):
        self.awake("record")
        if everywhere:
            return self._device.record_all()
        if self.streams[index].capturing():
            raise self.captured()
        return self.streams[index].record()

    cdef void drop(self, Fence* fence) noexcept:
        cdef vector[Fence*] dropped
        fence.users -= 1
        if fence.users == 0:
            dropped.push_back(fence)
            self.release(dropped)

    cdef void release(self, vector[Fence*]& dropped) noexcept:
        # All at once, so that the interpreter's lock changes hands once.
        cdef vector[void*] native
        cdef vector[PyObject*] objects
        cdef size_t i
        for i in range(dropped.size()):
            if dropped[i].native:
                native.push_back(dropped[i].made)
            else:
                objects.push_back(<PyObject*>dropped[i].made)
            self.pool.put(dropped[i])
        if native.size() and not self.asleep():
            with nogil:
                for i in range(native.size()):
                    self.calls.release(self.calls.context, native[i])
        for i in range(objects.size()):
            Py_XDECREF(objects[i])

    cdef bint reached(self, Fence* fence) except -1:
        cdef int code
        self.awake("query")
        self.queries += 1
        if not fence.native:
            return (<object>fence.made).done()
        with nogil:
            code = self.calls.query(self.calls.context, fence.made)
        if code > 0:
            raise self.error("query", code)
        return code == 0

    cdef int wait(self, uint32_t taker, uint32_t source, Fence* fence) except -1:
        cdef Lane* lane = self.lane(taker)
        cdef int code
        self.awake("wait")
        if lane.native and fence.native:
            with nogil:
                code = self.calls.wait(self.calls.context, lane.handle, fence.made)
            if code:
                raise self.error("wait", code)
        else:
            self.streams[taker].wait(self.object_fence(source) if fence.native else <object>fence.made)
        self.waits += 1

    cpdef bint capturing(self, uint32_t index) except -1:
        """Return whether work submitted to a stream is being captured into a graph instead of run."""
        cdef Lane* lane = self.lane(index)
        cdef int code
        if lane.everywhere:
            return False
        self.awake("capturing")
        if not lane.native:
            return self.streams[index].capturing()
        code = self.calls.capturing(self.calls.context, lane.handle)  # too short to hand the interpreter's lock over
        if code < 0:
            raise self.error("capturing", -code)
        return code
