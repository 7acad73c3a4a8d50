"""What a device's author gives to the contract suite."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from asyncmem.devices import Device, Stream

MIB = 1 << 20
SOON = 30.0  # seconds, for what needs nothing else to happen
MOMENT = 0.02  # seconds in which what would happen by itself happens, on most machines


@dataclass(frozen=True)
class Rig:
    """A device under test, and a way to keep its streams busy."""

    device: Device
    """Nobody else's, with at least 32 MiB free."""
    occupy: Callable[[Stream], None]
    """Gives a stream work that ends with `release`, or after some tenths of a second where it cannot be told to."""
    release: Callable[[], None]
    """Lets all work end. It is called again when nothing is left to release."""


class Rigged:
    """Tests that are given a `rig` by the class that takes them over."""

    @pytest.fixture
    def device(self, rig: Rig) -> Device:
        """The device alone, for tests that keep no stream busy."""
        return rig.device
