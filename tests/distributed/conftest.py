"""Fixtures: a cluster in this process, which starts at once, and one of processes, which can be killed."""

import contextlib
import logging
from collections.abc import Iterator

import cloudpickle
import dask
import pytest
from distributed import Client, LocalCluster

from . import tasks

# Workers cannot import the tests, so tasks go to them as they are.
cloudpickle.register_pickle_by_value(tasks)


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of two workers in this process."""
    cluster = LocalCluster(
        n_workers=2, threads_per_worker=4, processes=False, dashboard_address=":0", silence_logs=logging.CRITICAL
    )
    with cluster, Client(cluster) as found:
        yield found


@pytest.fixture(scope="module")
def started() -> Iterator[Client]:
    """A client of two workers in processes of their own, started once.

    Some seconds after a worker was lost a cluster looks for the one that replaces it, and if none is there it never
    has one again: a test that kills a second worker must not meet that look.
    """
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"}):
        cluster = LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=":0", silence_logs=logging.CRITICAL)
        with cluster, Client(cluster) as found:
            yield found


@pytest.fixture
def processes(started: Client) -> Iterator[Client]:
    """A client of two workers in processes of their own, which have no pool before and after the test."""
    started.wait_for_workers(2)
    yield started
    with contextlib.suppress(ValueError):  # it has none
        started.unregister_worker_plugin("asyncmem")
