"""What only files of records need, and how to get it."""

from importlib.util import find_spec


def need_msgspec(purpose: str) -> None:
    """Make sure that msgspec is there.

    Raises:
        ModuleNotFoundError: It is not; the text says how to install it.
    """
    if find_spec("msgspec") is None:
        raise ModuleNotFoundError(f"{purpose} needs msgspec: pip install 'asyncmem[insight]'", name="msgspec")
