"""Where the simulated device's segments lie: at invented addresses, or in real memory of the host."""

from collections import defaultdict
from typing import Final, Protocol

from asyncmem.devices.pages import map_pages, unmap_pages

# High enough to be no address of this process's heap, so that touching one by mistake fails at once.
_FIRST: Final = 0x2000_0000_0000


class Addresses(Protocol):
    """Gives out ranges of addresses."""

    def take(self, nbytes: int) -> tuple[int, object]:
        """Return the address of a new range, and what `give_back` needs besides."""
        ...

    def give_back(self, address: int, nbytes: int, token: object, /) -> None:
        """Take a range back."""
        ...


class InventedAddresses:
    """Addresses with nothing behind them. A range given back is the first to be used again, as drivers do it."""

    def __init__(self, gap: int) -> None:
        """Leave `gap` bytes between ranges, so that running over the end of one is noticed."""
        self._gap = gap
        self._next = _FIRST
        self._returned: dict[int, list[int]] = defaultdict(list)

    def take(self, nbytes: int) -> tuple[int, object]:
        """Return an address."""
        if self._returned[nbytes]:
            return self._returned[nbytes].pop(), None
        address = self._next
        self._next += nbytes + self._gap
        return address, None

    def give_back(self, address: int, nbytes: int, _token: object) -> None:
        """Keep the range for the next one of its size."""
        self._returned[nbytes].append(address)


class RealAddresses:
    """Pages of the host."""

    def take(self, nbytes: int) -> tuple[int, object]:
        """Map pages."""
        return map_pages(nbytes)

    def give_back(self, _address: int, _nbytes: int, token: object) -> None:
        """Unmap them."""
        unmap_pages(token)
