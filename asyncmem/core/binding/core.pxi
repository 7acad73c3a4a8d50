# Core: a heap with what its buffers need: the device, the streams by number, tags, and the way up to the pool.

cdef enum:
    _MANY = 64  # effects in a row, after which the loop is asked to carry out the rest

cdef unsigned int _generation = 0  # goes up in a forked child, where the driver's memory is not ours to touch


def _forked_child():
    global _generation
    _generation += 1
    asyncmem_routes().fork()


os.register_at_fork(after_in_child=_forked_child)


@cython.final
@cython.no_gc
cdef class Tag:
    # A tag's name and its live bytes in one account: one object shared by all buffers of the tag there.
    cdef str name
    cdef uint32_t account
    cdef int64_t live


cdef class Request


cdef class Allocator


cdef class Retire


cdef class Route


@cython.final
cdef class Core(Heap):
    """A heap whose blocks are handed out as buffers of one device."""

    cdef readonly object device
    cdef public object pool
    cdef readonly Scheduler scheduler  # once the pool is open
    cdef CScheduler* s  # the same
    cdef object executor  # carries out what takes time
    cdef object to_worker, idle_helpers  # has the worker make a call; queues of threads that stand in for the main one
    cdef readonly set serving  # threads that wait for a request of theirs, or run a hook
    cdef vector[uint32_t] ended_accounts  # of closed shares, while something of them is held
    cdef int carriers  # calls of `carry_out` under way
    cdef object posted  # calls that finalizers left, because they could not wait
    cdef readonly object loop  # the event loop that is served
    cdef object asyncio_loop, clock, future_type  # of that loop
    cdef object seen_loop  # of asyncio, where one ran here when last looked
    cdef object timer, quiet_timer
    cdef dict owners  # tasks that hold memory, by number: weak references
    cdef dict labels  # names that were given to owners
    cdef readonly bint noting  # whether the pool notes something about every buffer
    cdef public object call_site  # tells where a request is made, where that is noted; else None
    cdef public bint can_capture  # whether streams of the device can be captured at all
    cdef public object default_timeout  # seconds, of requests that name none
    cdef readonly Retire retire  # keeps the streams in order
    cdef readonly list stream_objects
    cdef readonly dict stream_ids
    cdef dict tags
    cdef PyObject* last_stream  # the two that were named last; kept alive by stream_objects
    cdef PyObject* other_stream
    cdef Tag last_tag
    cdef uint32_t last_index, other_index
    cdef unsigned int born
    cdef bint _open
    cdef readonly bint observed  # whether every request takes the long way, so that the fast path always misses
    cdef bint fast  # open, not observed, and without a witness
    cdef readonly Witness witness  # notes the caller of each request, while that is recorded
    cdef int witnesses  # how many do
    cdef public bint watch_captures  # whether the fast path asks the driver if a named stream is being captured
    cdef int64_t fence_from  # bytes from which on a free at home may have a fence recorded; see Retire.fence_home
    cdef public int streak
    cdef readonly dict routes  # by which other libraries have memory or ask for some; only its keys count
    cdef readonly int64_t exported_bytes  # of buffers that were freed, and whose blocks wait for the last export to die
    cdef object __weakref__

    def __cinit__(self, device, pool=None, /, **options):
        self.device = device
        self.pool = pool
        self.born = _generation
        self.fence_from = no_limit
        self.stream_objects = []
        self.stream_ids = {}
        self.tags = {}
        self.owners, self.labels = {}, {}
        self.posted, self.serving = deque(), set()
        self.routes = {}
        default = getattr(device, "default_stream", None)
        self.stream_objects.append(default)
        if default is not None:
            self.stream_ids[default] = 0
        self.retire = Retire(self, device)

    @property
    def open(self):
        """Whether the fast path may serve at all; False at birth."""
        return self._open

    @open.setter
    def open(self, bint value):
        self._open = value
        self.set_fast()

    cdef void set_fast(self) noexcept:
        self.fast = self._open and not self.observed and self.witness is None
        for route in list(self.routes):
            (<Route>route).set_open()

    def watch(self, Witness witness not None):
        """Log the caller of each request from now on, until as many `unwatch` follow. One witness at a time."""
        if self.witness is not None and self.witness is not witness:
            raise ValueError("there is another witness")
        self.witness = witness
        self.witnesses += 1
        self.set_fast()

    def unwatch(self):
        """End one `watch`."""
        self.witnesses -= 1
        if self.witnesses == 0:
            self.witness = None
        self.set_fast()

    cdef int cause(self, Ask* ask, object tag) except -1:
        # Note the caller, where callers are recorded.
        ask.caused = self.witness is not None
        if ask.caused:
            self.witness.see(&ask.cause, tag)

    def note(self, what, level=0, nbytes=0, address=0, seconds=0.0, uint16_t stream=0, Request request=None):
        """Log what the pool has done; nothing where there is no log."""
        cdef LogRow row
        cdef const CRequest* found = NULL
        row.what, row.level = <LogWhat><int>what, level
        row.nbytes, row.address = _whole(nbytes, "nbytes"), _whole(address, "address")
        row.span_ns = <int64_t>(1e9 * <double>seconds)
        row.caller.thread, row.stream = thread_number(), stream
        if request is not None:
            row.stream = <uint16_t>request.stream
            found = self.s.look_up(request._id) if request._id else NULL
        if found != NULL and found.ask.caused:
            row.caller = found.ask.cause.caller
        self.c.note(row)

    @property
    def forked(self):
        """Whether this process is a fork's child and the core its parent's: then nothing may be touched."""
        return self.born != _generation

    def tag_bytes(self, accounts=None):
        """Return the live bytes of every tag that has any, as asked for, largest first; of some accounts, or of all."""
        cdef Tag tag
        found = {}
        for tag in list(self.tags.values()):
            if tag.live and (accounts is None or tag.account in accounts):
                found[tag.name] = found.get(tag.name, 0) + tag.live
        for route in list(self.routes):
            nbytes = (<Route>route).live
            if nbytes and (<Route>route).tag is not None and (accounts is None or (<Route>route).account in accounts):
                found[(<Route>route).tag] = found.get((<Route>route).tag, 0) + nbytes
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    cpdef uint32_t stream_number(self, object stream) except? 0xFFFFFFFF:
        """Return the number of a stream of the device, a new one at first sight; None is the default stream.

        Raises:
            InvalidRequest: It is another device's, or no stream.
        """
        cdef int index = self.index_of(stream)
        return <uint32_t>index if index >= 0 else self.retire.register(self.device.stream_of(stream))

    def adopt(self, block, nbytes, tag=None):
        """Wrap a block that was taken from this heap."""
        cdef uint32_t index = _index(block, "block")
        cdef uint64_t size = _size(nbytes)
        cdef CBlockInfo found = self.c.info(index)
        return self.keep_in_order(asyncmem_owned(
            _wrap(self, index, found.address, <int64_t>size, found.stream, found.account, tag)))

    def borrow(self, address, nbytes, stream, loan):
        """Wrap memory that is none of this heap's; `loan` is dropped once the buffer and its exports are gone.

        A true `loan.readonly` forbids all writing. Owners must not hold the buffer.
        """
        cdef Buffer buffer = asyncmem_owned(
            _wrap(self, 0, <uint64_t>address, <int64_t>nbytes, self.stream_number(stream), 0, None))
        buffer._noted().loan = loan
        return buffer

    # -- requests, through the scheduler ------------------------------------------------------------------------------

    def serve(self, executor, submit, idle_helpers, **policy):
        """Begin to serve requests by a policy.

        Args:
            executor: Carries out each effect that takes time.
            submit: Has the worker make a call.
            idle_helpers: Queues of the threads that make a call for the main thread.
            policy: The scheduler's settings.
        """
        self.scheduler = Scheduler(self, self.now(), **policy)
        self.s = self.scheduler.c
        self.executor, self.to_worker, self.idle_helpers = executor, submit, idle_helpers

    def set_loop(self, loop):
        """Serve an event loop, or None, from now on. Waiting requests go by its clock from then on."""
        cdef double before = self.now()
        self.loop = loop
        self.asyncio_loop = self.clock = self.future_type = self.timer = self.quiet_timer = None
        if loop is not None:
            self.clock = None if loop.now is monotonic else loop.now
            self.asyncio_loop, self.future_type = loop.loop, loop.future_type
        if self.s != NULL:
            self.s.shift_clock(self.now() - before)

    cdef double now(self) except? -1:
        return log_now() * 1e-9 if self.clock is None else <double>self.clock()

    @property
    def time(self):
        """The time by the clock of the pool: of the loop that is served, or the machine's."""
        return self.now()

    cpdef carry_out(self):
        """Do what the scheduler wants done, in its order."""
        if self.s == NULL or self.born != _generation:
            return
        self.carriers += 1
        try:
            self.carry_out_all()
        finally:
            self.carriers -= 1
        if self.posted:
            self.run_posted()

    cdef int carry_out_all(self) except -1:
        cdef CEffect effect
        cdef int done = 0
        cdef bint loop_goes_on = False
        while self.s.next(effect):
            try:
                self.do(effect)
            except BaseException:
                self.s.put_back(effect)
                raise
            done += 1
            # A thread beside a busy loop hardly gets the interpreter's lock: where there is much, the loop goes on.
            if done == _MANY and self.loop is not None and not self.loop.is_running_here():
                loop_goes_on = self.loop.soon(self.carry_out)
            elif loop_goes_on and self.carriers > 1:
                return 0

    cdef int do(self, const CEffect& effect) except -1:
        cdef const CRequest* found
        cdef Request request = None
        if effect.request:
            found = self.s.look_up(effect.request)
            if found != NULL and found.caller:
                request = <Request><PyObject*><size_t>found.caller
        if effect.kind == EffectKind.Granted:
            if request is not None:
                request.grant()
        elif effect.kind == EffectKind.Failed:
            if request is not None:
                request.fail(self.failure_of(request))
        elif effect.kind == EffectKind.Order:
            self.order(effect.request)
        elif effect.kind == EffectKind.Look:
            self.look(effect)
        elif effect.kind == EffectKind.Deadline:
            self.set_timer(effect.seconds)
        elif effect.kind == EffectKind.Quiet:
            if self.loop is not None:
                self.quiet_timer = self.loop.call_at(effect.seconds, self.look_for_deadlock)
        else:
            self.perform(_effect_out(effect), request if effect.by_caller else None)

    cdef int perform(self, Effect job, Request request) except -1:
        # Have an effect carried out, by the thread that waits for a request where there is one. Does not block. All but
        # the rare ones are handed over without a call of Python, which an interrupt could end when half of it is done.
        if request is not None and request._jobs is not None and not (request._interruptible and _may_wait(job)):
            request._jobs.append(job)
            request._gate.put(None)
        elif request is not None:
            aside = partial(self.executor.run, job)
            if self.idle_helpers:
                self.idle_helpers.pop().put(aside)
            else:
                self.to_worker(aside)
        elif job.kind == "pressure" or job.kind == "beat":
            self.to_worker(partial(self.pool._pressure if job.kind == "pressure" else self.pool._beat, job))
        elif job.kind == "emptied":
            self.pool._emptied()
        elif not job.request and (own := self.executor.own.get(PyThread_get_thread_ident())) is not None:
            own.append(job)
        elif job.kind == "trim" and not job.request:
            self.executor.returns.append(job)
            self.to_worker(self.executor.give_back_next)
        else:
            if job.kind == "spill":
                self.pool.spilling.bind(job)
            self.to_worker(partial(self.executor.run, job))

    cdef int order(self, uint64_t id) except -1:
        # Order a request's stream behind what its memory was used for.
        cdef vector[Entry] owed
        cdef uint32_t stream
        cdef const CRequest* found
        cdef bint ready = False
        if self.s.look_up(id) == NULL:
            return 0
        owed = self.s.owed(id)
        stream = self.s.look_up(id).ask.stream
        try:
            if self.retire.may_wait(stream):  # else it is captured by now
                self.retire.discharge_all(stream, owed)
                ready = True
        except (DeviceError, InvalidRequest):
            pass
        if ready:
            self.s.ordered(id, self.now())
        else:
            self.s.unordered(id, self.now())
        found = self.s.look_up(id)
        if found != NULL and not found.caller:  # it was dropped meanwhile
            self.withdraw(id)
        elif not ready and found != NULL and (<Request><PyObject*><size_t>found.caller).unwanted:
            self.s.cancel(id, self.now())

    cdef int look(self, const CEffect& effect) except -1:
        cdef int64_t found = 0
        cdef size_t i
        if effect.level == 1:
            found = self.retire.look(effect.stream)
        else:
            if effect.streams.size() and not self.paged:
                self.retire.be_eager(_WATCHED)
            for i in range(effect.streams.size()):
                try:
                    self.retire.fence(effect.streams[i])
                except DeviceError:  # raised where a caller waits for it
                    pass
            try:
                found = self.retire.poll()
            except DeviceError:  # a lost device raises where memory grows or is freed
                pass
        self.s.looked(found, self.now())

    cdef int set_timer(self, double when) except -1:
        timer, self.timer = self.timer, None
        if timer is not None:
            timer.cancel()
        if when != never and self.loop is not None:
            self.timer = self.loop.call_at(when, self.expire)

    def expire(self):
        """Fail requests whose deadline has passed."""
        if self.s != NULL:
            self.s.expire(self.now())
            self.carry_out()

    def look_for_deadlock(self):
        """Look for owners that wait for each other, if nothing has moved since this was scheduled."""
        self.s.quiet(self.now(), _claims_in(self.pool.spilling.claims()))
        for one in self.s.stuck():
            self.know_sleeper(one.request)
        self.carry_out()

    cdef int know_sleeper(self, uint64_t id) except -1:
        # The task that sleeps on a request is looked up only where its name is shown.
        request = self.request(id)
        if request is not None and (<Request>request).await_ != NULL:
            task = (<Await>(<Request>request).await_).task
            self.know(<uint64_t><size_t><PyObject*>task, task)

    cdef bint may_be_captured(self, uint32_t index) except -1:
        try:
            return self.retire.capturing(index)
        except DeviceError:  # the legacy default stream cannot be asked while others are captured, and never is itself
            return False

    cdef object loop_here(self):
        # The event loop that runs here, where one does.
        if self.asyncio_loop is not None and _runs_here(self.asyncio_loop):
            return self.loop
        if "trio" not in _modules and self.asyncio_loop_here() is None:
            return None
        return self.pool._loop_here()

    cdef object asyncio_loop_here(self):
        # The loop of asyncio that runs here, served or not; mostly the one that was seen last.
        if self.seen_loop is None or not _runs_here(self.seen_loop):
            self.seen_loop = _running_loop()
        return self.seen_loop

    cdef int submit(self, Request request, const Ask& ask, const Terms& terms) except -1:
        # Take a request in; it may have ended when this returns.
        cdef vector[uint64_t] pieces
        cdef CState state
        cdef double now
        if request.sizes is not None:
            pieces = [nbytes for nbytes in request.sizes if nbytes]
            if pieces.empty():
                request.found = _batch(self, tuple([asyncmem_owned(_wrap(self, 0, 0, 0, 0, 0, request.tag)) for _ in request.sizes]))
                request.ended = True
                return 0
        now = self.now()
        # All that was asked so far may have let other threads in, and one of them may have closed the budget or lease.
        if request._share._core is not self:
            request._share._open_core()  # raises
        request.keeper = <PyObject*>self
        Py_INCREF(self)
        request._id = self.s.submit(ask, pieces, terms, now)
        self.s.set_caller(request._id, <uint64_t><size_t><PyObject*>request)
        self.carry_out()
        if request._id and not request.ended:
            state = self.s.leave_to(request._id)
            if state == CState.Granted:
                request.grant()
            elif state == CState.Failed:
                request.fail(self.failure_of(request))

    cdef object failure_of(self, Request request):
        # The error of a request that has failed, which is over in the scheduler then.
        cdef const CRequest* found = self.s.look_up(request._id)
        cdef uint64_t id = request._id
        reason, shortage, level, ahead = _REASONS[<int>found.reason], _SHORTAGES[<int>found.shortage], found.level, found.ahead
        error = request.failure
        if error is None and found.terms.effort == Effort.Take and found.reason == CReason.NoMemory:
            error = _NOTHING
        if error is None:
            error = self.pool._error_of(request, reason, shortage, level, ahead)
        request._id = 0
        self.s.forget(id)
        return error

    cdef object claim(self, Request request, uint64_t id):
        # The buffer, or the batch, of a request that was granted.
        cdef vector[Granted] blocks = self.s.claim(id)
        cdef size_t next = 0
        cdef Py_ssize_t i
        cdef object buffers
        cdef uint32_t account = request._share._account
        if blocks.empty() and (request.nbytes or request.sizes is not None):
            return request._elsewhere
        if request.sizes is None:
            blocks.resize(1)  # an empty buffer has no block
            found = asyncmem_owned(
                _wrap(self, blocks[0].block, blocks[0].address, request.nbytes, request.stream, account, request.tag))
            self.keep_in_order(<Buffer>found)
        else:
            buffers = PyTuple_New(len(request.sizes))
            for i in range(len(request.sizes)):
                if request.sizes[i]:
                    one = _wrap(self, blocks[next].block, blocks[next].address, request.sizes[i], request.stream, account,
                                request.tag)
                    next += 1
                    self.keep_in_order(<Buffer>one)
                else:
                    one = _wrap(self, 0, 0, 0, request.stream, 0, request.tag)
                PyTuple_SET_ITEM(buffers, i, one)
            found = _batch(self, <tuple>buffers)
        if self.noting or request._capture is not None:
            for buffer in found if request.sizes is not None else (found,):
                self.note_request(<Buffer>buffer, request)
        return found

    cdef int note_request(self, Buffer buffer, Request request) except -1:
        capture = request._capture
        if request._site is not None:
            buffer._noted().site = request._site
        if capture is not None and buffer._block:
            buffer._set_home(capture.home)
            buffer._noted().graph = capture.graph
        return self.note_buffer(buffer, request._holder)

    cdef int note_buffer(self, Buffer buffer, object holder) except -1:
        checker = self.device.checker
        if holder is not None:
            buffer._hold(holder)
        if checker is not None and buffer.nbytes:
            buffer._noted().checked = True
            checker.open_block(buffer._address, buffer.nbytes)

    def request(self, id):
        """Return the request of that number, None where its caller is gone."""
        cdef const CRequest* found = self.s.look_up(id)
        if found == NULL or not found.caller:
            return None
        return <object><PyObject*><size_t>found.caller

    def requests(self):
        """Return the requests that wait or grow, in the order of arrival, as dictionaries of facts."""
        cdef const CRequest* one
        cdef uint64_t nbytes, owner
        cdef uint32_t account
        cdef double since, now
        cdef Terms terms
        cdef bint growing
        found = []
        for id in self.s.queued():
            self.know_sleeper(id)
            caller = self.request(id)
            # It may end as soon as any object is made: the collector runs finalizers, and these let other threads in.
            one = self.s.look_up(id)
            if one == NULL:
                continue
            account, nbytes, since, terms, owner = one.share.account, one.ask.nbytes, one.since, one.terms, one.owner
            growing = one.state == CState.Growing
            now = self.now()
            found.append({
                "id": id, "request": caller, "account": account, "nbytes": nbytes, "growing": growing, "owner": owner,
                "priority": terms.priority, "age": now - since, "calls": terms.calls, "captured": terms.captured,
                "remaining": None if terms.deadline == never else max(0.0, terms.deadline - now)})
        return found

    def fail(self, id, error):
        """Fail a request that waits, with an error."""
        request = self.request(id)
        if request is not None:
            (<Request>request)._withdraw(error)

    def give(self, Request request not None, block):
        """Serve a request that waits with a block that is live already."""
        cdef uint32_t index = _index(block, "block")
        self.s.give(request._id, index, self.c.info(index).address, self.now())
        self.carry_out()

    cdef void withdraw(self, uint64_t id) noexcept:
        # A request was dropped. From finalizers, too.
        try:
            self.s.set_caller(id, 0)
            if self.s.cancel(id, self.now()):
                self.s.forget(id)
                self.carry_out()
            elif self.s.state(id) == CState.Failed:
                self.s.forget(id)
            else:
                self.abandon(id)
        except BaseException as error:
            _report_or_raise_soon(error, self)

    cdef int abandon(self, uint64_t id) except -1:
        # Free memory that was granted to a request that is gone.
        cdef uint32_t flags = 0
        if self.s.state(id) == CState.Ordering:
            return 0  # by another thread, or soon: `order` goes on with this, as only one may
        for one in self.s.claim(id):
            flags |= self.c.free(one.block)
        if flags:
            self.signal(flags)

    def take_at(self, address, nbytes, stream, account, arena, tag=None):
        """Return a buffer over just these bytes of a lease, ordered behind their last uses, or None."""
        cdef Ask ask = self._ask(_size(nbytes), stream, account, arena, False)
        cdef uint64_t where = _whole(address, "address")
        cdef vector[Entry] owed
        cdef uint32_t block
        cdef int late
        self.cause(&ask, None)
        if not self.retire.may_wait(ask.stream):
            return None
        for late in range(2 if self.retire.late_fences else 1):
            block = self.c.take_at(ask, where, late, owed, self.last)
            if not block:
                continue
            try:
                self.retire.discharge_all(ask.stream, owed)
            except (DeviceError, InvalidRequest):  # the fence could not be recorded or waited for: as it was
                self.c.put_back(block, owed)
                continue
            if owed.size():
                self.s.note_foreign()
            found = self.adopt(block, nbytes, tag)
            if self.noting:
                self.note_buffer(<Buffer>found, self.pool._holder())
            return found
        return None

    def post(self, call):
        """Schedule a call for the next thread inside the pool; for finalizers, which must not wait for any lock."""
        self.posted.append(call)
        self.run_posted()

    cdef int run_posted(self) except -1:
        cdef Py_ssize_t left = len(self.posted)
        while left > 0 and self.posted:
            left -= 1
            call = self.posted.popleft()
            try:
                done = call()
            except BaseException as error:
                if not isinstance(error, Exception):  # an interrupt: it is made again, from its beginning
                    self.posted.append(call)
                raise
            if not done:  # it could not have its lock: another time
                self.posted.append(call)

    # -- owners ----------------------------------------------------------------------------------------------------------

    cdef uint64_t owner_of(self, object owner) except 0:
        # Tasks by their address, threads by a number that is no address.
        if isinstance(owner, int):
            return <uint64_t>owner << 1 | 1
        return <uint64_t><size_t><PyObject*>owner

    cpdef uint64_t owner(self) except 0:
        """Return the number of who runs here: a task, which is known from now on, or a thread."""
        owner = self.owner_here()
        cdef uint64_t number = self.owner_of(owner)
        if not isinstance(owner, int):
            self.know(number, owner)
        return number

    cdef object owner_here(self):
        # The task that runs here, or the number of the thread.
        task = _task_here(self.asyncio_loop_here())
        return PyThread_get_thread_ident() if task is None else task

    cdef int know(self, uint64_t number, object owner) except -1:
        # Once the task is gone its number may be another's, so what it held has no owner then.
        known = self.owners.get(number)
        if known is not None:
            if known() is owner:
                return 0
            self.forget_owner(number)
        self.owners[number] = KeyedRef(owner, self.forgotten, number)

    def forgotten(self, reference):
        """Forget a task that is gone."""
        if self.owners.get(reference.key) is reference:
            self.forget_owner(reference.key)

    cdef int forget_owner(self, uint64_t number) except -1:
        self.owners.pop(number, None)
        self.labels.pop(number, None)
        if self.s != NULL:
            self.s.forget_owner(number)

    def label(self, name):
        """Name who runs here, for tables and errors; None to forget the name."""
        cdef uint64_t number = self.owner()
        if name is None:
            self.labels.pop(number, None)
        else:
            self.labels[number] = name

    def named(self, number):
        """Return who an owner's number is: the name that was given, the task, the number of the thread, or None."""
        if number in self.labels:
            return self.labels[number]
        if number & 1:
            return number >> 1
        known = self.owners.get(number)
        return None if known is None else known()

    def observe_all(self, bint noting, bint shut):
        """Set whether every buffer gets notes, and whether every request goes past the fast path."""
        self.noting = noting
        self.observed = shut or noting
        self.set_fast()

    cdef Tag tag(self, object name, uint32_t account):
        if name is None:
            return None
        if type(name) is not str:
            name = PyUnicode_FromObject(name)  # raises where it is none
        if self.last_tag is not None and self.last_tag.name is name and self.last_tag.account == account:
            return self.last_tag
        cdef object key = (name, account) if account else name
        cdef object found = self.tags.get(key)
        if found is None:
            if len(self.tags) >= 1024:  # tags that nothing carries any more, such as request numbers
                self.tags = {key: tag for key, tag in self.tags.items() if (<Tag>tag).live}
            found = Tag.__new__(Tag)
            (<Tag>found).name, (<Tag>found).account = name, account
            self.tags[key] = found
        self.last_tag = <Tag>found
        return <Tag>found

    cdef void signal_last(self) noexcept:
        cdef uint32_t flags = self.last.flags
        self.last.flags = 0
        if flags:
            self.signal(flags)

    cdef void signal(self, uint32_t flags) noexcept:
        # Called at releases from anywhere, finalizers included: the pool's trouble must not become the caller's.
        if self.s == NULL:
            return
        try:
            self.s.freed(flags, self.now())
            self.carry_out()
        except BaseException as error:
            _report_or_raise_soon(error, self)

    cdef Buffer keep_in_order(self, Buffer buffer):
        # No reference keeps this home alive, so the fence is recorded at the free: notes make `free` do that.
        if not self.retire.lane(buffer.home).lasting:
            buffer._noted().add_user(buffer.home)
        return buffer

    cdef int index_of(self, object stream) except -2:
        """The number of a stream that is known and may take the fast path, else -1."""
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
        if index is None or not self.retire.lane(index).lasting:
            return -1
        if self.stream_objects[index] is stream:
            self.other_stream, self.other_index = self.last_stream, self.last_index
            self.last_stream, self.last_index = <PyObject*>stream, index
        return index


# Of a request that only wanted to know whether there is something.
cdef object _NOTHING = MemoryError("nothing was free")


cdef extern from "Python.h":
    int Py_AddPendingCall(int (*call)(void*) noexcept, void* of)


cdef int _raise_soon(void* error) noexcept:
    PyErr_SetObject(type(<object>error), <object>error)
    Py_DECREF(<object>error)
    return -1


cdef object _main_thread = threading.main_thread()


cdef void _report_or_raise_soon(object error, object where) noexcept:
    # Report what cannot be raised here. An interrupt comes on the main thread, and is raised there in the next step.
    if isinstance(error, Exception) or PyThread_get_thread_ident() != <unsigned long>_main_thread.ident:
        _report(error, where)
        return
    Py_INCREF(error)
    if Py_AddPendingCall(_raise_soon, <void*>error) != 0:
        Py_DECREF(error)
        _report(error, where)


cdef inline bint _may_wait(Effect job):
    # Whether to carry it out may take until the device has done its work.
    return job.kind != "remap" and (job.kind != "grow" or bool(job.returns))


cdef void _report(object error, object where) noexcept:
    # For what cannot be raised: to sys.unraisablehook.
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(where)


cdef inline PyObject* _wrap(
    Core core, uint32_t block, uint64_t address, int64_t nbytes, uint32_t home, uint32_t account, object tag
) except NULL:
    # A buffer over a granted block, with one reference, the caller's.
    cdef PyObject* buffer = _new_buffer()
    Py_INCREF(core)
    (<Buffer>buffer).owner = <PyObject*>core
    (<Buffer>buffer)._block = block
    (<Buffer>buffer)._address = address
    (<Buffer>buffer).nbytes = nbytes
    (<Buffer>buffer).home = home
    (<Buffer>buffer).alive = True
    if tag is not None:
        _label(core, buffer, tag, account)
    if core.last.flags:
        core.signal_last()
    return buffer


cdef void _label(Core core, PyObject* buffer, object name, uint32_t account) noexcept:
    cdef Tag tag = core.tag(name, account)
    _write(&(<Buffer>buffer).label, tag)
    tag.live += (<Buffer>buffer).nbytes
