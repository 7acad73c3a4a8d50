# Heap: the C++ heap with Python's integers checked at the border.

cdef uint64_t _whole(object value, str name) except? 0xFFFFFFFFFFFFFFFF:
    # Cython would turn 1.5 into 1 and raise OverflowError for -1.
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0 or value >> 63:
        raise ValueError(f"{name} must be from 0 to 2**63 - 1")
    return value


cdef uint32_t _index(object value, str name) except? 0xFFFFFFFF:
    cdef uint64_t whole = _whole(value, name)
    if whole >= 0x7FFFFFFF:
        raise ValueError(f"unknown {name} {value}")
    return <uint32_t>whole


cdef uint64_t _size(object value) except 0:
    cdef uint64_t whole = _whole(value, "nbytes")
    if whole == 0 or whole > max_size:
        raise ValueError(f"nbytes must be from 1 to {max_size}, got {value}")
    return whole


cdef uint64_t _limit(object value) except? 0xFFFFFFFFFFFFFFFF:
    return no_limit if value is None else _whole(value, "limit")


cdef tuple _entries_out(const vector[Entry]& entries):
    return tuple([(entries[i].stream, entries[i].epoch) for i in range(entries.size())])


cdef list _pieces_out(const vector[CPiece]& pieces):
    return [Piece(pieces[i].segment, pieces[i].address, pieces[i].nbytes, _entries_out(pieces[i].uses))
            for i in range(pieces.size())]


cdef vector[Entry] _entries_in(object entries) except *:
    cdef vector[Entry] all
    cdef Entry one
    for stream, epoch in entries:
        one.stream = _index(stream, "stream")
        one.epoch = _whole(epoch, "epoch")
        all.push_back(one)
    return all


cdef Bound _bound(bint foreign, bint late) noexcept:
    return Bound.Done if not foreign else Bound.Any if late else Bound.Recorded


cdef object _plan_out(const CPlan& plan):
    moves = tuple([Move(plan.moves[i].segment, plan.moves[i].address, plan.moves[i].nbytes, plan.moves[i].to,
                        _entries_out(plan.moves[i].uses))
                   for i in range(plan.moves.size())])
    fresh = tuple([(plan.fresh[i].address, plan.fresh[i].nbytes) for i in range(plan.fresh.size())])
    return Plan(plan.segment, plan.address, plan.nbytes, moves, fresh)


cdef Tuning _tuned(Tuning tuning, dict options) except *:
    cdef dict known = tuning
    for name, value in options.items():
        if name == "strategy":
            if value not in ("best_fit", "good_fit"):
                raise ValueError(f"strategy must be 'best_fit' or 'good_fit', got {value!r}")
            known["best_fit"] = value == "best_fit"
        elif name in known and name != "best_fit":
            known[name] = _whole(value, name)
        else:
            raise TypeError(f"unknown heap option {name!r}")
    return known


cdef class Heap:
    """Decide which block serves which request, and what must be waited for first. Integers in, integers out.

    Calls no driver and touches no managed memory. Every method may be called from any thread and does a bounded piece of
    work. A wrong argument raises ValueError (TypeError when it is no int) and changes nothing.
    """

    cdef CHeap* c
    cdef Outcome last
    cdef bint paged  # whether it has had a space

    def __cinit__(self, *arguments, **options):
        cdef Tuning defaults
        if arguments and not isinstance(self, Core):
            raise TypeError("Heap takes keyword arguments only")
        granule = options.pop("granule", 512)
        journal = options.pop("journal", False)
        self.c = new CHeap(_whole(granule, "granule"), _tuned(defaults, options))
        self.c.set_guarded(asyncmem_one_at_a_time)  # nothing compiled enters a heap without the interpreter's lock
        if journal:
            self.c.start_journal()

    def __dealloc__(self):
        del self.c

    def configure(self, **options):
        """Change small_limit, strategy or the cache caps; caches above a lowered cap are emptied."""
        self.c.configure(_tuned(self.c.tuning(), options))

    def add_stream(self):
        """Add a stream and return its number; 0 exists from the start."""
        return self.c.add_stream()

    def open_epoch(self, stream):
        """Return the epoch that frees on the stream join now."""
        return self.c.epochs(_index(stream, "stream")).open

    def close_epoch(self, stream):
        """Close the stream's epoch and return its number; later frees join the next one."""
        return self.c.close_epoch(_index(stream, "stream"))

    def publish(self, stream, epoch):
        """Note that a fence recorded on the stream after `epoch` was closed covers it."""
        self.c.publish(_index(stream, "stream"), _whole(epoch, "epoch"))

    def mark_done(self, stream, epoch):
        """Note that the stream is known to have finished `epoch` and all before it."""
        self.c.mark_done(_index(stream, "stream"), _whole(epoch, "epoch"))

    def entry_state(self, stream, epoch):
        """Return 0 while no recorded fence covers the epoch, 1 when one does, 2 when it is done."""
        cdef Epochs known = self.c.epochs(_index(stream, "stream"))
        cdef uint64_t one = _whole(epoch, "epoch")
        return 2 if one <= known.done else 1 if one <= known.recorded else 0

    def add_segment(self, address, nbytes, arena, stream):
        """Add a range of device memory, owing `stream` its open epoch, and return the segment's id."""
        return self.c.add_segment(
            _whole(address, "address"), _whole(nbytes, "nbytes"), _index(arena, "arena"), _index(stream, "stream"))

    def remove_segment(self, segment):
        """Take a wholly free segment out and return the entries that the driver call must wait for."""
        return _entries_out(self.c.remove_segment(_index(segment, "segment")))

    def segments(self):
        """Return every segment's counts, in the order of ids."""
        return [SegmentCounts(**one) for one in self.c.segments()]

    def empty_segments(self):
        """Return every segment that is one free block."""
        return _pieces_out(self.c.empty_segments())

    def add_space(self, address, nbytes, arena, page):
        """Add a range of addresses without memory, of which pages of `page` bytes are mapped, and return the segment's id.

        There is at most one space in each of arenas 0 and 1, where ordinary segments may lie as well. Blocks of a page or
        more are not cached from then on.
        """
        number = self.c.add_space(
            _whole(address, "address"), _whole(nbytes, "nbytes"), _index(arena, "arena"), _whole(page, "page"))
        self.paged = True
        return number

    def remove_space(self, segment):
        """Take a space out that has no memory mapped."""
        self.c.remove_space(_index(segment, "segment"))

    def plan(self, nbytes, stream, arena=-1, room=0, most=NO_LIMIT, foreign=True, late=True, parts=16, spare=0, early=True):
        """Return a Plan for a request that missed, or the entries that make it possible once they are done.

        New memory is taken for up to `room` bytes, beyond that what has been idle the longest is moved, and where that
        is too little, `most` bytes more are new. If that is too little as well, nothing is lifted, and the answer is a
        tuple of entries: those uses of idle memory that end first and are enough. It is empty where none are.

        Handles are pages or, in a large request, at most a `parts`-th of it; 1 makes one for each gap. Few are quicker
        mapped, many fit more places. New memory goes on behind the request for up to `spare` bytes.

        Memory moves before its uses are done where `early`, if they are all of the request's stream, whose work is in order.

        The addresses may be such as other streams have used, where `foreign`; behind fences not recorded yet, where `late`.

        Ask right after the take that missed: flush() and merge() in between would change what is placed where. Serve the
        request by take_foreign() afterwards, or by a take() that is told to be made `again`.
        """
        cdef CPlan plan = self.c.plan(
            self._ask(_size(nbytes), stream, 0, arena, False), _whole(room, "room"), _whole(most, "most"),
            _bound(foreign, late), _whole(parts, "parts"), _whole(spare, "spare"), early)
        return _plan_out(plan) if plan.found else _entries_out(plan.waits)

    def has_addresses(self, nbytes, stream, arena=-1, foreign=True, late=True):
        """Return whether a plan would find addresses among those that were used before, with memory or without."""
        return self.c.has_addresses(self._ask(_size(nbytes), stream, 0, arena, False), _bound(foreign, late))

    def go_around(self, around):
        """Have takes find memory wherever it lies; else a block is found by its addresses alone, and has memory or not."""
        self.c.go_around(around)

    def reclaim(self, nbytes):
        """Return a Plan that gives back `nbytes` of idle memory or a little more, or what there is; None for nothing."""
        cdef CPlan plan = self.c.reclaim(_whole(nbytes, "nbytes"))
        return _plan_out(plan) if plan.found else None

    def plan_split(self, size, most):
        """Return a Plan by which idle handles of twice the size or more come again in parts; None where there are none.

        They are the largest, and as many as make no more than `most` parts together. A part has the largest power of two
        that is no more than the size, or what is needed for one handle to make no more than so many, and a page at least.
        """
        cdef CPlan plan = self.c.plan_split(_whole(size, "size"), _whole(most, "most"))
        return _plan_out(plan) if plan.found else None

    def idle_memory(self):
        """Return the bytes of handles on which nothing lies, and the (stream, epoch) of their uses not known to be done."""
        cdef CPiece found = self.c.idle_memory()
        return found.nbytes, _entries_out(found.uses)

    def unfenced(self):
        """Return the streams whose uses of handles no recorded fence covers yet."""
        return self.c.unfenced()

    def spread(self):
        """Return the bytes of addresses that blocks have ever lain on: what would be reserved if nothing were taken back."""
        return self.c.spread()

    def set_mapped(self, segment, address, nbytes):
        """Note that a handle has been mapped in a lifted range."""
        self.c.set_mapped(_index(segment, "segment"), _whole(address, "address"), _whole(nbytes, "nbytes"))

    def set_bare(self, segment, address, nbytes):
        """Note that a lifted handle has been unmapped: as a whole, and after all uses of it were done."""
        self.c.set_bare(_index(segment, "segment"), _whole(address, "address"), _whole(nbytes, "nbytes"))

    def set_moved(self, move, segment):
        """Note that a Move has been made, into a space: what it left is held until it is unmapped there and let go."""
        cdef CMove made
        made.segment = _index(move.segment, "segment")
        made.address, made.nbytes = _whole(move.address, "address"), _whole(move.nbytes, "nbytes")
        made.to = _whole(move.to, "to")
        self.c.set_moved(made, _index(segment, "segment"))

    def let_go(self, segment, address, nbytes):
        """End the lifting of a range: it is free, with the memory that it has now."""
        self.c.let_go(_index(segment, "segment"), _whole(address, "address"), _whole(nbytes, "nbytes"))

    def handles(self):
        """Return every handle that is mapped."""
        return _pieces_out(self.c.handles())

    def take(self, nbytes, stream, account=0, arena=-1, anywhere=False, again=False, fast=False):
        """Return a block that the stream may use at once, or 0; then see last_level() and last_reason().

        The caches learn which sizes are asked for, unless this is asked `again`, after a take that missed. A `fast` one
        is refused while a gate is closed.
        """
        cdef Ask ask = self._ask(_size(nbytes), stream, account, arena, anywhere, again, fast)
        return self.c.take(ask, self.last)

    def take_foreign(self, nbytes, stream, account=0, arena=-1, anywhere=False, late=False, again=False, fast=False):
        """Return (block, entries to discharge first) or None, preferring recorded entries; `late` allows unrecorded ones.

        The block is the caller's already: when a discharge fails, put_back() undoes it.
        """
        cdef Ask ask = self._ask(_size(nbytes), stream, account, arena, anywhere, again, fast)
        cdef vector[Entry] owed
        cdef uint32_t block = self.c.take_foreign(ask, late, owed, self.last)
        return (block, _entries_out(owed)) if block else None

    def take_at(self, address, nbytes, stream, account, arena, late=False, again=False, fast=False):
        """Return as take_foreign() does, but of just these bytes of a lease's inside; None where some are in use.

        Also where the stream could not be ordered behind all that they wait for: without `late` only recorded entries.
        """
        cdef Ask ask = self._ask(_size(nbytes), stream, account, arena, False, again, fast)
        cdef vector[Entry] owed
        cdef uint32_t block = self.c.take_at(ask, _whole(address, "address"), late, owed, self.last)
        return (block, _entries_out(owed)) if block else None

    def take_many(self, sizes, stream, account=0, arena=-1, anywhere=False, again=False, fast=False):
        """Return one block a size, in the order asked and similar sizes side by side, or [] when not all fit."""
        cdef Ask ask = self._ask(1, stream, account, arena, anywhere, again, fast)
        cdef vector[uint64_t] wanted
        for size in sizes:
            wanted.push_back(_size(size))
        cdef vector[Granted] granted = vector[Granted](wanted.size())
        if not self.c.take_many(ask, wanted, granted, self.last):
            return []
        return [granted[i].block for i in range(granted.size())]

    cdef Ask _ask(
        self, uint64_t nbytes, object stream, object account, object arena, bint anywhere, bint again=False, bint fast=False
    ) except *:
        cdef Ask ask
        ask.nbytes = nbytes
        ask.stream = _index(stream, "stream")
        ask.account = _index(account, "account")
        ask.arena = -1 if arena == -1 else <int32_t>_index(arena, "arena")
        ask.anywhere = anywhere
        ask.again, ask.fast = again, fast
        return ask

    def put_back(self, block, entries):
        """Undo a take whose discharge failed, counters included; the block keeps `entries`. Returns flags."""
        return self.c.put_back(_index(block, "block"), _entries_in(entries))

    def free(self, block, entries=()):
        """Give a block back, owing its home's open epoch and `entries`. Returns flags."""
        cdef vector[Entry] extra = _entries_in(entries)
        return self.c.free_entries(_index(block, "block"), EntrySpan(extra))

    def free_everywhere(self, block):
        """Free a block whose users are not known: it owes every stream's open epoch. Return flags."""
        return self.c.free_everywhere(_index(block, "block"))

    def free_many(self, blocks):
        """Give blocks back under one lock, all or (when one is not live) none. Returns flags."""
        cdef vector[uint32_t] all
        for block in blocks:
            all.push_back(_index(block, "block"))
        return self.c.free_many(all)

    def set_home(self, block, stream):
        """Make another stream the home of a live block; what the former home still does is the caller's to order."""
        self.c.set_home(_index(block, "block"), _index(stream, "stream"))

    def info(self, block):
        """Return what there is to know of a live or leased block."""
        return _block_out(self.c.info(_index(block, "block")))

    def last_level(self):
        """Return what served this heap's latest take: 1 stream cache, 2 shared cache, 3 placement, 0 nothing."""
        return self.last.level

    def last_reason(self):
        """Return why the latest take failed: 0 it did not, 1 no memory, 2 an account's limit, 3 a closed gate,
        4 no memory at the addresses that it would get."""
        return self.last.reason

    def last_flags(self):
        """Return the flags of the latest take."""
        return self.last.flags

    def touched(self):
        """Return how many nodes the latest take examined."""
        return self.last.touched

    def flush(self, stream=-1):
        """Empty one stream's cache, or (-1) every cache, into the free index. Returns the bytes."""
        return self.c.flush(-1 if stream == -1 else <int64_t>_index(stream, "stream"))

    def merge(self, arena=-1):
        """Join all free neighbours, whatever streams they wait for, and forget entries that are done. Returns the joins.

        With the arena of a lease only those inside of it, at a cost that goes by what lies there.
        """
        return self.c.merge(-1 if arena == -1 else <int64_t>_index(arena, "arena"))

    def open_lease(self, block):
        """Turn a live block into an arena of its own and return the arena; it cannot be freed until closed."""
        return self.c.open_lease(_index(block, "block"))

    def close_lease(self, arena):
        """End a lease: its free parts return at once, its live blocks become the leased block's account's. Returns flags."""
        return self.c.close_lease(_index(arena, "arena"))

    def add_account(self, parent=0, limit=None):
        """Add an account below `parent` (-1: below none) that may have `limit` bytes live, and return its number."""
        return self.c.add_account(-1 if parent == -1 else <int64_t>_index(parent, "account"), _limit(limit))

    def remove_account(self, account):
        """Remove an account that has no live bytes and no accounts below it."""
        if not self.c.remove_account(_index(account, "account")):
            raise ValueError("the account still has live bytes or accounts below it")

    def set_limit(self, account, limit):
        """Change an account's limit; what is live above it stays, further takes are refused."""
        self.c.set_limit(_index(account, "account"), _limit(limit))

    def account(self, account):
        """Return an account's counts."""
        cdef Account a = self.c.account(_index(account, "account"))
        return AccountCounts(a.parent, None if a.limit == no_limit else a.limit, a.live, a.requested, a.peak,
                             a.hits[0] + a.hits[1] + a.hits[2], a.frees, a.blocks(), a.hits[0], a.hits[1], a.hits[2])

    def set_gate(self, account, closed):
        """Close or open an account's gate: behind a closed one fast takes miss, take() does not."""
        self.c.set_gate(_index(account, "account"), closed)

    def leave_ajar(self, allowance, wanted):
        """Let fast takes pass a closed gate of account 0 for so many bytes, while no other gate is closed.

        Meanwhile a free tells of itself only where it leaves `wanted` bytes free. It ends with `close_up`, when the gate
        is set anew, and when a segment comes: that is for waiting requests.
        """
        self.c.leave_ajar(_whole(allowance, "allowance"), _whole(wanted, "wanted"))

    def close_up(self):
        """End that; return the bytes that have passed since this was called last."""
        return self.c.close_up()

    def set_marks(self, live_low=0, live_high=NO_LIMIT):
        """Arm the watermarks, in live bytes. Each raises its flag once, when it is crossed, and is then disarmed."""
        self.c.set_marks(_whole(live_low, "live_low"), _whole(live_high, "live_high"))

    def reset_peaks(self):
        """Let every peak start again from what is so now."""
        self.c.reset_peaks()

    def largest(self, arena=-1):
        """Return the bytes of the largest free block of an arena, or (-1) outside leases. Caches are not looked into."""
        return self.c.largest(-1 if arena == -1 else <int32_t>_index(arena, "arena"))

    def live(self):
        """Return the bytes granted, rounded; an open lease counts whole."""
        return self.c.live()

    def reserved(self):
        """Return the bytes in segments."""
        return self.c.reserved()

    def pending(self):
        """Return the bytes in the free index that some stream has still to be done with. Walks the blocks that owe."""
        return self.c.pending_bytes()

    def counts(self):
        """Return every gauge and counter, read under one lock."""
        return HeapCounts(**self.c.counts())

    def blocks(self):
        """Return every block in address order, segment by segment, then the insides of leases."""
        cdef vector[CBlockInfo] found = self.c.blocks()
        return [_block_out(found[i]) for i in range(found.size())]

    @property
    def logged(self):
        """Whether what is taken and freed is read, so that the rest is worth a `note`."""
        return self.c.logged()

    def open_log(self, keep=NO_LIMIT):
        """Log all that is taken and freed from now on, for a reader more.

        Args:
            keep: Of what the reader leaves unread, so many of the newest rows are kept.

        Returns:
            The reader's number, and the rows (as `LOG_ROW` says) of what is live now.
        """
        cdef vector[LogRow] held
        cdef uint32_t reader = self.c.open_log(_whole(keep, "keep"), held)
        return reader, _rows_out(held)

    def read_log(self, reader, most=NO_LIMIT, consume=False):
        """Return a `LogPart`: the oldest rows that a reader has not consumed, at most so many. Copies them, under the lock."""
        cdef LogPart part = self.c.read_log(_index(reader, "reader"), _whole(most, "most"), consume)
        return Part(_rows_out(part.rows), part.lost, part.cut)

    def close_log(self, reader):
        """End a reader; the log ends with the last. Once for each."""
        self.c.close_log(_index(reader, "reader"))

    def read_journal(self):
        """Take out the oldest lines of the journal, some at a time; b"" where there are none.

        Raises:
            MemoryError: There was no memory for more, and nothing is written any longer.
        """
        cdef string lines
        if self.c.journal() == NULL:
            return b""
        lines = self.c.journal().read()
        if lines.empty() and self.c.journal().is_cut():
            raise MemoryError("there was no memory for more of the journal")
        return <bytes>lines

    def held(self):
        """Return the rows of what is live now; none where there is no log."""
        return _rows_out(self.c.held())

    def check(self):
        """Walk every structure and raise HeapCorrupted naming the first invariant that does not hold."""
        cdef string wrong = self.c.check()
        if not wrong.empty():
            raise HeapCorrupted((<bytes>wrong).decode())


cdef bytes _rows_out(const vector[LogRow]& rows):
    return (<const char*>rows.data())[:rows.size() * sizeof(LogRow)] if rows.size() else b""


cdef object _block_out(const CBlockInfo& one):
    return BlockInfo(one.address, one.nbytes, _STATE_NAMES[<int>one.state], one.arena, one.stream, one.account,
                     _entries_out(one.entries))


cdef dict _STATE_NAMES = {<int>State.Live: "live", <int>State.Free: "free", <int>State.Cached: "cached", <int>State.Leased: "leased", <int>State.Bare: "bare", <int>State.Lifted: "lifted", <int>State.Filling: "filling"}
