"""The compiled scheduler serves the same requests in the same order as its rules, written down in plain Python, do."""

import random
from typing import Final

import pytest

from asyncmem.core import Heap, Scheduler

from .reference import ReferenceScheduler, ReferenceShare

PIECE: Final = 4096
EACH: Final = 50
STEPS: Final = 80


class History:
    """The same events for both. All is asked for in pieces of one size, so memory is a number of bytes here, too."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.limit = draw.choice([8, 64, 200]) * PIECE
        self.bypass = draw.choice([0.0, 0.25, 1.0, 2.0])
        self.sizes = draw.choice([(1.0, 1.0), (0.001, 1.0), (0.05, 0.3)])
        self.urgency = draw.choice([0, 1, 3])
        self.heap = Heap()
        self.scheduler = Scheduler(
            self.heap, 0.0, limit=self.limit, limited=True, granularity=PIECE, bypass=self.bypass
        )
        self.reference = ReferenceScheduler(self.limit, self.bypass)
        self.shares: list[tuple[int, ReferenceShare]] = [(0, self.reference.root)]
        self.waiting: dict[int, tuple[ReferenceShare, int]] = {}
        self.held: list[tuple[list[int], ReferenceShare, int]] = []
        self.served: list[int] = []
        self.refused: list[int] = []
        self.heap.add_segment(1 << 40, self.limit, 0, 0)
        for _ in range(draw.randrange(4)):
            self.open_budget()

    def open_budget(self) -> None:
        account, up = self.draw.choice(self.shares)
        limit = whole(up.limit * self.draw.uniform(0.2, 1.2))
        inner = self.heap.add_account(account, limit)
        self.scheduler.open_share(inner, up=account, part_of=account, bypass=self.bypass)
        self.shares.append((inner, self.reference.open_share(limit, up)))

    def play(self) -> None:
        for number in range(1, STEPS):
            self.draw.choice([self.submit, self.submit, self.submit, self.free, self.free, self.cancel, self.resize])()
            assert self.served == self.reference.served, f"step {number}"
            assert sorted(self.refused) == sorted(self.reference.refused), f"step {number}"
            assert set(self.waiting) == {one.name for one in self.reference.waiting}, f"step {number}"
            self.scheduler.check()

    def submit(self) -> None:
        account, share = self.draw.choice(self.shares)
        least, most = self.sizes
        nbytes = whole(share.limit * least * (most / least) ** self.draw.random())
        priority = self.draw.randint(-self.urgency, self.urgency)
        name = self.scheduler.submit([PIECE] * (nbytes // PIECE), 0.0, account=account, priority=priority)
        self.waiting[name] = share, nbytes
        if self.scheduler.leave_to(name) in {"granted", "failed"}:
            self.end(name)
        self.carry_out()
        self.reference.submit(name, share, nbytes, priority)

    def free(self) -> None:
        if self.held:
            blocks, share, nbytes = self.held.pop(self.draw.randrange(len(self.held)))
            self.scheduler.freed(self.heap.free_many(blocks), 0.0)
            self.carry_out()
            self.reference.free(share, nbytes)

    def cancel(self) -> None:
        if self.waiting:
            name = self.draw.choice(sorted(self.waiting))
            del self.waiting[name]
            assert self.scheduler.cancel(name, 0.0)
            self.scheduler.forget(name)
            self.carry_out()
            self.reference.cancel(name)

    def resize(self) -> None:
        account, share = self.draw.choice(self.shares)
        limit = whole(share.limit * self.draw.choice([0.5, 0.9, 1.1, 2.0]))
        if account:
            self.scheduler.set_limit(account, limit, 0.0)
            self.carry_out()
            self.reference.set_limit(share, limit)

    def carry_out(self) -> None:
        while effects := self.scheduler.effects():
            for effect in effects:
                if effect.kind in {"granted", "failed"} and effect.request in self.waiting:
                    self.end(effect.request)
                elif effect.kind == "look":
                    self.scheduler.looked(0, 0.0)
                else:
                    assert effect.kind in {"failed", "deadline", "quiet", "pressure", "last_resort"}, effect

    def end(self, name: int) -> None:
        share, nbytes = self.waiting.pop(name)
        if self.scheduler.state(name) == "failed":
            self.refused.append(name)
            self.scheduler.forget(name)
            return
        self.served.append(name)
        self.held.append((self.scheduler.claim(name), share, nbytes))


def whole(nbytes: float) -> int:
    """Return a number of pieces, at least one, in bytes."""
    return max(1, int(nbytes // PIECE)) * PIECE


@pytest.mark.parametrize("first", range(0, 1000, EACH))
def test_the_order_is_that_of_the_rules(first: int) -> None:
    """In random histories of requests, priorities, budgets, frees, cancellations and limits."""
    for seed in range(first, first + EACH):
        History(seed).play()


def histories_agree() -> bool:
    try:
        for seed in range(200):
            History(seed).play()
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("rule", "instead"),
    [("_allowance", 1 << 60), ("_allowance", 0), ("_comes_to", True)],
    ids=["no end to overtaking", "no overtaking", "full budgets hold others up"],
)
def test_a_broken_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, rule: str, instead: object) -> None:
    """Another rule serves others."""
    monkeypatch.setattr(ReferenceScheduler, rule, lambda *_: instead)
    assert not histories_agree()
