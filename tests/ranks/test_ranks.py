"""Stages over several processes: the bits of one, and an end within a second for all when one of them fails."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncmem import AsyncMemoryPool, InvalidRequest
from asyncmem.errors import BackendUnavailable, RankLost
from asyncmem.pipeline.parallel import PipelineParallel
from asyncmem.ranks import Ranks
from asyncmem.ranks.peers import FAILED, Group
from tests.share.clock import Clock
from tests.share.peer import Peer, Peers

from .member import Layer, numbers_of, stages, train

pytestmark = pytest.mark.may_block  # the test waits for other processes

TWO = [range(1), range(1, 2)]
SHORT = 3
"""Micro-batches where each of their steps gets into trouble."""
SOON = 1.0
"""Seconds within which all must know of an end."""


def key() -> str:
    return secrets.token_hex()


def begin(members: Peers, owns: list[range], *more: object) -> list[Peer]:
    """Have a process for each range train its stages."""
    secret, processes = key(), [members.new() for _ in owns]
    for rank, (one, own) in enumerate(zip(processes, owns, strict=True)):
        one.tell("train", secret, rank, len(owns), own, owns[-1].stop, *more)
    return processes


def alone(count: int, *more: Any) -> Any:
    """Train all stages in this process, and return what the last run came to."""

    async def main() -> Any:
        return await train([Layer(at, count) for at in range(count)], range(count), None, *more)

    return anyio.run(main)[-1]


@pytest.mark.parametrize("schedule", ["1f1b", "eager", "gpipe"])
@pytest.mark.parametrize("owns", [TWO, [range(2), range(2, 3), range(3, 5)]], ids=["2", "3"])
def test_the_bits_are_those_of_one_process(members: Peers, owns: list[range], schedule: str) -> None:
    """Results and gradients of several runs, over two and three processes, with several stages in some of them."""
    results, gradients = alone(owns[-1].stop, [None, None], schedule)
    answers = [one.hear() for one in begin(members, owns, [None, None], schedule)]
    for run in (0, 1):
        assert [one for its in answers for one in its[run][1]] == gradients
        assert answers[-1][run][0] == results
        assert not any(its[run][0] for its in answers[:-1])


@pytest.mark.parametrize("what", ["fail", "cancel"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_run_that_ends_early_ends_everywhere(members: Peers, what: str, stage: int) -> None:
    """At each step of a stage: the others are told whose step it was, all memory is free, and the next run is right."""
    expected = alone(2, [None], "1f1b", SHORT)
    troubles = [(what, stage, step) for step in range(2 * SHORT)]
    runs = [one for trouble in troubles for one in (trouble, None)]
    answers = [one.hear() for one in begin(members, TWO, runs, "1f1b", SHORT)]
    for at in range(len(troubles)):
        own, other = answers[stage][2 * at], answers[1 - stage][2 * at]
        if what == "cancel":
            assert own == "cancelled"
            assert other[0] == f"stage {stage}"
            assert other[3] == "its process gave up the run"
        else:
            assert own == other
            assert own[0] == f"stage {stage}"
            assert "seven" in own[3]
        first, second = (its[2 * at + 1] for its in answers)
        assert (second[0], first[1] + second[1]) == expected


@pytest.mark.parametrize("step", range(2 * SHORT))
@pytest.mark.parametrize("stage", [0, 1])
def test_a_process_that_is_killed_is_named_within_a_second(members: Peers, stage: int, step: int) -> None:
    """At each step of a stage: the other raises an error with its stage, and has all of its memory back."""
    processes = begin(members, TWO, [("kill", stage, step)], "1f1b", SHORT)
    with pytest.raises(EOFError):
        processes[stage].hear()
    with Clock() as clock:
        ((name, micro_batch, forward, reason),) = processes[1 - stage].hear()
    assert clock.seconds < SOON
    assert (name, forward) == (f"stage {stage}", stage == 0)
    assert 0 <= micro_batch <= SHORT
    assert reason == f"rank {stage} (process {processes[stage].pid}) has ended"


def test_all_stages_hear_of_an_end_that_is_not_their_neighbours(members: Peers) -> None:
    """The first of three processes is killed: the last one names its stage, too."""
    processes = begin(members, [range(1), range(1, 2), range(2, 3)], [("kill", 0, 3)])
    with pytest.raises(EOFError):
        processes[0].hear()
    assert [one.hear()[0][0] for one in processes[1:]] == ["stage 0"] * 2


@pytest.mark.parametrize("more", [([None], "gpipe"), ([None], "1f1b", 5)], ids=["schedule", "micro-batches"])
def test_all_must_run_the_same(members: Peers, more: tuple[Any, ...]) -> None:
    """Else each of them is told what the other one is about to do, and nothing has begun."""
    secret, processes = key(), [members.new(), members.new()]
    processes[0].tell("train", secret, 0, 2, range(1), 2)
    processes[1].tell("train", secret, 1, 2, range(1, 2), 2, *more)
    for one in processes:
        with pytest.raises(InvalidRequest, match=r"run\(\)"):
            one.hear()


def test_each_stage_is_in_one_process(members: Peers) -> None:
    """A stage that two have, or none, is refused in all."""
    for owns in ([range(2), range(1, 2)], [range(1), range(2, 3)]):
        for one in begin(members, owns):
            with pytest.raises(InvalidRequest, match=r"pools: expected each of . stages once, in the order of ranks"):
                one.hear()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_are_those_of_the_ranks_in_their_order(members: Peers, size: int, dtype: str) -> None:
    """All get the same bits, also of a sum of sums."""
    secret, shape, processes = key(), (33, 5), [members.new() for _ in range(size)]
    for rank, one in enumerate(processes):
        one.tell("add", secret, rank, size, shape, dtype, 2)
    total = numbers_of(0, shape).astype(dtype)
    for rank in range(1, size):
        total = total + numbers_of(rank, shape).astype(dtype)
    again = total.copy()
    for _ in range(1, size):
        again = again + total
    for one in processes:
        assert one.hear() == (again.tobytes(), [size * size * (size + 1) // 2] * 7)


def test_sums_of_different_arrays_are_refused(members: Peers) -> None:
    """In all processes, by name."""
    secret, processes = key(), [members.new(), members.new()]
    for rank, one in enumerate(processes):
        one.tell("add", secret, rank, 2, (5, 5 + rank), "float32", 1)
    for one in processes:
        with pytest.raises((InvalidRequest, RankLost), match=r"arrays|has failed"):
            one.hear()


def test_who_does_not_come_is_named(members: Peers) -> None:
    """After the time that was given for it; a rank that another one has is refused."""
    first, second = members.new(), members.new()
    first.tell("meet", key(), 1, 3, 0.2, "")
    with pytest.raises(TimeoutError, match=r"rank 0, 2 did not come within 0.2 s"):
        first.hear()
    secret = key()
    first.tell("meet", secret, 0, 2, 30, "")
    name = Group(secret, 0, 2)._name(0).decode().replace("\0", "@")
    while name not in Path("/proc/net/unix").read_text():  # the first does not have that rank yet
        time.sleep(0.001)
    second.tell("meet", secret, 0, 2, 30, "")
    with pytest.raises(InvalidRequest, match="rank: expected one that no other process of this key has"):
        second.hear()
    second.tell("meet", secret, 1, 2, 30, "!")
    assert (first.hear(), second.hear()) == ("<asyncmem.ranks.Ranks: 0 of 2>", "<asyncmem.ranks.Ranks: 1 of 2>!")


def test_one_may_give_up_often_before_another_begins() -> None:
    """Each of the others' tries fails, until they have come as far; then all hear each other."""

    async def main() -> None:
        secret = key()
        groups = [Group(secret, rank, 2) for rank in (0, 1)]
        async with anyio.create_task_group() as tasks:
            for group in groups:
                tasks.start_soon(group.join, 30)
        first, second = groups
        for _ in range(5):
            first.begin()
            first.send(None, FAILED, "it gave up")
        for _ in range(5):
            second.begin()
            with pytest.raises(RankLost, match="rank 0 has failed"):
                await second.receive(0, "plan")
        for group in groups:
            group.begin()
            group.send(None, "plan", group.rank)
        assert await first.receive_all("plan") == [None, 1]
        assert await second.receive_all("plan") == [0, None]
        for group in groups:
            group.leave()

    anyio.run(main)


def test_what_cannot_be_right_is_refused() -> None:
    """At the call, with the argument's name; NCCL with what to install."""
    for arguments, name in (("", 0, 1), "key"), (("a", 2, 2), "rank"), (("a", -1, 2), "rank"), (("a", 0, 0), "size"):
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            Ranks(*arguments)
    with pytest.raises(BackendUnavailable, match="nccl4py"):
        Ranks("a", 0, 2, nccl=True)
    layers, pool = stages([Layer(at, 3) for at in range(3)]), AsyncMemoryPool("host")
    with pytest.raises(InvalidRequest, match="pools: expected a pool or a budget"):
        PipelineParallel(layers, [pool, None, pool])
    for pools in ([None] * 3, [pool, None, pool]):
        with pytest.raises(InvalidRequest, match="pools: expected pools for stages that follow each other"):
            PipelineParallel(layers, pools, link=Ranks("a", 0, 2))
