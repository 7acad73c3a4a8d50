"""What a worker shows of its pool: figures in its heartbeats and for Prometheus, and records in a file."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from distributed import Worker

from asyncmem.distributed.looks import METRIC, look_of

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

_UNFIT: Final = re.compile(r"[^\w.-]+")

_changing = threading.Lock()
_showing = 0
_collector: Collector | None = None


@contextmanager
def shown(worker: Worker) -> Iterator[None]:
    """Tell the figures of this process's pools in the heartbeats of a worker, and to Prometheus at its /metrics."""
    # A heartbeat may be under way, which goes through the metrics and awaits each: it ends the worker if they change.
    worker.metrics = {**worker.metrics, METRIC: look_of}
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        worker.metrics = {name: metric for name, metric in worker.metrics.items() if name != METRIC}


def _count(change: int) -> None:
    """Count workers of this process: they have one collector, which reads all pools."""
    global _showing, _collector  # noqa: PLW0603 -- one a process
    try:
        from prometheus_client import REGISTRY

        from asyncmem.insight.prometheus import PoolCollector
    except ModuleNotFoundError:  # workers without it have no /metrics
        return
    with _changing:
        before, _showing = _showing, _showing + change
        if not before:
            with suppress(ValueError):  # the program has one already
                _collector = PoolCollector()
                REGISTRY.register(_collector)
        elif not _showing and _collector is not None:
            with suppress(KeyError):
                REGISTRY.unregister(_collector)
            _collector = None


def recording_path(folder: str, worker: Worker) -> Path:
    """Return where a worker writes its records; the folder is made."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    name = _UNFIT.sub("-", str(worker.name)).strip("-")
    return path / f"worker-{name}-{time.time_ns() // 1_000_000}.amem"
