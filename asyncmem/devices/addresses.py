"""Where the segments of a simulated device lie when there is no memory behind them."""

from collections import defaultdict
from typing import Final, Protocol

# High enough to be no address of this process's heap, so that touching one by mistake fails at once.
_FIRST: Final = 0x2000_0000_0000
_APART: Final = 0x0100_0000_0000
# Reserved ranges are several times as large as their device.
_FIRST_RANGE: Final = 0x0001_0000_0000_0000
_RANGES_APART: Final = 0x4000_0000_0000


class Addresses(Protocol):
    """Gives out ranges of addresses."""

    def take(self, nbytes: int) -> int:
        """Return the address of a new range."""
        ...

    def give_back(self, address: int) -> None:
        """Take a range back."""
        ...


class InventedAddresses:
    """Addresses with nothing behind them. A range given back is the first to be used again, as drivers do it."""

    def __init__(self, gap: int, number: int = 0, *, reserved: bool = False) -> None:
        """Leave `gap` bytes between ranges, so that running over the end of one is noticed.

        Devices of one machine have different numbers, and no address in common; nor have segments and reserved ranges.
        """
        self._gap = gap
        self._next = _FIRST_RANGE + number * _RANGES_APART if reserved else _FIRST + number * _APART
        self._sizes: dict[int, int] = {}
        self._returned: dict[int, list[int]] = defaultdict(list)

    def take(self, nbytes: int) -> int:
        """Return an address."""
        if self._returned[nbytes]:
            return self._returned[nbytes].pop()
        address = self._next
        self._next += nbytes + self._gap
        self._sizes[address] = nbytes
        return address

    def give_back(self, address: int) -> None:
        """Keep the range for the next one of its size."""
        self._returned[self._sizes[address]].append(address)
