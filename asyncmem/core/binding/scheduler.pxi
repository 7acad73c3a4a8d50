# Scheduler: the C++ scheduler over a heap, and its effects as objects.

_EFFORTS = [effort_names[i].decode() for i in range(3)]
_STATES = [state_names[i].decode() for i in range(5)]
_REASONS = [None, *[reason_names[i].decode() for i in range(1, 8)]]
_ENDINGS = [ending_names[i].decode() for i in range(4)]
_SHORTAGES = ("", "size", "limit", "fragmentation", "device")
_KINDS = [effect_names[i].decode() for i in range(17)]
_MEANS = ("grow", "look", "flush", "merge", "wait", "trim", "spill", "collect", "ask")


@cython.final
cdef class Effect:
    """Something that the scheduler wants done. `core/DESIGN.md` has the table of kinds, and what ends each.

    Attributes:
        kind: What is to be done.
        request: The request that it is for, 0 for none.
        job: Names it to the event that ends it, 0 where none does.
        by_caller: Whether the thread that made the request carries it out.
        joins: Of growth: whether `returns` go back in the order of `stream` and lie side by side, where what comes will lie.
        nbytes: Of growth: what to ask for. Of remapping and spilling: the bytes it takes.
        need: Of growth and of remapping: the least that is of use.
        rest: Of growth: what of `returns` comes as a second segment, 0 for none.
        arena, stream, account: The heap's numbers.
        seconds: How long to wait at most, or when.
        level: Of pressure: its level. Of the last resort: how often it has been tried.
        streams: Streams to record fences on.
        returns: (address, bytes, uses) of each segment that goes back.
        uses: (stream, epoch) of what to wait for.
        moves: ((address, bytes), address) of what is mapped at a second address.
        out, into: (address, bytes) of what is unmapped and mapped.
        vacated: How many of the first of `out` are addresses that memory has moved away from.
    """

    cdef readonly str kind
    cdef readonly uint64_t request, job, nbytes, need, rest
    cdef readonly uint32_t arena, stream, account
    cdef readonly int level
    cdef readonly bint by_caller, joins
    cdef readonly double seconds
    cdef readonly tuple streams, returns, uses, moves, out, into
    cdef readonly size_t vacated

    def __repr__(self):
        fields = []
        for name in ("request", "job", "nbytes", "need", "rest", "arena", "stream", "account", "level", "streams", "returns", "uses",
                     "moves", "out", "into", "vacated"):
            value = getattr(self, name)
            if value:
                fields.append(f"{name}={value}")
        return f"<Effect {self.kind}{' ' if fields else ''}{' '.join(fields)}>"


cdef Effect _effect_out(const CEffect& effect):
    cdef Effect made = Effect.__new__(Effect)
    made.kind = _KINDS[<int>effect.kind]
    made.request, made.job, made.nbytes, made.need = effect.request, effect.job, effect.nbytes, effect.need
    made.arena, made.stream, made.account = effect.arena, effect.stream, effect.account
    made.level, made.by_caller, made.seconds, made.vacated = effect.level, effect.by_caller, effect.seconds, effect.vacated
    made.joins, made.rest = effect.joins, effect.rest
    made.streams = tuple([effect.streams[i] for i in range(effect.streams.size())])
    made.returns = tuple([(effect.returns[i].address, effect.returns[i].nbytes, _entries_out(effect.returns[i].uses))
                          for i in range(effect.returns.size())])
    made.uses = _entries_out(effect.uses)
    made.moves = tuple([((effect.moves[i].first.address, effect.moves[i].first.nbytes), effect.moves[i].second)
                        for i in range(effect.moves.size())])
    made.out = tuple([(effect.out[i].address, effect.out[i].nbytes) for i in range(effect.out.size())])
    made.into = tuple([(effect.into[i].address, effect.into[i].nbytes) for i in range(effect.into.size())])
    return made


cdef vector[Claim] _claims_in(object claims) except *:
    return [Claim(owner, nbytes, account) for owner, nbytes, account in claims]


cdef class Scheduler:
    """Decides for one heap who is served next, from what memory, and what has to be done for it.

    Events in, effects out: each method is an event that returns at once, and `effects` says what is to be done. It makes no
    call of any device, loop or clock; times are the caller's, in seconds.

    Args:
        heap: The heap that it decides for, as its only scheduler.
        now: The time.
        policy: Settings by name: those of `Policy` in scheduler/request.hpp, and the heap's own.
    """

    cdef CScheduler* c
    cdef readonly Heap heap

    def __cinit__(self, Heap heap not None, now=0.0, **policy):
        self.heap = heap
        self.c = new CScheduler(heap.c[0], _policy_in(policy), now)
        self.c.set_guarded(asyncmem_one_at_a_time)

    def __dealloc__(self):
        del self.c

    def configure(self, now, **policy):
        """Change the settings; requests above a lowered limit fail."""
        self.c.configure(_policy_in(policy), now)

    def open_share(self, account, *, up=0, part_of=0, arena=-1, waits=True, bypass=2.0):
        """Open a queue for the requests of an account: a budget's, or (`up` -1) the inside of a lease."""
        self.c.open_share(_index(account, "account"), up, _index(part_of, "account"), arena, waits, bypass)

    def close_share(self, account, now):
        """Close the queue of an account; its requests fail."""
        self.c.close_share(_index(account, "account"), now)

    def set_limit(self, account, limit, now):
        """Change the limit of an account; requests above it fail."""
        self.c.set_limit(_index(account, "account"), _limit(limit), now)

    def add_spillable(self, account, nbytes, now):
        """Add to the bytes of an account that could move to the host to make room there; may be negative."""
        self.c.add_spillable(_index(account, "account"), nbytes, now)

    def submit(
        self, nbytes, now, *, account=0, stream=0, arena=-1, priority=0, deadline=never, waits=True, calls=False,
        on_loop=False, captured=False, effort="all",
    ):
        """Submit a request and return its number; `nbytes` is a list of sizes for a batch."""
        cdef Ask ask
        cdef Terms terms
        cdef vector[uint64_t] pieces
        ask.nbytes = 1
        if isinstance(nbytes, (list, tuple)):
            pieces = [_size(one) for one in nbytes if one]
            ask.nbytes = sum(nbytes)
        else:
            ask.nbytes = _whole(nbytes, "nbytes")
        ask.stream, ask.account = _index(stream, "stream"), _index(account, "account")
        ask.arena = arena
        terms.deadline, terms.priority, terms.waits, terms.calls = deadline, priority, waits, calls
        terms.on_loop, terms.captured = on_loop, captured
        terms.effort = <Effort><int>_EFFORTS.index(effort)
        return self.c.submit(ask, pieces, terms, now)

    def leave_to(self, request):
        """Return the state of a request whose call ends: from now on an effect tells its end, unless the answer is one."""
        return _STATES[<int>self.c.leave_to(request)]

    def state(self, request):
        """Return "waiting", "growing", "ordering", "granted" or "failed"."""
        return _STATES[<int>self.c.state(request)]

    def reason(self, request):
        """Return why a request has failed, None while it has not."""
        cdef const CRequest* found = self.c.look_up(request)
        if found == NULL:
            raise ValueError("no such request")
        return _REASONS[<int>found.reason]

    def claim(self, request):
        """Return the blocks of a granted request, and forget it."""
        return [one.block for one in self.c.claim(request)]

    def forget(self, request):
        """Forget a request that has failed."""
        self.c.forget(request)

    def cancel(self, request, now):
        """Cancel a waiting request; return False if it is too late."""
        return self.c.cancel(request, now)

    def fail(self, request, reason, now):
        """Fail a waiting request, for a reason of the caller's."""
        self.c.fail(request, <CReason><int>_REASONS.index(reason), now)

    def give(self, request, block, address, now):
        """Grant a waiting request a block that is live already."""
        self.c.give(request, _index(block, "block"), _whole(address, "address"), now)

    def owed(self, request):
        """Return the (stream, epoch) that a request's stream has to be ordered behind."""
        return _entries_out(self.c.owed(request))

    def ordered(self, request, now):
        """Note that the stream of a request is ordered, which grants it."""
        self.c.ordered(request, now)

    def unordered(self, request, now):
        """Note that the stream of a request could not be ordered: its memory goes back, and it waits again."""
        self.c.unordered(request, now)

    def asleep(self, request, owner, now):
        """Note that a task waits for a request; `owner` is its number."""
        self.c.asleep(request, owner, now)

    def awake(self, request):
        """Note that a task waits for a request no more."""
        self.c.awake(request)

    def hold(self, owner, block):
        """Note that an owner holds a block until `release`, and return the number of that."""
        return self.c.hold(owner, _index(block, "block"))

    def release(self, hold):
        """End one `hold`."""
        self.c.release(hold)

    def forget_owner(self, owner):
        """Forget an owner: what it held has none from now on."""
        self.c.forget_owner(owner)

    def holds(self):
        """Return (owner, block) of every hold; owner 0 is no owner."""
        return [(one.owner, one.block) for one in self.c.holds()]

    def stuck(self):
        """Return (owner, request, bytes wanted, bytes held, since) of each owner in the last deadlock."""
        return [(one.owner, one.request, one.nbytes, one.held, one.since) for one in self.c.stuck()]

    def freed(self, flags, now):
        """Note that memory was freed; `flags` are those that the heap returned."""
        self.c.freed(flags, now)

    def looked(self, found, now):
        """Note that fences were polled, of which `found` were done."""
        self.c.looked(found, now)

    def grew(self, job, address, nbytes, stream, now, *, ready=False, seconds=0.0, rest=0):
        """Note that a growth has brought a segment, and at the address `rest` the rest of what that was cut from."""
        self.c.grew(
            job, _whole(address, "address"), _whole(nbytes, "nbytes"), stream, ready, now, seconds, _whole(rest, "address")
        )

    def grow_failed(self, job, now, *, out_of_memory=False):
        """Note that a growth has failed."""
        self.c.grow_failed(job, out_of_memory, now)

    def trimmed(self, job, count, now):
        """Note that so many of the segments to give back went back to the device."""
        self.c.trimmed(job, count, now)

    def remapped(self, job, moved, unmapped, mapped, now, *, out_of_memory=False, seconds=0.0):
        """Note that the first so many moves were made, the first so many spans unmapped, and the first so many mapped."""
        self.c.remapped(job, moved, unmapped, mapped, out_of_memory, now, seconds)

    def waited(self, job, seen, now):
        """Note that a wait for uses is over; `seen` is whether they are done."""
        self.c.waited(job, seen, now)

    def ended(self, job, now, ending="done"):
        """End a job: it is "done", or its request is to "retry", is "refused", or "served" by the host."""
        self.c.ended(job, <Ending><int>_ENDINGS.index(ending), now)

    def expire(self, now):
        """Fail requests whose deadline has passed."""
        self.c.expire(now)

    def quiet(self, now, claims=()):
        """Look for a deadlock if nothing has moved since this was asked for; `claims` are (owner, bytes, account)."""
        self.c.quiet(now, _claims_in(claims))

    def tick(self, now):
        """Let growth that the device has refused be tried again; called a few times a second."""
        self.c.tick(now)

    def offer(self, now):
        """Give back what was idle between the last two calls, because others need memory of the device."""
        self.c.offer(now)

    def begin_beat(self):
        """Begin the upkeep of pages: empty the caches, and ask for fences behind what was freed."""
        self.c.begin_beat()

    def end_beat(self, now):
        """End the upkeep of pages: join free blocks; return the seconds to the next one, None for none."""
        cdef double pause = self.c.end_beat(now)
        return None if pause == never else pause

    def note_claim(self, now):
        """Note one more task that waits for memory without a queued request: a proof has to ask for claims."""
        self.c.note_claim(now)

    def set_capturing(self, capturing):
        """Set whether something was refused because a graph is being captured."""
        self.c.set_capturing(capturing)

    def shift_clock(self, seconds):
        """Note that the clock has changed by so many seconds."""
        self.c.shift_clock(seconds)

    def drain(self, now):
        """Refuse new requests from now on."""
        self.c.drain(now)

    def close(self, now):
        """Fail all requests, and refuse new ones from now on."""
        self.c.close(now)

    def trim(self, keep, now):
        """Give back all that is free but `keep` bytes."""
        self.c.trim(_whole(keep, "keep"), now)

    def grow_ahead(self, now):
        """Grow if less is ready than the policy asks for."""
        self.c.grow_ahead(now)

    def effects(self):
        """Return the effects to carry out, in order, each once."""
        cdef CEffect effect
        found = []
        while self.c.next(effect):
            found.append(_effect_out(effect))
        return found

    def gauges(self):
        """Return the figures of this moment by name."""
        cdef dict found = self.c.gauges()
        found["means"] = {name: count for name, count in zip(_MEANS, found["means"], strict=True) if count}
        return found

    def tally(self, account=0):
        """Return the counters of an account by name."""
        return self.c.tally(_index(account, "account"))

    def check(self):
        """Raise HeapCorrupted naming the first invariant that does not hold."""
        cdef string wrong = self.c.check()
        if not wrong.empty():
            raise HeapCorrupted((<bytes>wrong).decode())
