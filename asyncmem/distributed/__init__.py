"""Pools and pipelines on the workers of a Dask cluster. Needs the extra `dask`.

`plugin` opens a pool on each worker and returns it inside tasks, `preload` does so from the command line; `observing`
shows their figures, and `looks` reads them for `asyncmem top`. `placed` runs a pipeline's stages on the workers, as
`plan` and `credit` decide: `runner` is a worker's side, `session` the client's, and `edges`, `frames` and `link` are
what lies between; `ucx` brings bytes by UCX.
"""

try:
    import distributed as _distributed  # noqa: F401 -- so that one message says what to install
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{missing.name}, which asyncmem.distributed needs, is missing: pip install 'asyncmem[dask]'", name=missing.name
    ) from missing

from asyncmem.distributed.placed import PlacedPipeline
from asyncmem.distributed.plan import Edge, Node, Part, Plan
from asyncmem.distributed.plugin import PoolPlugin, records, worker_pool
from asyncmem.distributed.runner import Item, current_item

__all__ = [
    "Edge",
    "Item",
    "Node",
    "Part",
    "PlacedPipeline",
    "Plan",
    "PoolPlugin",
    "current_item",
    "records",
    "worker_pool",
]
