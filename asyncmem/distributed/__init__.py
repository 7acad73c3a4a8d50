"""Pools on the workers of a Dask cluster. Needs the extra `dask`.

`plugin` opens a pool on each worker and returns it inside tasks, `preload` does so from the command line.
"""

try:
    import distributed as _distributed  # noqa: F401 -- so that one message says what to install
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name}, which asyncmem.distributed needs, is missing: pip install 'asyncmem[dask]'", name=missing.name
    ) from missing

from asyncmem.distributed.plugin import PoolPlugin, worker_pool

__all__ = ["PoolPlugin", "worker_pool"]
