"""Plans, credit and order over a virtual network: nothing locks up, whatever is placed where and whatever fails."""

import os

import pytest

from asyncmem.distributed.credit import Inbox
from asyncmem.distributed.plan import Node
from asyncmem.pipeline import Stage

from .network import MIB, Network, Stuck, play, work

SEEDS = range(int(os.environ.get("ASYNCMEM_NETWORKS", "40")))


def test_random_pipelines_with_faults_come_to_their_end() -> None:
    """Up to 1,000 workers and 100 stages; each item comes out in order, with a message of control an edge at most."""
    counts = play(SEEDS)
    assert counts["done"] >= 0.8 * len(SEEDS)
    assert counts["epochs"] > counts["done"]


def three_stages(*, one_window: bool) -> Network:
    """Stages one and three on one worker, and stage two on another, with room for two items on each edge."""
    limits = {"host": 64 * MIB}
    nodes = [Node(name=name, limits=limits) for name in ("client", "w0", "w1")]
    stages = [Stage(work, name, 1, 4 * MIB) for name in ("one", "two", "three")]
    network = Network(5, stages, nodes, items=100, window=8 * MIB + 4096, one_window=one_window)
    assert [part.node for part in network.plan.parts] == [0, 1, 2, 1, 0]
    return network


def test_stages_one_and_three_on_one_worker_do_not_lock_each_other_out() -> None:
    """A window for each edge keeps room for stage three, whatever comes for stage one."""
    assert three_stages(one_window=False).run().delivered == list(range(100))


def test_one_window_for_all_edges_of_a_worker_locks_up() -> None:
    """The simulation sees what windows are for: shared among the edges of a worker, they are all stage one's."""
    with pytest.raises(Stuck):
        three_stages(one_window=True).run()


def test_any_order_locks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees what the order is for, too: workers that take what is there first keep the room of what is due."""
    in_order = Inbox[object].get

    def get_any(self: Inbox[object]) -> object:
        if self._step == 1:  # results are handed out in order all the same
            return in_order(self)
        return next((queue.popleft()[1] for queue in self._queues if queue), None)

    monkeypatch.setattr(Inbox, "get", get_any)
    limits = {"host": 64 * MIB}
    nodes = [Node(name=name, limits=limits) for name in ("client", *(f"w{number}" for number in range(9)))]
    stages = [Stage(work, "one", 7, 4 * MIB), Stage(work, "two", 2, 4 * MIB)]
    with pytest.raises(Stuck):  # noqa: PT012  # one of them does
        for seed in range(50):
            Network(seed, stages, nodes, items=100, window=4 * MIB + 2048).run()
