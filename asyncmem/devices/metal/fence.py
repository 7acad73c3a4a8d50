"""Fences of a Metal device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncmem.devices.polled import PolledFence

if TYPE_CHECKING:
    from asyncmem.devices.metal.api import MTLSharedEvent
    from asyncmem.devices.metal.commands import Commands, Given
    from asyncmem.devices.metal.place import Place
    from asyncmem.devices.watcher import Watcher


class MetalFence(PolledFence):
    """A value of a queue's shared event.

    Attributes:
        event: For command buffers of other code: `MTLSharedEvent`.
        value: What to wait for with it.
    """

    def __init__(self, place: Place, watcher: Watcher, commands: Commands, mark: Given) -> None:
        """Use `MetalStream.record` instead."""
        super().__init__(watcher)
        self.event: MTLSharedEvent = commands.event
        self.value = mark.signals
        self.place = place
        self.commands = commands
        self._position = mark.position
        self._reached = False

    def __repr__(self) -> str:
        return f"<MetalFence of value {self.value}>"

    def done(self) -> bool:
        """Ask Metal whether the queue has come this far.

        Raises:
            DeviceError: Work that the device handed in before the fence has failed.
        """
        if not self._reached:
            self._reached = self.commands.reached(self._position)
        return self._reached

    def over(self) -> bool:
        """Tell whether there is nothing left to wait for: the point is reached, or never will be."""
        return self._reached or self.commands.over(self._position)
