"""What only files of records and pictures need, and how to get it."""

from importlib.util import find_spec


def need_msgspec(purpose: str) -> None:
    """Make sure that msgspec is there.

    Raises:
        ModuleNotFoundError: It is not; the text says how to install it.
    """
    if find_spec("msgspec") is None:
        raise ModuleNotFoundError(f"{purpose} needs msgspec: pip install 'asyncmem[insight]'", name="msgspec")


def need_bokeh(purpose: str) -> None:
    """Make sure that Bokeh is there.

    Raises:
        ModuleNotFoundError: It is not; the text says how to install it.
    """
    if find_spec("bokeh") is None:
        raise ModuleNotFoundError(f"{purpose} needs bokeh: pip install 'asyncmem[pictures]'", name="bokeh")
