"""The way of a request: refused, granted, queued, provided for, or given up. The one file that knows the order.

What changes state here holds the turn, and neither blocks nor awaits. What takes time is an *errand*: a plain call
that the worker makes, or a thread that may block, one at a time. Whoever frees memory, ends an errand or leaves the
queue marks the flow as changed, and the turn pumps it before it lets go.
"""

from __future__ import annotations

from bisect import insort
from functools import partial
from typing import TYPE_CHECKING

from asyncmem.core import FLAG_FREE, FLAG_LIVE, Desk, Kind
from asyncmem.devices import Stream
from asyncmem.engine.admit import Queue
from asyncmem.errors import (
    AsyncmemError,
    Described,
    InvalidRequest,
    OutOfMemoryError,
    PoolClosed,
    PoolTimeout,
    RequestCancelled,
    TooManyRequests,
)
from asyncmem.pool.alarm import alarm
from asyncmem.pool.blocking import BlockingCalls
from asyncmem.pool.graph import Captures
from asyncmem.pool.holdings import named_owner
from asyncmem.pool.home import running_home
from asyncmem.pool.ladder import Ladder
from asyncmem.pool.latch import Latch
from asyncmem.pool.pins import Pins
from asyncmem.pool.postmortem import Postmortem, log
from asyncmem.pool.pressure import PressureWatch
from asyncmem.pool.relief import Relief
from asyncmem.pool.request import Request
from asyncmem.pool.snapshot import out_of_memory_facts
from asyncmem.pool.spilling import Spilling
from asyncmem.pool.squeeze import Squeeze
from asyncmem.pool.stuck import DeadlockWatch
from asyncmem.pool.taker import Taker
from asyncmem.pool.upkeep import Upkeep
from asyncmem.pool.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from typing import Any

    from asyncmem.core import Batch, Buffer, Core, Turn
    from asyncmem.engine.retire import Retire
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.options import PoolOptions
    from asyncmem.pool.graph import Captured
    from asyncmem.pool.home import Home
    from asyncmem.pool.pool import AsyncMemoryPool
    from asyncmem.pool.share import Budget, Share
    from asyncmem.pool.supply import Supply

    Errand = Callable[[], None]


class Flow(Desk):
    """The requests of one pool, its budgets included. Attributes change under the turn only.

    Attributes:
        closed: The error of a closed pool, or None.
    """

    if TYPE_CHECKING:  # the core keeps these, and tells none of their types
        pool: AsyncMemoryPool
        home: Home | None
        budgets: list[Budget]

    def __init__(
        self,
        pool: AsyncMemoryPool,
        core: Core,
        retire: Retire,
        make_supply: Callable[[Turn], Supply],
        submit: Callable[[Errand], None],
        options: PoolOptions,
    ) -> None:
        self._connect(core, pool, self._settle)
        self.retire = retire
        self.options = options
        self.plain = _is_plain(options)
        self.supply = make_supply(self.turn)
        self.tally = pool.tally
        self.queue: Queue[Waiting] = Queue(int(options.bypass * self.supply.limit))
        self.taker = Taker(core, retire, self.supply)
        self.ladder = Ladder(self)
        self.blocking = BlockingCalls(self)
        self.watch = DeadlockWatch(self)
        self.held = pool.holdings.table()
        self.kinds = Waiting, Request
        self.named = named_owner
        self.budgets = []
        self.standing: dict[Budget, None] = {}  # budgets in which somebody stood when last looked at, or came since
        self.shares: dict[int, Share] = {0: pool}  # by the core's account
        self.ended_accounts: list[int] = []  # of closed budgets and leases, while something below them is held
        self.captures = Captures(self)
        self.pins = Pins(self.turn)
        self.spilling = Spilling(self)
        self.relief = Relief(self)
        self.pressure = PressureWatch(self, core)
        self.squeeze = Squeeze(self)
        self.upkeep = Upkeep(self)
        self.submit = submit
        self._tried: Waiting | None = None
        self._owed = []
        self._notes = [partial(self._noticed, flags) for flags in range(8)]
        self._emptied: Latch[None] | None = None
        self._owner_blocks = 0

    # -- what callers ask ----------------------------------------------------------------------------------------

    def ask(self, waiting: Waiting) -> None:
        """Take a request in: granted at once, queued, or failed. The error, if any, is for the await."""
        share = waiting.share
        turn = self.turn
        turn.acquire()
        try:
            error = self.refusing or share.refusal(waiting)
            if error is not None:
                waiting.finish(None, error)
            elif waiting.capture is not None and self._grant_own(waiting, waiting.capture):
                pass  # it was this capture's already, so nobody is passed
            elif share.may_wait and not self._may_be_there(waiting):
                self._queue_up(waiting, share)  # there is no such memory before somebody frees some
                if (
                    share is not self.pool
                    or self.options.fallback is not None
                    or waiting.inline
                    or self.may_spill
                    or self._may_be_there(waiting)
                ):
                    self._changed = True
            elif self._anyone_before(share):
                self._queue_up(waiting, share)
                self._changed = True
            elif not self._serve_newcomer(waiting):
                self._queue_up(waiting, share)
                # Who provides for itself in a moment, and stands alone, needs nobody to look at the queue.
                if not waiting.inline or waiting.overdue or not self._stands_alone(waiting):
                    self._changed, self._tried = True, waiting
        finally:
            turn.leave()

    def _serve_newcomer(self, waiting: Waiting) -> bool:
        if waiting.share.may_wait and not self.supply.may_hold(waiting.total):
            return False
        if self._grant_at_once(waiting):
            return True
        if not waiting.share.may_wait or not any(self._grant_at_once(waiting) for _ in self._made_ready(waiting)):
            return False
        for tally in waiting.tallies():
            tally.misses += len(waiting.sizes)
        return True

    def _made_ready(self, waiting: Waiting) -> Iterator[None]:
        """Do at once what is done at once for who stands first, step by step, for a newcomer who cannot wait for that.

        A synchronous caller need not stand anywhere for caches alone; whose time is over already has no other chance.
        """
        late = waiting.overdue
        if (waiting.inline or late) and self.ladder.flush_for(waiting):
            yield
        if late and self.supply.should_tidy(waiting, first=True) and self.ladder.tidy():
            yield

    def _grant_own(self, waiting: Waiting, capture: Captured) -> bool:
        found = capture.graph.reuse(waiting, capture.home)
        if found is not None:
            self._granted(waiting, found)
        return found is not None

    def _may_be_there(self, waiting: Waiting) -> bool:
        return waiting.total <= self.supply.limit - self.core.live()

    def try_now(self, waiting: Waiting) -> Buffer | Batch | None:
        """Serve from what is mapped, if nobody waits; never grows."""
        with self.turn:
            if self.refusing is not None:
                raise self.refusing
            return None if self._anyone_before(waiting.share) else self.taker.take(waiting, may_grow=False)

    def bind(self, waiting: Waiting) -> Home:
        """Answer the loop to sleep on, which becomes the pool's own until it closes.

        Raises:
            InvalidRequest: Another loop is served, and it is still open.
        """
        home = running_home(self.home)
        if home is None:
            raise InvalidRequest("await", waiting, "a running event loop, asyncio's or trio's")
        if home is not self.home:
            self._serve_loop(home)
        if waiting.home is not home:
            waiting.move_to(home)
        return home

    def meet(self) -> None:
        """Get to know the loop that runs here, where none is served yet: its first wait will be as short as any."""
        home = running_home(self.home)
        if home is not None and (self.home is None or self.home.is_closed()):
            self.home = home

    def _serve_loop(self, home: Home) -> None:
        if self.home is not None and not self.home.is_closed():
            served = f"the event loop that pool {self.pool.name!r} serves, {self.home!r}"
            raise InvalidRequest("await", Described(repr(home)), served)
        self.home = home

    def yield_once(self, waiting: Waiting) -> Generator[Any, Any, None]:
        """Let the loop run others after many hits in a row; a cancellation there gives the grant back."""
        home = running_home(self.home)
        try:
            if home is not None:
                yield from home.pause()
        except BaseException:
            with self.turn:
                self.withdraw(waiting, None)
            raise

    def stream_index(self, stream: object) -> int:
        """Answer the core's index of a stream; None is the device's default stream."""
        return 0 if stream is None else self.retire.register(self.pool.device.stream_of(stream))

    def share_of(self, buffer: Buffer) -> Share:
        """Answer the pool, budget or lease that a buffer is charged to."""
        return self.shares.get(buffer._account, self.pool)

    def close_accounts(self) -> None:
        """Forget the accounts of closed budgets and leases of which nothing is held any more (with the turn held)."""
        before: list[int] = []
        while self.ended_accounts != before:  # the one above goes after the last below it
            before = self.ended_accounts
            self.ended_accounts = [account for account in before if not self._forget(account)]

    def _forget(self, account: int) -> bool:
        try:
            self.core.remove_account(account)
        except ValueError:
            return False  # something of it is held, or an account below it is left
        return True

    def deliver(self, waiting: Waiting, found: Buffer | Batch) -> None:
        """Hand what has been taken for a request to whoever waits (with the turn held)."""
        self._granted(waiting, found)
        for tally in waiting.tallies():
            tally.left(waiting)
        self._owed.append(waiting.wake)

    def notes_all(self, options: PoolOptions) -> bool:
        """Say whether something is noted on every buffer, so that none goes the fast ways."""
        return options.track or self.supply.direct or self.core.device.checker is not None

    def owner_enters(self) -> None:
        """Count a block of `pool.owner(...)`: while there is one, all allocations go the way that notes their owner."""
        with self.turn:
            self._count_owner(1)

    def owner_leaves(self) -> None:
        """Count one less. From finalizers too: such a task may be collected while its thread has the turn."""
        self.turn.post(partial(self._count_owner, -1))

    def _count_owner(self, change: int) -> None:
        self._owner_blocks += change
        self.observe()

    def observe(self) -> None:
        """Have every request go the way that looks at it, while there is something to see (with the turn held)."""
        watched = self._owner_blocks > 0 or self.captures.open
        self.core.observed = watched or self.notes_all(self.options)
        # Where no stream can be captured, nobody pays for the question.
        captures = type(self.core.device.default_stream).capturing is not Stream.capturing
        self.core.watch_captures = captures and self.options.watch_captures

    # -- what happens to a waiting request -------------------------------------------------------------------------

    def withdraw(self, waiting: Waiting, reason: Exception | None) -> None:
        """End a request with the turn held: it leaves the queue, or the grant nobody took comes back."""
        if waiting.done:
            found = waiting.result
            if found is not None:
                for tally in waiting.tallies():
                    tally.handed_back += 1
                waiting.finish(None, self._cancelled(waiting))
                found.free()  # and not just dropped: nobody has forgotten it
            return
        if reason is None:
            for tally in waiting.tallies():
                tally.cancellations += 1
            reason = self._cancelled(waiting)
        self._leave(waiting)
        waiting.finish(None, reason)
        self._owed.append(waiting.wake)
        self.changed()

    def fail(self, waiting: Waiting | None, error: Exception) -> None:
        """End a request with an error, from an errand; without one the error is a warning."""
        if waiting is None:
            alarm(f"pool {self.pool.name!r}: {error}", RuntimeWarning)
            return
        with self.turn:
            # Since the errand was decided on, the worker may have granted it: an error would take that back.
            if not waiting.done:
                self.withdraw(waiting, error)

    def timed_out(self, waiting: Waiting) -> Exception:
        """Make the error for a deadline that has passed, and count it."""
        for tally in waiting.tallies():
            tally.timeouts += 1
        ahead = sum(1 for other in self.queue if other.seq < waiting.seq)
        return PoolTimeout(
            pool=self.pool.name, asked=waiting.nbytes, timeout=waiting.timeout or 0.0, ahead=ahead,
            free=self.core.free_bytes() + self.core.cached_bytes(),
        )  # fmt: skip

    def asleep(self, waiting: Waiting) -> None:
        """Hear that a task sleeps on a request, and look whether that closes a circle."""
        self.watch.asleep(waiting)

    def facts(self, waiting: Waiting) -> OutOfMemoryFacts:
        """Say all that is known, for the error."""
        return out_of_memory_facts(self, waiting)

    def out_of_memory(self, waiting: Waiting) -> OutOfMemoryError:
        """Make the error of a request that cannot be served, and tell whoever wants to know (with the turn held)."""
        facts = self.facts(waiting)
        if self.core.logged:
            self.core.note(Kind.OUT_OF_MEMORY, nbytes=waiting.nbytes, stream=waiting.stream, waiter=waiting)
        if self.options.oom_snapshot is not None:
            self.submit(Postmortem(self, waiting, facts, self.options.oom_snapshot).save)
        error = OutOfMemoryError(facts)
        self.owe(partial(log, error, self.pool.name))  # whoever hears the log may do anything
        return error

    def waiters(self) -> Iterable[Waiting]:
        """Go through everybody who waits, in budgets too."""
        yield from self.queue
        yield from self.relief.inside
        for budget in self.standing:
            yield from budget.queue

    def anyone_waits(self) -> bool:
        """Say whether somebody stands in a queue (with the turn held)."""
        return not (
            self.queue.empty and self.relief.inside.empty and all(budget.queue.empty for budget in self.standing)
        )

    def close(self, error: Exception) -> None:
        """Refuse everything from now on, and fail who waits, first."""
        with self.turn:
            self.closed = self.refusing = error
            self.core.open = False
            for account in (0, *(budget._account for budget in self.budgets)):
                self.core.set_gate(account, True)
            for waiting in list(self.waiters()):
                self.withdraw(waiting, error)
            self.spilling.let_stay()
            self.pressure.end()

    def shut(self) -> None:
        """Refuse everything from now on (with the turn held)."""
        self.closed = self.refusing = self.closed or PoolClosed(self.pool.name, "it was dropped")

    def drained(self) -> Latch[None]:
        """Refuse newcomers from now on, and answer what opens once every buffer has been freed."""
        with self.turn:
            self._emptied = latch = Latch(_nothing)
            self.refusing = PoolClosed(self.pool.name, "it is draining")
            self.core.open = False
            self.core.set_gate(0, True)
            self.changed()
        return latch

    def notice(self, flags: int) -> None:
        """Hear from a free or a take what `hand_over` left undone, or that a mark was crossed. From anywhere."""
        self.turn.post(self._notes[flags])

    def _dropped(self, waiting: Waiting) -> None:
        self.turn.post(partial(self.withdraw, waiting, None))

    def owe(self, call: Callable[[], None]) -> None:
        """Have a call made once the turn is free."""
        self._owed.append(call)

    def reconfigure(self, options: PoolOptions, limit: int) -> None:
        """Go on with other options (with the turn held)."""
        self.options = options
        self.queue.bypass = int(options.bypass * limit)
        self.plain = _is_plain(options)
        self.supply.reconfigure(options, limit)
        self.spilling.look_again()
        self.core.set_limit(0, limit)
        self.refuse_hopeless()
        self.retire.late_fences = options.late_fences
        self.retire.fence_every = options.fence_every
        self.observe()
        self.pressure.look()
        self.squeeze.feel(self.pressure.level)
        self.changed()

    def refuse_hopeless(self) -> None:
        """Fail those who wait for more than a limit that was lowered allows (with the turn held)."""
        for waiting in list(self.waiters()):
            error = waiting.share.refusal(waiting)
            if error is not None:
                self.withdraw(waiting, error)

    def changed(self) -> None:
        """Have the queues looked at before the turn ends (with the turn held)."""
        self._changed = True

    def _empty(self) -> None:
        if self._emptied is not None and not len(self.queue):
            self._owed.append(self._emptied)
            self._emptied = None
        if self.closed is not None:
            self._owed.append(self.upkeep.release_the_rest)

    # -- granting ----------------------------------------------------------------------------------------------------

    def _settle(self) -> list[Callable[[], None]]:
        while self._changed:
            self._changed = False
            self._pump()
        owed = self._owed
        if owed:
            self._owed = []
        return owed

    def _noticed(self, flags: int) -> None:
        self._changed = True
        if flags & FLAG_LIVE:
            self.pressure.look()
        if flags & FLAG_FREE:
            self.upkeep.grow_ahead()

    def _pump(self) -> None:
        self.count_passed()
        if self.core.live() == 0:
            self._empty()
        if self.closed is None:
            if not self._tried_alone():
                self._serve()
            while (head := self.queue.head()) is not None and self._provide(head):
                self._serve()
            if head is not None and self.supply.by_pages and not (self.busy or head.inline):
                self._provide_behind(head)
            self._relieve()
            if head is not None and not self.busy and self.queue.overtaken > head.mark:
                self.watch.overtaken()
            if self.core.reserved() > self.supply.limit:
                self.upkeep.shrink()
        self._left_over = self._room()
        self.set_gates()

    def _tried_alone(self) -> bool:
        # A newcomer that was tried in this same turn, and that nobody stands beside, need not be tried again.
        tried, self._tried = self._tried, None
        return tried is not None and self._stands_alone(tried)

    def _stands_alone(self, waiting: Waiting) -> bool:
        return len(self.queue) == 1 and waiting.queue is self.queue

    def _serve_captures(self) -> None:
        for waiting in list(self.waiters()):
            capture = waiting.capture
            if capture is not None and self._grant_own(waiting, capture):
                self._leave(waiting)
                self._owed.append(waiting.wake)

    def _serve(self) -> None:
        if self.captures.open:
            self._serve_captures()
        if self.standing:
            self._let_through()
        for waiting in list(self.relief.inside):
            if self._grant(waiting):
                self._leave(waiting)
                self._owed.append(waiting.wake)
        for waiting in self.queue.serve(self._grant, self._room):
            for tally in waiting.tallies():
                tally.left(waiting)
                tally.misses += len(waiting.sizes)
            self._owed.append(waiting.wake)

    def _let_through(self) -> None:
        todo = sorted(self.standing, key=_number)  # the inner ones were made last
        while todo:
            budget = todo.pop()
            for waiting in budget.queue.serve(budget.let_through, budget.room):
                if not waiting.done:  # a budget may have memory of its own
                    outer = budget.pass_on(waiting)
                    if outer is not None and outer not in todo:
                        insort(todo, outer, key=_number)

    def _room(self) -> int:
        return self.core.reserved() - self.core.live()

    def _grant(self, waiting: Waiting) -> bool:
        # Growth that would spare a stream a wait comes for the head alone.
        may_grow = self.supply.by_pages or waiting is self.queue.head()
        return not waiting.overdue and self._grant_at_once(waiting, may_grow=may_grow)

    def _grant_at_once(self, waiting: Waiting, *, may_grow: bool = True) -> bool:
        found = self.taker.take(waiting, may_grow=may_grow)
        if found is not None:
            self._granted(waiting, found)
        return found is not None

    def _granted(self, waiting: Waiting, found: Buffer | Batch) -> None:
        self._keep_promises(waiting)
        waiting.finish(found, None)
        self.progress += 1

    def _keep_promises(self, waiting: Waiting) -> None:
        for budget in waiting.promised:
            budget.unpromise(waiting.total)
        waiting.promised = ()

    def _queue_up(self, waiting: Waiting, share: Share) -> None:
        if not share.may_wait:
            if not self.relief.take_in(waiting):
                waiting.finish(None, self.out_of_memory(waiting))
            return
        most = self.options.max_waiting
        standing = sum(1 for _ in self.waiters()) if most is not None else 0
        if most is not None and standing >= most and not waiting.inline:
            error = TooManyRequests(pool=self.pool.name, waiting=standing, max_waiting=most, asked=waiting.nbytes)
            waiting.finish(None, error)
            return
        for tally in waiting.tallies():
            tally.waits += 1
        self.count_passed()
        share.join(waiting)
        self.core.set_gate(share._account, True)
        self._left_over = self._room()

    def _anyone_before(self, share: Share) -> bool:
        if not share.may_wait:
            return False
        # Who stands further out counts too: budgets on the way there have promised it room, which is as good as taken.
        further_out = bool(self.standing) and any(not one.queue.empty for one in share.lineage())
        return further_out or not self.queue.empty

    def _leave(self, waiting: Waiting) -> None:
        if waiting.queue is not None:
            waiting.queue.leave(waiting)
        self._keep_promises(waiting)
        for tally in waiting.tallies():
            tally.left(waiting)

    def set_gates(self) -> None:
        """Close the doors where somebody stands before newcomers, and open them elsewhere (with the turn held)."""
        closed = self.closed is not None
        # Above a limit that was lowered every free is looked at, until enough has gone back.
        above = self.core.reserved() > self.supply.limit
        self.core.set_gate(0, closed or above or len(self.queue) > 0)
        for budget in list(self.standing):
            stands = len(budget.queue) > 0
            self.core.set_gate(budget._account, closed or stands)
            if not stands:
                del self.standing[budget]
        alone = self.queue.oldest() if len(self.queue) == 1 and not (closed or above) else None
        # What is under way for it serves the only one who waits, so until that comes hits pass it by as if there were
        # nobody, within the bypass budget. A budget's waiter has no more than a promise that they could use up.
        if alone is not None and alone.provided and alone.share is self.pool:
            self.core.leave_ajar(self.queue.left_for_others(alone), alone.total)

    def _cancelled(self, waiting: Waiting) -> Exception:
        return RequestCancelled(pool=self.pool.name, asked=waiting.nbytes)

    # -- providing ---------------------------------------------------------------------------------------------------

    def _provide(self, head: Waiting) -> bool:
        """Do what can be done at once for the head, or send for the rest; says whether to serve again."""
        if head.overdue:
            self.withdraw(head, self.timed_out(head))
            return True
        if self.busy or head.inline:
            return False
        if self.supply.should_tidy(head) and self.ladder.tidy():
            return True
        if self.ladder.flush_for(head):
            return True
        errand = self.ladder.grow_for(head)
        if errand is None and (self.ladder.tidy() or self.ladder.press(head)):
            return True
        errand = errand or self.ladder.make_room_for(head) or self.ladder.spill_for(head)
        errand = errand or self.errand_without_hope(head)
        if errand is not None:
            self._send(errand)
        return False

    def _provide_behind(self, head: Waiting) -> None:
        # What the limit leaves is too little for the head. In segments it would be there, and serve who may overtake.
        for waiting in self.queue.behind(head, self.supply.limit - self.core.live()):
            errand = None if waiting.inline else self.ladder.grow_for(waiting)
            if errand is not None:
                self._send(errand)
                return

    def _relieve(self) -> None:
        errand = self.relief.errand() if self.may_spill and not self.busy else None
        if errand is not None:
            self._send(errand)
        for waiting in self.relief.beyond():
            self.withdraw(waiting, self.out_of_memory(waiting))

    def may_grow_behind(self, waiting: Waiting) -> bool:
        """Say whether a request behind the head may have memory made for it (with the turn held)."""
        room = self.supply.limit - self.core.live()
        return self.supply.by_pages and waiting.total <= room and self.queue.may_overtake(waiting)

    def _provide_alone(self, waiting: Waiting) -> None:
        """Send for growth for a newcomer who wants more than is free and stands before nobody.

        How much is decided by the worker too, so that the loop is not held for it.
        """
        waiting.provided = True
        self._send(partial(self._decide_and_grow, waiting))
        self.set_gates()

    def _decide_and_grow(self, waiting: Waiting) -> None:
        with self.turn:
            self.count_passed()  # those who went by meanwhile count against what may yet
            waiting.provided = False
            errand = None if waiting.done else self.ladder.grow_for(waiting)
            self.set_gates()
        if errand is not None:
            errand()

    def _send(self, errand: Errand) -> None:
        self.busy = True
        self._owed.append(partial(self.submit, partial(self._run, errand)))

    def errand_without_hope(self, waiting: Waiting) -> Errand | None:
        """Answer what is left to do where no memory can be made: the host, or the last rungs (with the turn held)."""
        if self.options.fallback is not None and waiting.capture is None:
            return partial(self._serve_from_host, waiting)
        # Waiting helps as long as somebody holds memory, or some is under way.
        if self.captures.in_the_way and (waiting.timeout or not waiting.inline):
            return None
        if self.core.live() == 0 and not self.supply.leaving and not self.supply.coming:
            return self.ladder.last_errand(waiting)
        return None

    def _serve_from_host(self, waiting: Waiting) -> None:
        try:
            host = self.pool.fallback.of(self.pool)
            found = host.serve_blocking(waiting.sizes, batch=waiting.batch, tag=waiting.tag)
        except AsyncmemError as error:  # the host has too little, too
            self.fail(waiting, error)
            return
        with self.turn:
            if not waiting.done:
                self._leave(waiting)
                self._granted(waiting, found)
                self.tally.cpu_fallbacks += len(waiting.sizes)
                self._owed.append(waiting.wake)

    def _run(self, errand: Errand) -> None:
        try:
            errand()
        finally:
            self._errand_over()

    def _let_look_again(self) -> None:
        self.blocking.errand_ended()
        if len(self.relief.inside):
            self.changed()


def _is_plain(options: PoolOptions) -> bool:
    """Say whether nothing is asked of every request that only the way in Python does."""
    return options.timeout is None and options.fallback is None and options.max_waiting is None


def _number(budget: Budget) -> int:
    return budget.number


def _nothing() -> None:
    """Stand for the call of a latch that only opens."""
