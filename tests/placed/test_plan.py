"""The plan: where stages go, by which links, with how much memory, and what is refused."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from asyncmem import InvalidRequest
from asyncmem.distributed.plan import Edge, Node, Plan, make_plan
from asyncmem.errors import StageLost
from asyncmem.pipeline import Stage, stage

from .network import MIB, work

CLIENT = Node(name="client", place="here", limits={"host": 256 * MIB})


def worker(name: str, place: str = "here", host: int = 256 * MIB, **others: int) -> Node:
    return Node(
        name=name, place=place, limits={"host": host, **{f"{kind}:3": nbytes for kind, nbytes in others.items()}}
    )


def test_stages_go_round_the_workers_and_links_are_the_nearest() -> None:
    """Same process, same host, elsewhere."""
    stages = [Stage(work, "decode", 1, MIB), Stage(work, "forward", 1, MIB), Stage(work, "head", 1, MIB)]
    plan = make_plan(stages, [CLIENT, worker("w0"), worker("w1", "there")])
    assert [(part.stage, part.node) for part in plan.parts[1:-1]] == [("decode", 1), ("forward", 2), ("head", 1)]
    assert [edge.kind for edge in plan.edges] == ["share", "tcp", "tcp", "share"]
    assert make_plan(stages, [CLIENT, worker("w0")]).edges[1].kind == "process"


def test_what_cannot_be_shared_goes_as_bytes() -> None:
    """Between processes of one host, too; other memory of that worker is shared nevertheless."""
    nodes = [CLIENT, *(replace(worker(name, rocm=256 * MIB), unshared=("rocm:3",)) for name in ("w0", "w1"))]
    stages = [Stage(work, f"s{number}", 1, MIB, device) for number, device in enumerate(["rocm", "rocm", None])]
    plan = make_plan(stages, nodes)
    assert [part.device for part in plan.parts] == ["host", "rocm:3", "rocm:3", "host", "host"]
    assert [edge.kind for edge in plan.edges] == ["share", "tcp", "tcp", "share"]


def test_bytes_go_by_ucx_where_both_have_it() -> None:
    """Shared memory is nearer, and a note says why a worker has none."""
    stages = [Stage(work, f"s{number}", 1, MIB) for number in range(3)]
    nodes = [CLIENT, *(Node(name=f"w{n}", place=p, limits=CLIENT.limits, ucx=True) for n, p in enumerate("aab"))]
    assert [edge.kind for edge in make_plan(stages, nodes).edges] == ["tcp", "share", "ucx", "tcp"]
    nodes[3] = Node(name="w2", limits=CLIENT.limits, note="no UCX: it is not installed")
    plan = make_plan(stages, nodes)
    assert [edge.kind for edge in plan.edges] == ["tcp", "share", "tcp", "tcp"]
    assert str(plan).splitlines()[-1] == "w2: no UCX: it is not installed"


def test_the_workers_of_a_stage_are_spread() -> None:
    """Five of them over three processes, each with edges of its own."""
    plan = make_plan([Stage(work, "decode", 5, MIB)], [CLIENT, *(worker(f"w{number}") for number in range(3))])
    assert [part.workers for part in plan.parts[1:-1]] == [2, 2, 1]
    assert len(plan.edges) == 6


def test_a_device_is_found_by_its_kind_or_name() -> None:
    """And a stage whose device nobody has is lost."""
    nodes = [CLIENT, worker("w0"), worker("w1", cuda=64 * MIB)]
    for name in ("cuda", "cuda:3"):
        part = make_plan([Stage(work, "forward", 2, MIB, name)], nodes).parts[1]
        assert (part.node, part.device, part.workers) == (2, "cuda:3", 2)
    with pytest.raises(StageLost, match="'forward' was lost at item 0: no worker has its device 'cuda:0'"):
        make_plan([Stage(work, "forward", 1, MIB, "cuda:0")], nodes)
    with pytest.raises(StageLost, match="there is no worker"):
        make_plan([Stage(work, "forward")], [CLIENT])


def test_memory_is_divided_within_the_limits() -> None:
    """Stated sizes are kept to the byte, and the rest is divided."""
    stages = [stage(credit="1 MiB", pool="16 MiB")(work), stage(credit="1 MiB")(work)]
    plan = make_plan(stages, [CLIENT, worker("w0", "", host=64 * MIB)], window=8 * MIB)
    assert [part.nbytes for part in plan.parts] == [0, 16 * MIB, 40 * MIB, 0]
    assert [edge.window for edge in plan.edges] == [8 * MIB, 0, 8 * MIB]


def test_arrays_of_gpus_need_room_on_both_hosts_and_on_the_device() -> None:
    """Over TCP they go by the host's memory, and come to the receiver's device."""
    nodes = [CLIENT, worker("w0", "a", cuda=64 * MIB), worker("w1", "b", cuda=64 * MIB)]
    stages = [stage(credit="1 MiB", device="cuda", pool="8 MiB")(work) for _ in range(2)]
    plan = make_plan(stages, nodes, window=8 * MIB)
    assert [edge.kind for edge in plan.edges] == ["tcp"] * 3
    nodes[1] = worker("w0", "a", host=12 * MIB, cuda=64 * MIB)
    with pytest.raises(InvalidRequest, match=r"limit of host on w0: .*work 8 MiB \+ edge work -> work 8"):
        make_plan(stages, nodes, window=8 * MIB)
    nodes[1:] = [worker("w0", "a", cuda=64 * MIB), worker("w1", "b", cuda=12 * MIB)]
    with pytest.raises(InvalidRequest, match="limit of cuda:3 on w1"):
        make_plan(stages, nodes, window=8 * MIB)


def test_a_plan_beyond_a_limit_is_refused_with_the_sums() -> None:
    """It says what is needed, by whom, and where."""
    stages = [stage(credit="8 MiB", pool="48 MiB")(work)]
    sums = "limit of host on w0: expected at least 72 MiB: stage work 48 MiB \\+ edge source -> work 24 MiB, got 64 MiB"
    with pytest.raises(InvalidRequest, match=sums):
        make_plan(stages, [CLIENT, worker("w0", "", host=64 * MIB)], window=24 * MIB)


def test_a_window_must_hold_an_item_and_a_pool_what_is_worked_on() -> None:
    """Or nothing would ever go on."""
    with pytest.raises(InvalidRequest, match="window: expected at least 8 MiB, an item of edge work -> results"):
        make_plan([stage(credit="8 MiB")(work)], [CLIENT, worker("w0", "")], window=4 * MIB)
    with pytest.raises(InvalidRequest, match="pool of work: expected at least 24 MiB: 3 x 8 MiB"):
        make_plan([stage(credit="8 MiB", pool="16 MiB")(work)], [CLIENT, worker("w0", "")])


def test_a_plan_is_printed_as_a_table() -> None:
    """Stage, worker, device, memory, and by which link from where with how much credit."""
    plan = make_plan([stage(credit="1 MiB", pool="8 MiB")(work)], [CLIENT, worker("tcp://a:1", "")], window=4 * MIB)
    assert [line.split() for line in str(plan).splitlines()] == [
        ["stage", "worker", "device", "at", "once", "memory", "from", "link", "window"],
        ["work", "tcp://a:1", "host", "1", "8", "MiB", "source,", "client", "tcp", "4", "MiB"],
        ["results", "client", "host", "work,", "tcp://a:1", "tcp", "4", "MiB"],
    ]


class Counted(tuple[Edge, ...]):
    """Edges that count how often one is looked at."""

    __slots__ = ()
    looks = 0

    def __iter__(self) -> Iterator[Edge]:
        for edge in super().__iter__():
            Counted.looks += 1
            yield edge

    def __getitem__(self, number: Any) -> Any:
        Counted.looks += 1
        return super().__getitem__(number)


def calls_of(stages: int) -> tuple[int, Plan]:
    """How many calls it takes to plan so many stages of ten workers each over 1,000 processes."""
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    nodes = [replace(CLIENT, place=""), *(worker(f"w{number}", "", host=1 << 40) for number in range(1000))]
    made = [Stage(work, f"s{number}", 10, MIB) for number in range(stages)]
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan = make_plan(made, nodes)
    finally:
        sys.setprofile(before)
    return calls, plan


def test_a_plan_of_thousands_takes_work_in_proportion_to_its_edges() -> None:
    """For 1,000 processes and 100 stages twice that of 50; who asks for the edges of each part looks at each once."""
    (few, _), (many, plan) = calls_of(50), calls_of(100)
    assert (len(plan.parts), len(plan.edges)) == (1002, 9920)
    assert many < 2.2 * few
    counted = Plan(plan.nodes, plan.parts, Counted(plan.edges))
    Counted.looks = 0
    assert sum(len(counted.into(part)) + len(counted.out_of(part)) for part in range(1002)) == 2 * 9920
    assert len(str(counted).splitlines()) == 9921
    assert Counted.looks == 2 * 9920
