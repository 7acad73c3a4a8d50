"""Accounts: who holds how much and may hold how much."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """One account; every charge goes to it and to all above it."""

    parent: int = -1
    limit: int | None = None
    inner: bool = False
    """Below none of the pool's: serves the inside of leases."""
    live: int = 0
    requested: int = 0
    peak: int = 0
    frees: int = 0
    adopted: int = 0
    hits: list[int] = field(default_factory=lambda: [0, 0, 0])
    gated: bool = False


class Ledger:
    """All accounts by number; 0 is the pool's own."""

    def __init__(self) -> None:
        self.accounts: dict[int, Account] = {0: Account()}
        self.reuse: list[int] = []
        self.gone = Account()
        self.wanted = 0

    def __getitem__(self, number: int) -> Account:
        if number not in self.accounts:
            raise ValueError("unknown account")
        return self.accounts[number]

    def lineage(self, number: int) -> Iterator[Account]:
        """Go from an account to the top."""
        while number >= 0:
            account = self[number]
            yield account
            number = account.parent

    def affordable(self, number: int, nbytes: int) -> bool:
        """Return whether no limit on the way up forbids so many bytes more."""
        return all(a.limit is None or a.live + nbytes <= a.limit for a in self.lineage(number))

    def barred(self, number: int) -> bool:
        """Return whether a gate on the way up is closed."""
        return any(account.gated for account in self.lineage(number))

    def told(self, free: int) -> bool:
        """Return whether a free that leaves so many bytes free is of interest to those who wait."""
        closed = sum(account.gated for account in self.accounts.values())
        return closed > 1 or (closed == 1 and free >= self.wanted)

    def charge(self, number: int, nbytes: int, requested: int) -> None:
        """Add live bytes."""
        for account in self.lineage(number):
            account.live += nbytes
            account.requested += requested
            account.peak = max(account.peak, account.live)

    def adopt(self, number: int, by: int) -> None:
        """Count live blocks that came from another account, or went there."""
        for account in self.lineage(number):
            account.adopted += by

    def credit(self, number: int, nbytes: int, requested: int) -> None:
        """Take live bytes off."""
        for account in self.lineage(number):
            account.live -= nbytes
            account.requested -= requested

    def count(self, number: int, level: int, by: int = 1) -> None:
        """Count grants of a level."""
        for account in self.lineage(number):
            account.hits[level - 1] += by

    def add(self, parent: int, limit: int | None) -> int:
        """Add an account and return its number."""
        number = self.reuse.pop() if self.reuse else len(self.accounts)
        self.accounts[number] = Account(parent, limit, inner=parent < 0 or self[parent].inner)
        return number

    def remove(self, number: int) -> None:
        """Remove an account that nothing hangs on."""
        gone = self[number]
        if number == 0 or gone.live or any(account.parent == number for account in self.accounts.values()):
            raise ValueError("the account is the pool's own, has live bytes, or accounts below it")
        if gone.parent < 0:
            self._add_counters(self.gone, gone)
        del self.accounts[number]
        self.reuse.append(number)

    def totals(self) -> Account:
        """Return the counters of everything that was ever granted."""
        total = Account()
        for account in (self.gone, *(a for a in self.accounts.values() if a.parent < 0)):
            self._add_counters(total, account)
        return total

    @staticmethod
    def _add_counters(total: Account, account: Account) -> None:
        total.frees += account.frees
        total.hits = [a + b for a, b in zip(total.hits, account.hits, strict=True)]
