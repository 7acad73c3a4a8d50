"""Devices by others: entry points of installed distributions. One is loaded only when its name is asked for."""

from importlib.metadata import EntryPoint, entry_points
from typing import Final

from asyncmem.devices.base import Device
from asyncmem.errors import AsyncmemError, BackendUnavailable

GROUP: Final = "asyncmem.devices"
"""The entry points' group: a name such as "toy" stands for something that is called with N for "toy:N"."""


def plugin_names() -> tuple[str, ...]:
    """Return the names that installed distributions offer (reads their metadata)."""
    return tuple(sorted({one.name for one in entry_points(group=GROUP)}))


def plugin_device(kind: str, index: int) -> Device | None:
    """Make the device of another distribution, or return None where no such name is offered (blocks).

    Raises:
        BackendUnavailable: Several distributions offer the name, or the one that does is broken.
    """
    offers = tuple(entry_points(group=GROUP, name=kind))
    if not offers:
        return None
    name = f"{kind}:{index}"
    if len(offers) > 1:
        raise BackendUnavailable(name, tried=[_origin(one) for one in offers], install="Uninstall all but one of these")
    try:
        made = offers[0].load()(index)
    except AsyncmemError:
        raise  # it says itself what is wrong
    except Exception as error:
        raise _broken(name, offers[0], f"{type(error).__name__}: {error}") from error
    if not isinstance(made, Device):
        raise _broken(name, offers[0], f"it makes a {type(made).__name__}, which is no asyncmem.devices.Device")
    return made


def _broken(name: str, offer: EntryPoint, why: str) -> BackendUnavailable:
    return BackendUnavailable(
        name, tried=(f"{_origin(offer)}: {why}",), install="Update or uninstall that distribution"
    )


def _origin(offer: EntryPoint) -> str:
    origin = offer.dist.name if offer.dist is not None else "an unknown distribution"
    return f"{offer.value!r} of {origin}"
