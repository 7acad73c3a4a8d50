"""What devices with memory that other processes can open have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol, Self

from asyncmem.devices.base import Device


class Place(NamedTuple):
    """Where memory is, for other processes.

    Attributes:
        group: What the file descriptor stands for.
        fd: The descriptor, which each process is sent once for a group.
        region: What the memory is a part of; another process opens it once.
        kept: What stays until all processes that have the region say that they have closed it.
        offset: Bytes before the memory in the region.
        facts: What else another process needs to open the region.
    """

    group: object
    fd: int
    region: object
    kept: object
    offset: int
    facts: dict[str, str | int]


class Shareable(Device):
    """A device whose memory other processes can open."""

    @abstractmethod
    def place(self, address: int) -> Place:
        """Return where the memory at an address is; 0 is the address of what is empty."""

    def shareable(self) -> Self:
        """Return this very device."""
        return self


class Region(Protocol):
    """A part of another process's memory that is open here."""

    @property
    def address(self) -> int:
        """The first byte, in this process."""
        ...

    @property
    def nbytes(self) -> int:
        """How many there are."""
        ...
