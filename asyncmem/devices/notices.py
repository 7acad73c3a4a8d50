"""Calling back from a device's thread, which must outlive whatever the callback does."""

import threading
from collections.abc import Callable, Iterable


def call_all(callbacks: Iterable[Callable[[], None]]) -> None:
    """Call each of them; an error goes to `threading.excepthook` and keeps no other from being called."""
    for callback in callbacks:
        try:
            callback()
        except Exception as error:  # noqa: BLE001  # a stream whose thread ends here would hang for ever
            here = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, here)))
