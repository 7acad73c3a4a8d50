"""What actors do: their programs, and the memory of theirs that may move to the host."""

from collections.abc import Callable

from asyncmem.core import Effect

from .model import Actor, Blocks, Held, Share, Steps


class Programs:
    """A part of `World`."""

    def programs(self) -> list[Callable[[Actor], Steps]]:
        return [
            self.plain, self.plain, self.nested, self.nested, self.batch, self.hurried, self.caller, self.leaser,
            self.mover, self.dropping,
        ]  # fmt: skip

    def priority(self) -> int:
        return 0 if self.kind.flat else self.draw.choice([0, 0, 0, 1, -1])

    def share(self) -> Share:
        shares = [one for one in self.shares if one.arena == -1 and not one.closed]
        return self.draw.choice(shares)

    def rounds(self) -> range:
        return range(self.kind.rounds)

    def plain(self, actor: Actor) -> Steps:
        """One block at a time."""
        owns = self.draw.random() < 0.5
        for _ in self.rounds():
            share = self.share()
            found = yield self.ask(actor, share, self.size(share), priority=self.priority())
            if isinstance(found, list):
                if owns:
                    self.hold(actor, found)
                yield self.sleep(actor, self.pause())
                self.free(found)

    def nested(self, actor: Actor) -> Steps:
        """Asks for more while it holds some: what deadlocks are made of."""
        for _ in self.rounds():
            taken: Blocks = []
            for _ in range(self.draw.randrange(2, 4)):
                share = self.share()
                found = yield self.ask(actor, share, self.size(share))
                if not isinstance(found, list):
                    break
                self.hold(actor, found)
                taken += found
                yield self.sleep(actor, self.pause())
            self.draw.shuffle(taken)
            self.free(taken)
            yield self.sleep(actor, self.pause())

    def batch(self, actor: Actor) -> Steps:
        """Several blocks at once."""
        for _ in self.rounds():
            share = self.share()
            sizes = [max(1, self.size(share) // 4) for _ in range(self.draw.randrange(1, 5))]
            found = yield self.ask(actor, share, sizes)
            if isinstance(found, list):
                self.hold(actor, found)
                yield self.sleep(actor, self.pause())
                self.free(found)

    def hurried(self, actor: Actor) -> Steps:
        """With deadlines, and holding what it has meanwhile."""
        taken: Blocks = []
        for _ in self.rounds():
            share = self.share()
            timeout = self.draw.choice([0.0, 1e-3, 0.02, 0.3]) * self.draw.random()
            effort = "all" if timeout else "tidy"
            found = yield self.ask(actor, share, self.size(share), timeout=timeout, effort=effort)
            if isinstance(found, list):
                taken += found
            yield self.sleep(actor, self.pause())
            if self.draw.random() < 0.5:
                self.free(taken)
                taken = []
        self.free(taken)

    def caller(self, actor: Actor) -> Steps:
        """A thread that calls: at once, for a while, or only where nothing has to be done for it."""
        for _ in self.rounds():
            share = self.share()
            kind = self.draw.randrange(3)
            if kind == 0:
                found = yield self.ask(actor, share, self.size(share), calls=True, waits=False)
            elif kind == 1:
                timeout = 0.2 * self.draw.random()
                found = yield self.ask(actor, share, self.size(share), calls=True, timeout=timeout)
            else:
                found = yield self.ask(actor, share, self.size(share), calls=True, effort="take")
            if isinstance(found, list):
                yield self.sleep(actor, self.pause())
                self.free(found)

    def leaser(self, actor: Actor) -> Steps:
        """Takes a range, and blocks inside of it."""
        for _ in self.rounds():
            share = self.share()
            found = yield self.ask(actor, share, self.size(share))
            if not isinstance(found, list) or not found:
                continue
            self.hold(actor, found)
            lease = self.open_lease(found[0], share)
            taken: Blocks = []
            yield from self.inside(actor, lease, taken)
            if self.draw.random() < 0.7:  # else it is freed after the lease has ended
                self.free(taken)
                taken = []
            self.close_lease(lease, found[0], share, taken)
            yield self.sleep(actor, self.pause())
            self.free(taken)

    def inside(self, actor: Actor, lease: Share, taken: Blocks) -> Steps:
        """Ask inside of a lease, and of a budget there."""
        places = [lease]
        if self.draw.random() < 0.5:
            places.append(self.add_budget(lease))
        for _ in range(self.draw.randrange(4)):
            size = max(1, int(lease.limit * self.draw.random() * 0.6))
            found = yield self.ask(actor, self.draw.choice(places), size)
            if isinstance(found, list):
                taken += found
            yield self.sleep(actor, self.pause())
            if taken and self.draw.random() < 0.3:
                self.free([taken.pop()])
        for budget in places[1:]:
            self.close_share(budget)

    def mover(self, actor: Actor) -> Steps:
        """Has memory that may move to the host while it sleeps, and brings it home to use it."""
        share = self.share()
        size = self.size(share)
        found = yield self.ask(actor, share, size)
        for _ in self.rounds():
            if not isinstance(found, list) or not found:
                return
            held = self.held[found[0]]
            self.rest(held)
            yield self.sleep(actor, self.pause())
            while held.leaving:
                yield self.sleep(actor, 1e-3)
            if self.held.get(held.block) is held:
                self.stir(held)
            else:
                share = share if not share.closed else self.root
                found = yield self.ask(actor, share, size)
        if isinstance(found, list):
            self.free(found)

    def dropping(self, actor: Actor) -> Steps:
        """Is soon tired of waiting."""
        for _ in self.rounds():
            share = self.share()

            def tire(actor: Actor = actor) -> None:
                if actor.asked is not None:
                    self.cancel(actor.asked)

            self.later(self.pause(), tire)
            found = yield self.ask(actor, share, self.size(share), asleep=self.draw.random() < 0.5)
            if isinstance(found, list):
                self.free(found)

    def rest(self, held: Held) -> None:
        held.movable = True
        self.count_movable(held, held.nbytes)

    def stir(self, held: Held) -> None:
        if held.movable:
            held.movable = False
            self.count_movable(held, -held.nbytes)

    def count_movable(self, held: Held, nbytes: int) -> None:
        for share in held.share.path():
            if not share.closed:
                self.scheduler.add_spillable(share.account, nbytes, self.now)
        self.carry_out()

    def spill(self, effect: Effect) -> None:
        share = next(one for one in self.shares if one.account == effect.account)
        needed = effect.nbytes
        chosen = []
        for held in self.held.values():
            if needed > 0 and held.movable and held.share.within(share):
                chosen.append(held)
                needed -= held.nbytes
        for held in chosen:
            self.stir(held)
            held.leaving = True

        def end() -> None:
            for held in chosen:
                held.leaving = False
                if self.held.get(held.block) is held:
                    self.free([held.block])
            self.scheduler.ended(effect.job, self.now)

        self.perform(end)
