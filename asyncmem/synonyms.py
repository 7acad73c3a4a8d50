"""What other libraries call options, methods and attributes of ours, for the errors that name ours."""

from typing import Final

OPTIONS: Final = {
    "max_size": "limit", "maximum_pool_size": "limit", "maximum_size": "limit", "max_memory": "limit",
    "max_bytes": "limit", "size": "limit", "initial_pool_size": "pregrow", "initial_size": "pregrow",
    "min_size": "pregrow", "min_bytes": "pregrow", "memory_fraction": "fraction", "max_split_size": "small_limit",
    "per_process_memory_fraction": "fraction", "queue_size": "max_waiting", "max_queue": "max_waiting",
}  # fmt: skip
"""Of a pool's options."""

POOL: Final = {
    "memory_summary": "summary()", "memory_stats": "stats()", "memory_allocated": "stats().allocated_bytes",
    "memory_reserved": "stats().reserved_bytes", "used_bytes": "stats().allocated_bytes",
    "total_bytes": "stats().reserved_bytes", "free_all_blocks": "empty_cache()", "set_limit": "resize(limit=...)",
    "reset_peak_memory_stats": "reset_peaks()", "malloc": "allocate(size)", "alloc": "allocate(size)",
    "acquire": "allocate_async(size)", "getconn": "allocate_async(size)", "free": "free() of the buffer",
    "deallocate": "free() of the buffer", "release": "free() of the buffer",
}  # fmt: skip
"""Of the methods of pools, budgets and leases."""

BUFFER: Final = {
    "record_stream": "use_on(stream)", "size": "nbytes", "is_freed": "alive", "home": "stream", "data_ptr": "address",
    "ptr": "address", "handle": "address", "gpudata": "address",
    "close": "free()", "release": "free()", "deallocate": "free()", "get": "copy_to(host)", "set": "copy_from(host)",
    "copy_to_host": "copy_to(host)", "copy_from_host": "copy_from(host)",
}  # fmt: skip
"""Of a buffer's methods and attributes."""


class Elsewhere:
    """An attribute that is not here: reading it raises the error that says what to use.

    A `__getattr__` would do the same, and would cost each call of a method of that class half a hit: the interpreter
    looks such a class's methods up anew each time.
    """

    def __init__(self, name: str, ours: str) -> None:
        """Take the name, and what to use instead."""
        self._name, self._ours = name, ours
        self.__doc__ = f"Not here: use {ours}."

    def __get__(self, thing: object, kind: type) -> object:
        """Raise the error."""
        text = f"{kind.__name__!r} object has no attribute {self._name!r}: use {self._ours}"
        raise AttributeError(text, name=self._name, obj=kind if thing is None else thing)
