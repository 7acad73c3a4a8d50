"""Segments straight from the driver, and page-locked host memory: one call each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncmem.devices.gpu.interface import PEER_ACCESS_ALREADY_ENABLED
from asyncmem.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncmem.devices.gpu._calls import Context
    from asyncmem.devices.gpu.driver import Driver

_PORTABLE_AND_MAPPED: Final = 3  # on ROCm that is coherent, too: behind a fence the host sees what was written


class DirectSegments:
    """Takes each segment by a call of its own. The caller makes the context current."""

    def __init__(self, driver: Driver) -> None:
        """Make nothing."""
        self._driver = driver

    def take(self, nbytes: int, stream: int) -> tuple[int, None]:
        """Take memory that every stream may use at once."""
        del stream
        return int(self._driver.call("cuMemAlloc", nbytes, asked=nbytes)), None

    def give_back(self, address: int, token: object) -> None:
        """Free a segment; the driver waits for the whole device first."""
        del token
        self._driver.call("cuMemFree", address)

    def close(self) -> None:
        """Nothing is kept."""


class PageLocked:
    """Takes host memory that every device of the process reads and writes. The caller makes the context current."""

    def __init__(self, driver: Driver) -> None:
        """Make nothing."""
        self._driver = driver

    def take(self, nbytes: int, stream: int) -> tuple[int, None]:
        """Take memory that every stream may use at once, and the host too."""
        del stream
        return int(self._driver.call("cuMemHostAlloc", nbytes, _PORTABLE_AND_MAPPED, asked=nbytes)), None

    def give_back(self, address: int, token: object) -> None:
        """Free it."""
        del token
        self._driver.call("cuMemFreeHost", address)

    def close(self) -> None:
        """Nothing is kept."""


def open_to(driver: Driver, owner: Context, peers: Sequence[Context]) -> None:
    """Let other devices use what `cuMemAlloc` gives in `owner`; the driver grants that for a whole context at once."""
    opened: list[Context] = []
    try:
        for peer in peers:
            with peer.entered():
                if _enable(driver, owner):
                    opened.append(peer)
    except BaseException:
        for peer in opened:
            with peer.entered():
                driver.call("cuCtxDisablePeerAccess", driver.home(owner))
        raise


def _enable(driver: Driver, owner: Context) -> bool:
    try:
        driver.call("cuCtxEnablePeerAccess", driver.home(owner), 0)
    except DeviceError as error:
        if error.code != PEER_ACCESS_ALREADY_ENABLED:
            raise
        return False
    return True
