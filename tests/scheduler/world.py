"""The bare scheduler in virtual time: actors that ask, hold and free, a device that is slow and fails, and an oracle.

Everything is drawn from one seed. After each event the scheduler's effects are begun, every invariant is walked, and
the oracle looks for somebody who waits in vain.
"""

import heapq
import itertools
import random
from collections.abc import Callable

from asyncmem.core import GRANULE, Heap, Scheduler

from .device import Executor
from .model import (
    ENDS,
    KIB,
    NEVER,
    TICK,
    Actor,
    Asked,
    Blocks,
    BrokenPromise,
    Held,
    Refused,
    Settings,
    Share,
    Steps,
)
from .oracle import Oracle
from .programs import Programs


class World(Programs, Executor, Oracle):
    """One history."""

    def __init__(self, seed: int, *, told: bool = False, journal: bool = False) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.now = 1.0
        self.kind = kind = Settings.draw(self.draw)
        caches = {"stream_cache_blocks": 0, "shared_cache_blocks": 0} if kind.direct else {}
        self.heap = Heap(journal=journal, small_limit=1 if kind.direct else kind.small, **caches)
        for _ in range(kind.streams - 1):
            self.heap.add_stream()
        self.scheduler = Scheduler(self.heap, self.now, **self.policy())
        self.root = Share(0, limit=kind.limit)
        self.shares = [self.root]
        self.ended_accounts: list[int] = []
        self.asked: dict[int, Asked] = {}
        self.held: dict[int, Held] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.queued_bytes = 0
        self.sequence = 0
        self.actors: list[Actor] = []
        self.device: dict[int, int] = {}
        self.mapped = 0
        self.vacated: dict[int, int] = {}
        self.next_address = 1 << 40
        self.others = 0  # bytes of the device that other programs have
        self.fences: list[tuple[float, int, int]] = []
        self.refused = False  # by the device, since it was last asked to forget that
        self.unordered = False
        self.busy = 0  # effects under way
        self.timers: dict[str, int] = {}
        self.idle_ticks = 0
        self.deadlocks = self.steps = self.served = 0
        self.filling = self.in_pieces = self.shut = self.crashed = False
        self.looking = 0
        self.were_waiting: set[int] = set()  # after the last event
        self.were_growing: set[int] = set()
        self.fresh: list[Asked] = []  # taken in while somebody looks at fences
        self.trace: list[str] | None = [] if told else None
        if kind.paged:
            page = 64 * KIB
            for arena in (0, 1):
                self.heap.add_space((arena + 1) << 42, 8 * kind.limit, arena, page)
        self.make_budgets()
        for number in range(kind.actors):
            actor = Actor(number, iter(()))  # type: ignore[arg-type]  # replaced at once
            actor.program = self.draw.choice(self.programs())(actor)
            self.actors.append(actor)
            self.later(self.draw.random() * 0.01, lambda actor=actor: self.resume(actor, None))

    def policy(self) -> dict[str, object]:
        kind = self.kind
        return {
            "limit": kind.limit, "limited": True, "paged": kind.paged, "direct": kind.direct, "granularity": GRANULE,
            "page": 64 * KIB, "segment_size": kind.segment, "small_limit": 1 if kind.direct else kind.small,
            "bypass": kind.bypass, "quiet_after": 0.1, **kind.more,
        }  # fmt: skip

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> "World":
        """Play the history to its end."""
        self.later(TICK, self.tick)
        if self.kind.meddling:
            self.later(0.002, self.meddle)
        if self.kind.ending:
            self.later(self.draw.random() * 0.05, self.shut_down)
        try:
            self.turn()
            while self.events and not all(actor.over for actor in self.actors):
                self.now, _, event = heapq.heappop(self.events)
                event()
                self.turn()
            self.end()
        except BrokenPromise:
            raise
        except Exception as error:
            raise BrokenPromise(f"seed {self.seed}: {error!r}\n{self.kind}") from error
        return self

    def turn(self) -> None:
        """Begin what is to be done, then look at everything."""
        self.carry_out()
        self.close_accounts()
        self.steps += 1
        self.scheduler.check()
        self.heap.check()
        self.were_waiting = {one.number for one in self.waiting()}
        self.were_growing = {one.number for one in self.growing()}
        self.look_for_the_forgotten()

    def demand(self, holds: object, promise: str, *about: object) -> None:
        """See that it holds; the promise is put together, `about` in place of its `{}`, only if it does not."""
        if not holds:
            broken = promise.format(*about) if about else promise
            raise BrokenPromise(f"seed {self.seed}, at {self.now:.4f}: {broken}\n{self.kind}\n{self.picture()}")

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:.4f} {text}")

    def picture(self) -> str:
        lines = [f"gauges {self.scheduler.gauges()}"]
        for share in self.shares:
            live = self.heap.account(share.account).live
            above = share.up.account if share.up else None
            lines.append(f"share {share.account} in {above}: limit {share.limit}, live {live}, arena {share.arena}")
        for one in sorted(self.asked.values(), key=lambda one: one.place):
            state = self.scheduler.state(one.number)
            lines.append(
                f"actor {one.actor.number} {state} for {one.total} in {one.share.account}, deadline {one.deadline:.3f}"
            )
        lines += [f"segment {segment}" for segment in self.heap.segments()]
        lines += [
            f"held {held.nbytes} at {held.address:#x} of {held.share.account}, hold {held.hold}"
            for held in self.held.values()
        ]
        return "\n".join(lines + (self.trace or [])[-60:])

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), event))

    def soon(self, event: Callable[[], None]) -> None:
        """In no time, in a short time or in a long one."""
        self.later(self.draw.choice([0.0, 0.0, 1e-4, 0.002, 0.05]) * self.draw.random(), event)

    # -- actors --------------------------------------------------------------------------------------------------------

    def resume(self, actor: Actor, answer: Blocks | Refused | None) -> None:
        """Let an actor go on to its next wait."""
        self.idle_ticks = 0
        try:
            begin = actor.program.send(answer)
        except StopIteration:
            actor.over = True
            return
        begin()

    def sleep(self, actor: Actor, seconds: float) -> Callable[[], None]:
        return lambda: self.later(seconds, lambda: self.resume(actor, None))

    def size(self, share: Share) -> int:
        most = min(one.limit for one in share.path())
        kind = self.kind.sizes
        if kind == "equal":
            return min(128 * KIB, most)
        if kind == "large" or self.draw.random() < 0.2:
            return max(1, int(most * self.draw.choice([1, 0.75, 0.5, 0.5, 0.3])))
        return min(most, int(2 ** self.draw.uniform(6, 19.5)))

    def pause(self) -> float:
        return self.draw.choice([0.0, 1e-4, 0.003, 0.2]) * self.draw.random()

    def ask(
        self,
        actor: Actor,
        share: Share,
        nbytes: int | list[int],
        *,
        priority: int = 0,
        timeout: float | None = None,
        effort: str = "all",
        waits: bool = True,
        calls: bool = False,
        asleep: bool = True,
    ) -> Callable[[], None]:
        """Ask, and go on with the blocks or with why there are none."""

        def begin() -> None:
            if share.closed:
                self.soon(lambda: self.resume(actor, "closed"))
                return
            pieces = nbytes if isinstance(nbytes, list) else [nbytes]
            total = sum(-(-one // GRANULE) * GRANULE for one in pieces)
            possible = total <= min(one.limit for one in share.path())
            if possible and not self.shut:
                self.sequence += 1
                self.queued_bytes += total
            key = self.queued_bytes - int(min(max(0.5 * self.kind.bypass * self.root.limit * priority, -4e18), 4e18))
            deadline = NEVER if timeout is None else self.now + timeout
            number = self.scheduler.submit(
                nbytes, self.now, account=share.account, stream=self.draw.randrange(self.kind.streams),
                arena=share.arena, priority=priority, deadline=deadline, waits=waits, calls=calls, effort=effort,
            )  # fmt: skip
            self.say(f"actor {actor.number} asks for {nbytes} in {share.account}: {number}")
            place = (key, -priority, self.sequence)
            asked = Asked(
                number, actor, share, total, place, isinstance(nbytes, list), waits, deadline, asleep and not calls
            )
            self.asked[number] = actor_asked = asked
            actor.asked = actor_asked
            self.carry_out()
            state = "" if asked.ended else self.scheduler.state(number)
            if state in {"granted", "failed"}:
                self.answer(asked)
            elif self.looking:
                self.fresh.append(asked)
                if asked.asleep:
                    self.scheduler.asleep(number, actor.owner, self.now)
            elif state:
                self.demand(possible, f"{total} bytes are queued that no limit allows")
                self.demand(effort == "all", "somebody waits who would not")
                if asked.asleep:
                    self.scheduler.asleep(number, actor.owner, self.now)
            if calls and waits and effort == "all" and not asked.ended:  # its own thread gives up
                self.later(timeout or 0, lambda: self.give_up(asked))

        return begin

    def give_up(self, asked: Asked) -> None:
        if not asked.ended:
            self.cancel(asked)

    def cancel(self, asked: Asked) -> None:
        if self.scheduler.cancel(asked.number, self.now):
            self.say(f"{asked.number} is cancelled")
            self.carry_out()
            if not asked.ended:
                self.answer(asked)

    def answer(self, asked: Asked) -> None:
        """Take what a request came to."""
        self.demand(not asked.ended, "a request ended twice")
        asked.ended = True
        del self.asked[asked.number]
        actor, share, answer = asked.actor, asked.share, None
        actor.asked = None
        state = self.scheduler.state(asked.number)
        self.say(f"{asked.number} of actor {actor.number} is {state}")
        if state == "granted":
            answer = self.scheduler.claim(asked.number)
            self.served += 1
            for block in answer:
                self.take(block, share)
            if share.arena == -1 and answer:
                self.count_passing(asked)
        else:
            self.demand(state == "failed", f"a request ended as {state}")
            answer = self.scheduler.reason(asked.number)
            self.scheduler.forget(asked.number)
            self.judge(asked, answer)
            actor.ends.append(answer)
        self.soon(lambda: self.resume(actor, answer))

    def count_passing(self, asked: Asked) -> None:
        """Demand that no more bytes pass one who waits than may; memory that is being made for somebody is his."""
        if asked.number in self.were_growing or self.unordered or not self.kind.flat:
            return
        for other in self.asked.values():
            stood = other.place < asked.place and other.share.arena == -1 and other.number in self.were_waiting
            if stood and self.scheduler.state(other.number) == "waiting":
                other.passed += asked.total
                within = other.passed <= self.kind.bypass * self.root.limit
                self.demand(within, "{} bytes passed {}", other.passed, other)

    def judge(self, asked: Asked, reason: str) -> None:
        """Look whether there was a reason to fail."""
        self.demand(reason in ENDS, f"a request failed for {reason!r}")
        if reason == "expired":
            self.demand(asked.deadline <= self.now, "a request expired before its time")
        if reason == "deadlock":
            self.deadlocks += 1
            self.demand(asked.deadline == NEVER, "somebody with a deadline is sacrificed")
            holds = any(owner == asked.actor.owner for owner, _ in self.scheduler.holds())
            self.demand(holds, "somebody is sacrificed who holds nothing")

    def take(self, block: int, share: Share) -> None:
        held = Held(block, self.heap.info(block).address, self.heap.info(block).nbytes, share)
        self.demand(block not in self.held, "{} is handed out twice", held)
        for other in self.held.values():
            apart = held.address >= other.address + other.nbytes or other.address >= held.address + held.nbytes
            nested = share.arena != other.share.arena
            self.demand(apart or nested, "{} lies on {}", held, other)
        self.held[block] = held

    def hold(self, actor: Actor, blocks: Blocks) -> None:
        for block in blocks:
            self.held[block].hold = self.scheduler.hold(actor.owner, block)

    def free(self, blocks: Blocks) -> None:
        self.idle_ticks = 0
        for block in blocks:
            held = self.held.pop(block)
            self.say(f"free {held.nbytes} of {held.share.account}")
            if held.movable:
                self.stir(held)
            if held.hold:
                self.scheduler.release(held.hold)
            users = [(stream, self.heap.open_epoch(stream)) for stream in range(self.kind.streams)]
            flags = self.heap.free(block, users if self.draw.random() < 0.2 else ())
            if flags:
                self.scheduler.freed(flags, self.now)
                self.carry_out()

    # -- budgets -------------------------------------------------------------------------------------------------------

    def make_budgets(self) -> None:
        for depth in range(self.kind.depth):
            above = self.root if not depth else self.draw.choice(self.shares)
            self.add_budget(above)

    def add_budget(self, above: Share) -> Share:
        limit = max(KIB, int(above.limit * self.draw.choice([1, 0.75, 0.5, 0.25])))
        limit = -(-limit // GRANULE) * GRANULE
        account = self.heap.add_account(above.account, limit)
        self.scheduler.open_share(
            account, up=above.account, part_of=above.account, arena=above.arena, waits=above.waits,
            bypass=self.kind.bypass,
        )  # fmt: skip
        share = Share(account, above, above, above.arena, above.waits, limit)
        self.shares.append(share)
        return share

    def close_share(self, share: Share) -> None:
        """Close a budget and those inside of it."""
        self.say(f"close {share.account}")
        for inner in [one for one in self.shares if one.up is share]:
            self.close_share(inner)
        self.shares.remove(share)
        share.closed = True
        for held in self.held.values():
            if held.share is share:
                if held.movable:
                    for one in share.path():
                        if not one.closed:
                            self.scheduler.add_spillable(one.account, -held.nbytes, self.now)
                assert share.up is not None
                held.share = share.up
                if held.movable:
                    for one in held.share.path():
                        self.scheduler.add_spillable(one.account, held.nbytes, self.now)
        self.scheduler.close_share(share.account, self.now)
        self.ended_accounts.append(share.account)
        self.carry_out()

    def open_lease(self, block: int, share: Share) -> Share:
        """Make a range of its own of a block."""
        nbytes = self.held[block].nbytes
        account = self.heap.add_account(-1, nbytes)
        arena = self.heap.open_lease(block)
        outer = share if not share.closed else self.root
        self.scheduler.open_share(
            account, up=-1, part_of=outer.account, arena=arena, waits=False, bypass=self.kind.bypass
        )
        lease = Share(account, None, outer, arena, waits=False, limit=nbytes)
        self.shares.append(lease)
        return lease

    def close_lease(self, lease: Share, block: int, share: Share, left: Blocks) -> None:
        """End it; what is left inside is the share's from now on."""
        self.scheduler.release(self.held.pop(block).hold)
        self.shares.remove(lease)
        lease.closed = True
        for one in left:
            self.held[one].share = share
        flags = self.heap.close_lease(lease.arena)
        if flags:
            self.scheduler.freed(flags, self.now)
        self.scheduler.close_share(lease.account, self.now)
        self.ended_accounts.append(lease.account)
        self.carry_out()

    def close_accounts(self) -> None:
        for account in list(self.ended_accounts):
            try:
                self.heap.remove_account(account)
            except ValueError:
                continue
            self.ended_accounts.remove(account)

    # -- what others do meanwhile --------------------------------------------------------------------------------------

    def meddle(self) -> None:
        """Change something from outside."""
        if self.filling:
            return
        draw, kind = self.draw, self.kind
        ways: list[Callable[[], object]] = [
            lambda: self.resize(self.root, draw.choice([1.0, 0.75, 0.5]) * kind.limit),
            lambda: self.meddle_with(self.share()),
            lambda: self.scheduler.trim(draw.choice([0, kind.limit // 4]), self.now),
            self.cancel_somebody,
            self.cancel_somebody,
            lambda: setattr(self, "others", draw.choice([0, kind.capacity // 8])),
            lambda: self.scheduler.grow_ahead(self.now),
        ]
        draw.choice(ways)()
        self.later(draw.random() * 0.01 / kind.meddling, self.meddle)

    def meddle_with(self, budget: Share) -> None:
        if budget is self.root:
            return
        if self.draw.random() < 0.2:
            self.close_share(budget)
        else:
            self.resize(budget, budget.limit * self.draw.choice([0.5, 0.8, 1.5]))

    def cancel_somebody(self) -> None:
        if self.asked:
            self.cancel(self.draw.choice(list(self.asked.values())))

    def resize(self, share: Share, limit: float) -> None:
        nbytes = max(GRANULE, int(limit) // GRANULE * GRANULE)
        self.say(f"resize {share.account} to {nbytes}")
        share.limit = nbytes
        self.scheduler.set_limit(share.account, nbytes, self.now)
        self.carry_out()

    # -- the end -------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """All have come to their end: nothing is held, promised or lost."""
        self.demand(all(actor.over for actor in self.actors), "somebody never came to an end")
        self.demand(not self.held and not self.asked, "something is left")
        while self.busy:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.turn()
        self.demand(self.heap.live() == 0, f"{self.heap.live()} bytes are held by nobody")
        gauges = self.scheduler.gauges()
        for name in ("waiting", "waiting_bytes", "growing", "growing_bytes", "coming", "under_way"):
            self.demand(not gauges[name], f"{name} is {gauges[name]} in the end")
        self.demand(not self.scheduler.holds(), "somebody still holds something")
        self.demand(not self.ended_accounts, f"accounts {self.ended_accounts} are left")
        self.filling = True
        self.others = 0
        self.kind.trouble = 0.0
        self.kind.capacity = 1 << 40
        self.resize(self.root, self.kind.limit)
        self.scheduler.tick(self.now)
        # Every share can still be had as a whole.
        for share in self.shares if not self.shut else ():
            actor = Actor(1000 + share.account, self.fill(share))
            self.actors.append(actor)
            self.resume(actor, None)
            while not actor.over:
                self.demand(self.events, f"share {share.account} cannot be filled any more")
                self.now, _, event = heapq.heappop(self.events)
                event()
                self.turn()
            self.demand(actor.ends == [], f"share {share.account} cannot be filled any more: {actor.ends}")
        self.scheduler.drain(self.now)
        self.scheduler.trim(0, self.now)
        self.carry_out()
        while self.busy:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.turn()
        self.scheduler.trim(0, self.now)
        self.carry_out()
        while self.busy:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.turn()
        self.demand(self.heap.reserved() == 0, f"{self.heap.reserved()} bytes are still reserved")
        self.demand(not self.device and not self.mapped, f"the device still has {self.device}, {self.mapped}")

    def fill(self, share: Share) -> Steps:
        actor = self.actors[-1]
        found = yield self.ask(actor, share, min(one.limit for one in share.path()))
        if isinstance(found, list):
            self.free(found)
