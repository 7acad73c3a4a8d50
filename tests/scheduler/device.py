"""The device of a history, and all that a scheduler wants done: it takes time, and it fails."""

from collections.abc import Callable

from asyncmem.core import GRANULE, Effect

from .model import NEVER, STILL, TICK


class Executor:
    """A part of `World`: begins each effect, and tells of its end."""

    def spare(self) -> int:
        return self.kind.capacity - self.others - sum(self.device.values()) - self.mapped

    def fails(self) -> bool:
        return self.draw.random() < self.kind.trouble

    def carry_out(self) -> None:
        """Begin every effect."""
        while True:
            effects = self.scheduler.effects()
            for effect in effects:
                getattr(self, f"on_{effect.kind}")(effect)
            if not effects:
                break
        fresh, self.fresh = self.fresh, []
        for asked in fresh:
            state = "" if asked.ended else self.scheduler.state(asked.number)
            if state in {"granted", "failed"}:
                self.answer(asked)
            elif state == "ordering" or (state and self.looking):
                self.fresh.append(asked)

    def perform(self, end: Callable[[], None]) -> None:
        """Have something end later, by another thread."""
        self.busy += 1

        def done() -> None:
            self.busy -= 1
            end()

        self.soon(done)

    def on_granted(self, effect: Effect) -> None:
        asked = self.asked.get(effect.request)
        self.demand(asked is not None, "a request is granted that is over")
        assert asked is not None
        self.answer(asked)

    def on_failed(self, effect: Effect) -> None:
        asked = self.asked.get(effect.request)
        if asked is not None:
            self.answer(asked)

    def on_order(self, effect: Effect) -> None:
        if self.fails():
            self.unordered = True
            self.say(f"{effect.request} could not be ordered")
            self.scheduler.unordered(effect.request, self.now)
        else:
            self.scheduler.owed(effect.request)
            self.scheduler.ordered(effect.request, self.now)

    def on_look(self, effect: Effect) -> None:
        def look() -> None:
            for stream in effect.streams if effect.level > 1 else range(self.kind.streams):
                self.record(stream)
            self.scheduler.looked(self.poll(), self.now)

        def late() -> None:
            self.looking -= 1
            look()

        if self.kind.slow_looks:
            self.looking += 1
            self.soon(late)
        else:
            look()

    def record(self, stream: int) -> float:
        epoch = self.heap.close_epoch(stream)
        self.heap.publish(stream, epoch)
        before = max((when for when, other, _ in self.fences if other == stream), default=0.0)
        when = max(before, self.now + self.draw.choice([0.0, 1e-4, 0.02]) * self.draw.random())
        self.fences.append((when, stream, epoch))
        return when

    def poll(self) -> int:
        done = [one for one in self.fences if one[0] <= self.now]
        self.fences = [one for one in self.fences if one[0] > self.now]
        for _, stream, epoch in done:
            self.heap.mark_done(stream, epoch)
        return len(done)

    def on_grow(self, effect: Effect) -> None:
        self.say(f"grow {effect!r}")

        def end() -> None:
            if effect.returns:
                count = len(effect.returns) if not self.fails() else self.draw.randrange(len(effect.returns))
                for address, _, _ in effect.returns[:count]:
                    del self.device[address]
                if count:
                    self.refused = False
                self.scheduler.trimmed(effect.job, count, self.now)
                self.carry_out()
            if self.fails():
                self.scheduler.grow_failed(effect.job, self.now)
                self.fail_for(effect)
                return
            spare = self.spare()
            nbytes = effect.nbytes if effect.nbytes <= spare else -(-effect.need // GRANULE) * GRANULE
            if nbytes > spare:
                self.say("the device has no more")
                self.refused = True
                self.scheduler.grow_failed(effect.job, self.now, out_of_memory=True)
                return
            address = self.next_address
            self.next_address += nbytes + (1 << 21)
            self.next_address -= self.next_address % (1 << 21)
            self.device[address] = nbytes
            self.scheduler.grew(effect.job, address, nbytes, effect.stream, self.now, seconds=0.001)

        self.perform(end)

    def fail_for(self, effect: Effect) -> None:
        """An error of the device is that of the request it was for."""
        self.carry_out()
        asked = self.asked.get(effect.request)
        if asked is not None:
            self.cancel(asked)

    def on_trim(self, effect: Effect) -> None:
        self.say(f"trim {effect!r}")

        def end() -> None:
            fails = bool(effect.returns) and self.fails()
            count = len(effect.returns) if not fails else self.draw.randrange(len(effect.returns))
            for address, _, _ in effect.returns[:count]:
                del self.device[address]
            if count:
                self.refused = False
            self.scheduler.trimmed(effect.job, count, self.now)
            if fails and effect.request:
                self.fail_for(effect)

        self.perform(end)

    def on_remap(self, effect: Effect) -> None:
        self.say(f"remap {effect!r}")

        def end() -> None:
            into = list(effect.into)
            spare = self.spare()
            if effect.nbytes and spare < effect.nbytes:
                self.refused = True
                self.scheduler.remapped(effect.job, 0, 0, 0, self.now, out_of_memory=True)
                return
            moved, unmapped, mapped = len(effect.moves), len(effect.out), len(into)
            fails = self.fails()
            if fails and self.draw.random() < 0.3 and moved:
                moved, unmapped, mapped = self.draw.randrange(moved), 0, 0
            elif fails and self.draw.random() < 0.5 and unmapped:
                unmapped, mapped = self.draw.randrange(unmapped), 0
            elif fails:
                mapped = self.draw.randrange(mapped + 1)
            for (_, nbytes), to in effect.moves[:moved]:
                self.demand(
                    not any(to <= one < to + nbytes for one in self.vacated), "memory moves to where some was left"
                )
            self.vacated |= {address: nbytes for (address, nbytes), _ in effect.moves[:moved]}
            for address, nbytes in effect.out[: min(unmapped, effect.vacated)]:
                self.demand(self.vacated.pop(address, 0) == nbytes, "memory has not left an address that is unmapped")
            self.mapped -= sum(nbytes for _, nbytes in effect.out[effect.vacated : unmapped])
            self.mapped += sum(nbytes for _, nbytes in into[:mapped])
            self.scheduler.remapped(effect.job, moved, unmapped, mapped, self.now, seconds=0.001)
            if fails and effect.request:
                self.fail_for(effect)

        self.perform(end)

    def on_wait(self, effect: Effect) -> None:
        for stream, epoch in effect.uses:
            if self.heap.entry_state(stream, epoch) == 0:
                self.record(stream)
        ends = [when for when, stream, epoch in self.fences if any(stream == one for one, _ in effect.uses)]
        until = max([self.now, *ends])
        seen = until <= self.now + effect.seconds
        self.busy += 1

        def end() -> None:
            self.busy -= 1
            self.poll()
            self.scheduler.waited(effect.job, seen, self.now)

        self.later(min(until - self.now, effect.seconds), end)

    def on_settle(self, effect: Effect) -> None:
        self.perform(lambda: self.scheduler.waited(effect.job, True, self.now))

    def on_serve_from_host(self, effect: Effect) -> None:
        def end() -> None:
            if self.filling or self.draw.random() < 0.5:
                self.scheduler.ended(effect.job, self.now, "served")
            else:
                self.scheduler.ended(effect.job, self.now, "refused")

        self.perform(end)

    def on_spill(self, effect: Effect) -> None:
        self.say(f"spill {effect!r}")
        self.spill(effect)

    def on_last_resort(self, effect: Effect) -> None:
        again = effect.level < 1

        def end() -> None:
            if again:
                self.refused = False
                self.scheduler.ended(effect.job, self.now, "retry")
            else:
                asked = self.asked.get(effect.request)
                if asked is not None and asked.waits:
                    # With nothing held, only the device can be out of memory.
                    bound = self.spare() + sum(self.device.values()) + self.mapped
                    short = self.kind.capacity - self.others < asked.total + self.kind.segment or self.kind.trouble
                    self.demand(short or asked.share.closed, f"{asked} is refused; the device has {bound}")
                self.scheduler.ended(effect.job, self.now, "refused")

        self.perform(end)

    def on_deadline(self, effect: Effect) -> None:
        self.set_timer("deadline", effect.seconds, lambda: self.scheduler.expire(self.now))

    def on_quiet(self, effect: Effect) -> None:
        self.set_timer("quiet", effect.seconds, self.quiet)

    def set_timer(self, name: str, when: float, call: Callable[[], None]) -> None:
        number = self.timers[name] = self.timers.get(name, 0) + 1

        def fire() -> None:
            if self.timers[name] == number:
                call()

        if when != NEVER:
            self.later(max(0.0, when - self.now), fire)

    def on_beat(self, effect: Effect) -> None:
        del effect
        self.later(0.0, self.beat)

    def beat(self) -> None:
        self.scheduler.begin_beat()
        self.carry_out()
        pause = self.scheduler.end_beat(self.now)
        if pause is not None:
            self.later(pause, self.beat)

    def on_pressure(self, _: Effect) -> None:
        """Nobody listens."""

    def on_emptied(self, _: Effect) -> None:
        self.demand(self.heap.live() == 0, "the pool is said to hold nothing while it holds something")

    def tick(self) -> None:
        self.poll()
        self.refused = self.unordered = False
        self.scheduler.tick(self.now)
        if self.others:
            self.scheduler.offer(self.now)
        self.carry_out()
        self.idle_ticks += 1
        if self.idle_ticks > STILL:
            self.out_of_patience()
        self.later(TICK, self.tick)

    def shut_down(self) -> None:
        """Take no more requests; and fail those that wait, where the pool is closed."""
        if self.filling:
            return
        self.shut = True
        self.say(self.kind.ending)
        if self.kind.ending == "drain":
            self.scheduler.drain(self.now)
        else:
            self.scheduler.close(self.now)
        self.carry_out()
        if self.kind.ending == "close":
            queued = {self.scheduler.state(number) for number in self.asked} & {"waiting", "growing"}
            self.demand(not queued or self.looking, "somebody waits for a pool that is closed")
