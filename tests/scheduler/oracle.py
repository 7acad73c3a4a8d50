"""What a history is held against: who could be served, and who could not whatever others did."""

from .model import NEVER, PLENTY, Asked, Held, Share


class Oracle:
    """A part of `World`."""

    def room(self, share: Share) -> int:
        promised = sum(one.total for one in self.growing() if one.share.within(share))
        return share.limit - self.heap.account(share.account).live - promised

    def growing(self) -> list[Asked]:
        return [one for one in self.asked.values() if self.scheduler.state(one.number) == "growing"]

    def waiting(self) -> list[Asked]:
        return [one for one in self.asked.values() if self.scheduler.state(one.number) == "waiting"]

    def let_pass(self, share: Share, waiting: list[Asked], growing: list[Asked]) -> list[Asked]:
        """Return whom a share and those inside of it let pass, as far as that is certain; first who comes first."""
        found = [one for one in waiting if one.share is share]
        for inner in self.shares:
            if inner.up is share:
                found += self.let_pass(inner, waiting, growing)
        if not found:
            return []
        found.sort(key=lambda one: one.place)
        promised = sum(one.total for one in growing if one.share.within(share))
        room = share.limit - self.heap.account(share.account).live - promised
        if self.kind.bypass < PLENTY:
            found = found[:1]  # who may overtake it depends on how many have
        return [one for one in found if one.total <= room]

    def look_for_the_forgotten(self) -> None:
        """Demand that nobody waits who fits, while nothing stands before him and nothing is under way."""
        if not self.asked or self.looking or self.scheduler.gauges()["under_way"]:
            return
        waiting = self.waiting()
        late = 0.1 if self.kind.slow_looks else 1e-6  # nobody expires before it is known whether he is served
        for one in waiting:
            self.demand(one.deadline > self.now - late, "{} waits beyond its time", one)
            self.demand(one.share.waits, "{} waits inside of a lease", one)
        growing = self.growing()
        self.demand(not growing, "somebody has memory made for him, and nothing is under way")
        for share in self.shares:
            if share.waits:
                self.look_for_the_unmoved(share, waiting)
        passing = self.let_pass(self.root, waiting, growing)
        if not passing:
            return
        hole = -1 if self.unordered else self.largest_run()
        for one in passing:
            self.demand(one.total > hole, "{} waits, with {} free in a piece", one, hole)
        head = passing[0]
        if self.kind.paged:
            used = self.heap.live() + sum(one.total for one in growing)
            self.demand(used or self.refused, f"actor {head.actor.number} waits while nothing is used")
            return
        gauges = self.scheduler.gauges()
        left = self.root.limit - self.heap.reserved() - gauges["leaving"] - gauges["coming"]
        empty = self.empty()
        if self.refused:
            self.demand(not empty, f"actor {head.actor.number} waits while {empty} bytes could go back to the device")
        else:
            enough = head.total <= left + empty
            self.demand(not enough, f"actor {head.actor.number} waits for {head.total}, which the pool could grow by")

    def look_for_the_unmoved(self, share: Share, waiting: list[Asked]) -> None:
        """Demand that memory moves where that makes room for the first one."""
        first = [one for one in waiting if one.share is share]
        for inner in self.shares:
            if inner.up is share:
                first += self.let_pass(inner, waiting, [])[:1]
        if not first:
            return
        head = min(first, key=lambda one: one.place)
        movable = sum(one.nbytes for one in self.held.values() if one.movable and one.share.within(share))
        lacking = head.total - (share.limit - self.heap.account(share.account).live)
        if share is self.root:
            waits = not movable or movable < lacking or self.refused
            self.demand(waits, "{} waits while {} bytes could move", head, movable)
        elif lacking > 0:
            self.demand(movable < lacking, "{} waits in {} while {} bytes could move", head, share.account, movable)

    def empty(self) -> int:
        """Return the bytes of segments of which nothing is held."""
        return sum(one.nbytes for one in self.heap.segments() if not one.live and one.arena < 2)

    def largest_run(self) -> int:
        """Return the longest range that is free, whoever has used it."""
        if self.kind.paged:
            return -1  # pages may be lacking anywhere
        longest = run = end = 0
        for block in self.heap.blocks():
            if block.state in {"free", "cached"} and block.arena < 2:
                run = run + block.nbytes if block.address == end and run else block.nbytes
                longest = max(longest, run)
            else:
                run = 0
            end = block.address + block.nbytes
        return longest

    def quiet(self) -> None:
        """Look for a deadlock, and judge what is found."""
        waiting = [one for one in self.waiting() if one.asleep and one.deadline == NEVER]
        stuck = self.stuck(waiting)
        before = self.deadlocks
        self.scheduler.quiet(self.now)
        self.carry_out()
        self.demand(stuck or self.deadlocks == before, "a deadlock is reported where everybody could be served")

    def stuck(self, waiting: list[Asked], *, generous: bool = False) -> list[Asked]:
        """Return who cannot be served though everybody else frees all. Generous: wherever memory lies, in any order."""
        waiting = sorted(waiting, key=lambda one: one.place)
        owners = {one.actor.owner for one in waiting}
        holds: dict[int, list[Held]] = {owner: [] for owner in owners}
        for owner, block in self.scheduler.holds():
            if owner in owners:
                holds[owner].append(self.held[block])
        while True:
            bound = [held for owner in {one.actor.owner for one in waiting} for held in holds[owner]]
            blocked: set[int] = set()
            served = None
            for one in waiting:
                full = self.blocked_at(one, bound, blocked, generous=generous)
                if full is None:
                    served = one
                    break
                blocked.add(id(full))
            if served is None:
                return waiting
            holds[served.actor.owner] = []
            waiting = [one for one in waiting if one.actor.owner != served.actor.owner]

    def blocked_at(self, one: Asked, bound: list[Held], blocked: set[int], *, generous: bool) -> Share | None:
        for share in one.share.path():
            used = sum(held.nbytes for held in bound if held.share.within(share))
            if one.total > share.limit - used:
                return share
            if not generous and id(share) in blocked and self.kind.bypass < PLENTY:
                return share
        if not generous and not self.kind.paged and not one.batch and one.total > self.longest_gap(bound):
            return self.root
        if not generous and one.batch and not self.kind.paged:
            return self.root  # it may be in pieces, and who knows
        return None

    def longest_gap(self, bound: list[Held]) -> int:
        """Return the longest range between what is held, or that could be made of the rest of the limit."""
        ranges = sorted((held.address, held.nbytes) for held in bound if held.share.arena == -1)
        kept = longest = 0
        for segment in self.heap.segments():
            if segment.arena > 1:
                continue
            inside = [one for one in ranges if segment.address <= one[0] < segment.address + segment.nbytes]
            if not inside:
                continue
            kept += segment.nbytes
            at = segment.address
            for address, nbytes in inside:
                longest = max(longest, address - at)
                at = address + nbytes
            longest = max(longest, segment.address + segment.nbytes - at)
        return max(longest, self.root.limit - kept)

    def out_of_patience(self) -> None:
        """Nothing will ever happen again: somebody waits, who must be beyond help."""
        left = [actor.number for actor in self.actors if not actor.over]
        waiting = self.waiting()
        if not waiting:  # what the device has is all held, and the pool may hope for more
            waiting = [one for one in self.growing() if one.total > self.spare() + self.empty()]
        self.demand(waiting, f"actors {left} never go on")
        asleep = [one for one in waiting if one.asleep]
        self.demand(not self.stuck(asleep, generous=True), "a deadlock is not reported")
        # Memory in pieces may keep one from being served, which the proof need not see: then one has to give way.
        self.demand(self.heap.live(), "somebody waits while nothing is held")
        self.in_pieces = True
        self.idle_ticks = 0
        self.cancel(max(waiting, key=lambda one: one.place))
