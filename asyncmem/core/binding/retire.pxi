# Retire: which freed memory waits for which fence, and which streams have to wait for it.
#
# Freed memory carries entries, {stream: epoch}: uses that are not yet known to be done. An epoch is the frees on a stream
# between two of its fences. What is kept are these rules of stream order:
#
# * Nothing to do where memory is taken again by its home and no other stream has used it.
# * A taker is ordered behind every entry of another stream: its fence is done, or the taker is made to wait for one that
#   covers this very epoch. A fence recorded before the last use orders nothing, however new it is.
# * Closed, recorded, published, in this order: a fence covers the frees of epochs that were closed before it was recorded.
#   A record that failed publishes nothing, and the next one of that stream makes up for it.
# * Users other than home are fenced at the free, not when they are named: what they do comes in between. With `fence_every`
#   several frees of little memory share a fence, at the price of covering what the stream is given to do until then.
# * Large frees at home have a fence of their own for a while after a stream has waited for another one: later takers wait
#   for the work before the free, and not for what the stream is given to do after it.
# * A late fence, recorded when another stream takes the memory, covers later work too, and hangs where that work waits for
#   the taker. It comes last, is counted, and may be forbidden.
# * A stream without a reference (a raw number) has its fences recorded at the free itself, the home's own too. Whatever
#   is recorded for it later is recorded behind all streams: its number may be another stream's by then.
# * A stream that is being captured records nothing: till the capture ends, its memory is out of others' reach.
# * Giving memory back needs its fences seen done by the host; making streams wait does not help there.
#
# It makes only device calls that do not block, so it serves any thread, also a finalizer that interrupts another call of it;
# the one call that waits says so. Drivers without a fence behind all streams are the exception: there, a caller that takes memory
# that waits for such a fence waits with it. Streams that say so (`native`) are served by the device's table of C functions,
# all others by their methods. After a fork, and when the interpreter ends, it makes no call at all.

cdef enum:
    _PARTS = 8  # of the free bytes at most this part waits for a shared fence of one stream
    _FEW = 64  # a block is large that is such a part of what is reserved,
    _LARGE = 1 << 20  # and so many bytes
    _EAGER = 4096  # large frees at home that have a fence after the last wait of one stream for another
    _WATCHED = 256  # the same after segments were free that could have gone back, had it been known


@cython.final
@cython.no_gc
@cython.freelist(64)
cdef class Notes:
    """What is noted about a buffer; most have none. Must not own anything that owns the buffer.

    Attributes:
        graph: The captured graph that its memory stays with, or None.
        site: "file:line" where it was asked for, when tracking is on.
        checked: Whether a memory checker knows of it.
        loan: What keeps borrowed memory, or None.
    """

    cdef uint32_t count, first
    cdef vector[uint32_t] more  # of which most buffers have none
    cdef public object graph, site, loan
    cdef public bint checked

    @property
    def users(self):
        """The numbers of the streams that use it beside its home."""
        return frozenset([self.at(i) for i in range(self.count)])

    cpdef add_user(self, uint32_t index):
        """Note a stream; once is enough."""
        cdef uint32_t i
        for i in range(self.count):
            if self.at(i) == index:
                return
        if self.count:
            self.more.push_back(index)
        else:
            self.first = index
        self.count += 1

    cdef bint has_others(self, uint32_t home) noexcept:
        cdef uint32_t i
        for i in range(self.count):
            if self.at(i) != home:
                return True
        return False

    cdef inline uint32_t at(self, uint32_t i) noexcept:
        return self.more[i - 1] if i else self.first


cdef class Retire(Lanes):
    """Keeps one pool's streams in order, by their numbers in its heap.

    Args:
        heap: The core, whose stream 0 exists already; its tables of streams are shared and extended here. Any other heap
            with the same methods will do.
        device: Where the streams run.
        late_fences: Allow recording a fence at the time when another stream takes the memory.
        fence_every: Record one fence for up to so many frees on a stream that is not their home, as long as they are little of
            what is free. 1 is exact. With more of them a fence covers what the stream was given to do meanwhile, and comes
            no later than the next `poll`.
    """

    cdef public bint late_fences
    cdef public uint32_t fence_every
    cdef int64_t shared_index  # the number that stands for all streams, -1 before it is needed
    cdef bint polling
    cdef int64_t late, failed
    cdef int eager  # large frees at home that will have a fence yet
    cdef int unattended  # releases under way long after their frees: a stream known by its number may be gone

    def __cinit__(self, heap, device, *, late_fences=True, fence_every=1):
        self.late_fences = late_fences
        self.fence_every = fence_every
        self.shared_index = -1

    cpdef register(self, stream):
        """Return the heap's number of a stream, a new one at first sight, and keep the stream alive from then on."""
        index = self.ids.get(stream)
        if index is not None:
            return index
        index = self.number(stream)
        # Another thread may have come here with the same stream; its number stays unused.
        return self.ids.setdefault(stream, index)

    cpdef everywhere(self):
        """Return the number of the user that stands for all streams, for consumers that name none."""
        if self.shared_index < 0:
            index = self.number(None)
            if self.shared_index < 0:
                self.shared_index = index
        return self.shared_index

    cdef object number(self, object stream):
        index = self.c.add_stream() if self.c != NULL else self._heap.add_stream()
        while len(self.streams) <= index:
            self.streams.append(None)
        self.streams[index] = stream
        self.lane(index)
        return index

    # -- fencing -----------------------------------------------------------------------------------------------------

    cpdef fence(self, uint32_t index):
        """Close the open epoch of a stream, record a fence behind it and publish it; return the epoch.

        Raises:
            DeviceError: Nothing was published; the closed epoch is covered by the stream's next fence.
        """
        cdef uint64_t epoch = self.close(index)
        self.drop(self.recorded(index, epoch, False))
        return epoch

    cdef Fence* recorded(self, uint32_t index, uint64_t epoch, bint named) except NULL:
        # A recorded fence, for the caller to drop.
        cdef Fence* fence = self.record(index, epoch, named)
        if self.lane(index).crowded():
            self.thin_out(index)
        return fence

    cdef int thin_out(self, uint32_t index) except -1:
        if not self.polling:
            try:
                self.poll_lanes(index, index + 1)
            except DeviceError:  # raised where a caller asks for it
                pass
            self.lane(index).looked()

    cpdef list entries_for(self, users, uint64_t nbytes=0):
        """Record a fence for each user other than home, now: a fence from before the free would not cover its last use.

        With `fence_every` a block of so many bytes may leave that to a later free.

        Never raises for a device that refuses: a release cannot fail. The entry then stays without a fence, and the
        memory out of other streams' reach, until `poll` or a later use of that stream has recorded one.
        """
        return [(user, self.owe(user, nbytes)) for user in dict.fromkeys(users)]

    cdef uint64_t owe(self, uint32_t user, uint64_t nbytes) except 0:
        # The epoch of what a stream has done to memory that is about to be freed.
        cdef Lane* lane = self.lane(user)
        cdef uint64_t epoch
        if self.shares(lane, nbytes):
            return self.open_epoch(user)
        epoch = self.close(user)
        try:
            self.drop(self.recorded(user, epoch, self.unattended == 0))
        except DeviceError:
            self.failed += 1
        return epoch

    cdef inline bint shares(self, Lane* lane, uint64_t nbytes) noexcept:
        # Whether a free leaves its fence to a later one. What waits for one must stay so little that others are not held up:
        # a taker gets it behind all that the stream was given to do meanwhile.
        if self.fence_every == 1 or not lane.lasting or lane.unfenced + 1 >= self.fence_every or self.is_large(nbytes):
            return False
        if self.c != NULL and _PARTS * (lane.unfenced_bytes + nbytes) > self.c.reserved() - self.c.live():
            return False
        lane.unfenced += 1
        lane.unfenced_bytes += nbytes
        return True

    cdef int fence_home(self, uint32_t home, uint64_t nbytes) except -1:
        # A free on a stream without a reference: there may be no second chance to record its fence.
        if not self.lane(home).lasting:
            self.owe(home, nbytes)
        elif self.is_large(nbytes):
            # Its taker will wait for the work up to here, and not for what the stream is given to do until then.
            self.eager -= 1
            self.owe(home, nbytes)
            if self.eager <= 0:
                self.core.fence_from = no_limit

    cdef inline bint is_large(self, uint64_t nbytes) noexcept:
        return self.core is not None and <int64_t>nbytes >= self.core.fence_from and _FEW * nbytes >= self.c.reserved()

    cdef void be_eager(self, int frees=_EAGER) noexcept:
        # Record a fence for each of the next large frees at home: for streams that have begun to wait for each other, which
        # wait for less then; and for a pool that could give memory back, if it knew it to be done, as it grows.
        if self.core is not None:
            self.eager = max(self.eager, frees)
            self.core.fence_from = _LARGE

    # -- freeing -----------------------------------------------------------------------------------------------------

    cdef uint32_t give(
        self, uint32_t block, uint64_t nbytes, uint32_t home, int64_t last, Notes notes
    ) except? 0xFFFFFFFF:
        # Free a block of this core behind what the streams in `notes` and the stream `last` (-1: none) have done to it.
        cdef Entry few[4]
        cdef vector[Entry] many
        cdef Entry* owed = few
        cdef uint32_t flags, i
        cdef uint32_t count = 0
        cdef uint32_t others = 0 if notes is None else notes.count
        if others > 3:
            many.resize(others + 1)
            owed = many.data()
        for i in range(others):
            if notes.at(i) != home and notes.at(i) != last:
                owed[count] = Entry(notes.at(i), self.owe(notes.at(i), nbytes))
                count += 1
        if last >= 0 and last != home:
            owed[count] = Entry(<uint32_t>last, self.owe(<uint32_t>last, nbytes))
            count += 1
        flags = self.c.free_entries(block, EntrySpan(owed, count))
        self.fence_home(home, nbytes)
        return flags

    # -- ordering one stream behind another --------------------------------------------------------------------------

    cpdef discharge(self, uint32_t taker, entries):
        """Order `taker` behind the uses of memory that it is about to take from other streams.

        Raises:
            DeviceError: A fence could not be recorded or waited for. The caller puts the block back with its entries;
                waits that were made already do no harm.
            InvalidRequest: An entry has no fence, or none that this stream can wait for, and `late_fences` is off.
        """
        for stream, epoch in entries:
            self.discharge_one(taker, stream, epoch)

    cdef int discharge_one(self, uint32_t taker, uint32_t stream, uint64_t epoch) except -1:
        cdef Fence* fence
        if stream == taker or self.is_done(stream, epoch):
            return 0
        self.be_eager()
        # A fence that covers this very epoch: one recorded before the last use would order nothing (rmm #2489).
        fence = self.lane(stream).covering(epoch)
        if fence != NULL:
            fence.users += 1
        elif self.is_done(stream, epoch):
            return 0  # polled by another thread since the first look
        else:
            self.allow_late(stream, epoch)
            fence = self.recorded(stream, self.close(stream), False)
        try:
            if self.lane(taker).everywhere:
                raise InvalidRequest("taker", taker, "a stream: the context-wide user takes no memory")
            if fence.native and not self.lane(taker).native:
                self.allow_late(stream, epoch)  # the fence that it can wait for is another one, recorded now
            self.wait(taker, stream, fence)
        finally:
            self.drop(fence)

    cdef int allow_late(self, uint32_t stream, uint64_t epoch) except -1:
        if not self.late_fences:
            raise InvalidRequest("entries", (stream, epoch), "recorded ones, because late_fences is off")
        self.late += 1

    cpdef use_on(self, uint32_t home, uint32_t other):
        """Make `other` wait for all that `home` has submitted so far; the context-wide user cannot wait."""
        cdef Fence* fence
        if home == other or self.lane(other).everywhere:
            return
        if not self.lane(other).native and self.lane(home).native:
            self.streams[other].wait(self.object_fence(home))
            self.waits += 1
            return
        fence = self.recorded(home, self.close(home), True)
        try:
            self.wait(other, home, fence)
        finally:
            self.drop(fence)

    cdef bint order(self, uint32_t home, uint32_t other) except -1:
        # The same for a buffer's method; False where one of them is being captured: no stream waits then.
        cdef Lane* lane = self.lane(home)
        cdef Lane* waiter = self.lane(other)
        cdef void* made = NULL
        cdef uint64_t epoch
        cdef int code
        cdef int refused = 0
        if home == other:
            return True
        if not (lane.native and waiter.native) or lane.everywhere or waiter.everywhere:
            if lane.lasting and self.capturing(home) or self.capturing(other):
                return False
            self.use_on(home, other)
            return True
        epoch = self.close(home)
        code = self.order_natively(lane, waiter, &made, &refused)
        if code == ASYNCMEM_CAPTURED:
            return False
        if code:
            raise self.refusal(lane, code)
        self.drop(self.keep(lane, epoch, made))
        self.publish(home, epoch)
        if lane.crowded():
            self.thin_out(home)
        if refused:
            raise self.error("wait", refused)
        self.waits += 1
        return True

    cpdef hand_over(self, uint32_t block, uint32_t other):
        """Make `other` the home of a live block, ordered behind all that the old home has submitted so far.

        The old home promises to submit no more work on it. A failure changes nothing.
        """
        self.use_on(self._heap.info(block).stream, other)
        self._heap.set_home(block, other)

    cdef int discharge_all(self, uint32_t taker, const vector[Entry]& owed) except -1:
        cdef size_t i
        for i in range(owed.size()):
            self.discharge_one(taker, owed[i].stream, owed[i].epoch)

    cdef bint may_wait(self, uint32_t index) except -1:
        # A wait would end a capture. False, too, where the driver cannot be asked.
        try:
            return not self.capturing(index)
        except DeviceError:
            return False

    # -- polling -----------------------------------------------------------------------------------------------------

    cpdef int64_t poll(self) except -1:
        """Query which recorded fences are done and mark them in the heap; return how many were found so.

        Of each stream the newest is asked first, since it stands for all before it, then the oldest, and then halves of
        what is between: n fences cost one question where all are done, two where none is, and about log n more between.
        Fences that are missing are recorded. Returns 0 at once when another thread, or the very caller that a finalizer has interrupted,
        is at it already.

        Raises:
            DeviceError: The device is lost.
        """
        if self.polling or self.idle() or self.asleep():
            return 0
        self.record_owed()
        return self.poll_lanes(0, <uint32_t>self.lanes.size())

    cdef bint look(self, uint32_t taker) except -1:
        # The same for a stream that wants memory, whose own uses need no fence. A device that cannot be asked raises where
        # memory grows or is freed.
        if self.polling or self.idle() or self.asleep():
            return False
        try:
            self.record_owed()
            return self.poll_lanes(0, taker) + self.poll_lanes(taker + 1, <uint32_t>self.lanes.size()) > 0
        except DeviceError:
            return False

    cdef bint idle(self) noexcept:
        # Every miss asks, and on one stream there is never anything to poll.
        cdef size_t i
        for i in range(self.lanes.size()):
            if not self.lanes[i].empty() or self.lanes[i].owed or self.lanes[i].unfenced:
                return False
        return True

    cdef int record_owed(self) except -1:
        cdef uint32_t index
        for index in range(<uint32_t>self.lanes.size()):
            if self.lanes[index].owed or self.lanes[index].unfenced:
                try:
                    self.fence(index)
                except DeviceError:  # still owed
                    pass

    cdef int64_t poll_lanes(self, uint32_t first, uint32_t end) except -1:
        cdef int64_t seen = 0
        cdef uint32_t index
        if self.polling:  # another thread began while this one recorded
            return 0
        self.polling = True
        try:
            for index in range(first, end):
                seen += self.advance(index)
        finally:
            self.polling = False
        return seen

    cdef int64_t advance(self, uint32_t index) except -1:
        # Only who polls takes fences out, so the lane keeps those that are asked, at their places.
        cdef Lane* lane = self.lane(index)
        cdef vector[Fence*] dropped
        cdef size_t low = 0  # all before are done
        cdef size_t high = lane.size()  # from here on they are not, or not worth asking
        cdef size_t middle
        cdef int64_t seen
        if high == 0:
            return 0
        if self.reached(lane.at(high - 1)):
            low = high
        elif high > 1 and self.reached(lane.at(0)):
            low, high = 1, high - 1
            while low < high:
                middle = (low + high) // 2
                if self.reached(lane.at(middle)):
                    low = middle + 1
                else:
                    high = middle
        if low == 0:
            return 0
        # Before they are dropped: a caller that has seen the epoch open still finds a fence in the lane.
        self.mark_done(index, lane.at(low - 1).epoch)
        seen = lane.pop(lane.at(low - 1).epoch, dropped)
        self.release(dropped)
        return seen

    # -- waiting on the host -----------------------------------------------------------------------------------------

    def settle(self, entries, timeout=None):
        """Wait on this thread (**blocks**) until the host has seen all `entries` done.

        Returns:
            False when `timeout` seconds passed first.

        Raises:
            DeviceError: The device is lost, or a fence that is missing could not be recorded.
        """
        cdef Fence* fence
        deadline = None if timeout is None else monotonic() + timeout
        for stream, epoch in entries:
            fence = self.unsettled(stream, epoch)
            if fence == NULL:
                continue
            try:
                if not self.block(fence, deadline):
                    return False
                self.mark_done(stream, fence.epoch)
            finally:
                self.drop(fence)
        self.poll()
        return True

    cdef Fence* unsettled(self, uint32_t index, uint64_t epoch) except? NULL:
        # A fence that covers an entry, for the caller to drop; NULL for one that is done.
        cdef Fence* fence
        if self.is_done(index, epoch):
            return NULL
        fence = self.lane(index).covering(epoch)
        if fence != NULL:
            fence.users += 1
        elif not self.is_done(index, epoch):
            fence = self.recorded(index, self.close(index), False)
        return fence

    cdef bint block(self, Fence* fence, object deadline) except -1:
        cdef int code
        self.awake("block")
        if not fence.native:
            return (<object>fence.made).block(None if deadline is None else max(0.0, deadline - monotonic()))
        if deadline is None:
            with nogil:
                code = self.calls.block(self.calls.context, fence.made)
            if code:
                raise self.error("block", code)
            return True
        # Drivers know no time limit; a thread that has one looks again and again.
        pause = 20e-6
        while not self.reached(fence):
            left = deadline - monotonic()
            if left <= 0:
                return False
            sleep(min(pause, left))
            pause = min(2 * pause, 2e-3)
        return True

    def counts(self):
        """Return what ordering has cost so far."""
        return RetireCounts(
            self.records, self.waits, self.queries, self.late, self.failed,
            sum([self.lanes[i].size() for i in range(self.lanes.size())]))
