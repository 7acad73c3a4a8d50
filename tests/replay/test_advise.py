"""Advice names options of a pool, and what a replay has shown that each does."""

import ast

import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, PoolOptions
from asyncmem.options import OPTIONS
from asyncmem.replay import Advice, Model, Policy, Suggestion, Trace, advise, fit, read, replay

from .programs import MIB, MS, Program, random_program
from .support import TRACES

LATE = Model(lag=0.02)


def named(advice: Advice, name: str) -> list[Suggestion]:
    """Return what was tried of one option."""
    return [one for one in advice.suggestions if name in one.arguments]


@pytest.fixture(scope="module")
def advice() -> Advice:
    """For a program that waiting and a limit help."""
    return advise(read(TRACES / "stream_prefetch.npz"), model=LATE)


def test_each_suggestion_stands_on_those_before_it(advice: Advice) -> None:
    """What is advised changes what the next is compared with; what is not does not."""
    now = advice.before
    for one in advice.suggestions:
        assert one.before is now
        if one.helps:
            now = one.after
    assert advice.after is now
    assert advice.after.peak_reserved < advice.before.peak_reserved


def test_what_is_measured_is_what_a_replay_measures(advice: Advice) -> None:
    """The figures of the first options are those of a replay with them."""
    trace = read(TRACES / "stream_prefetch.npz")
    (segments,), (patience,) = named(advice, "segments"), named(advice, "patience")
    assert advice.before.peak_reserved == replay(trace, Policy("stream_ordered"), LATE).peak_reserved
    assert segments.arguments == {"segments": "paged"}
    assert segments.after.peak_reserved == replay(trace, Policy("paged"), LATE).peak_reserved
    assert patience.arguments == {"patience": "2%"}
    policy = Policy.parse("paged,patience=2%")
    assert patience.after.peak_reserved == replay(trace, policy, LATE).peak_reserved


def test_limits_are_tried_and_their_waits_bounded() -> None:
    """The smallest at all, and the smallest whose waits are short: both were tried, and the second is advised."""
    advice = advise(read(TRACES / "stream_prefetch.npz"), model=LATE)
    smallest, within = named(advice, "limit")
    assert smallest.after.completed
    assert smallest.after.wait_seconds > 0.02 * smallest.after.duration
    assert smallest.against == "waits are too long"
    assert within.helps
    assert within.after.wait_seconds <= 0.02 * within.after.duration
    assert within.after.peak_reserved <= within.after.limit == int(str(within.arguments["limit"]).split()[0]) * MIB


def test_the_limit_that_waits_little_is_no_smaller_than_the_smallest() -> None:
    """Where no wait is allowed at all, the program needs what it needs without a limit, or close to it."""
    trace = read(TRACES / "stream_prefetch.npz")
    smallest, patient, never = (fit(trace, model=LATE, waiting=share) for share in (1, 0.02, 0))
    assert smallest <= patient < never
    assert replay(trace, model=LATE, limit=never).waits == 0


def test_a_warm_up_is_counted_without_itself() -> None:
    """A program whose memory is all there from the start calls the driver no more, and its figures begin with it."""
    program = Program()
    for step in range(5):
        program.at(step * 100 * MS).take(f"{step}", 8 * MIB)
    one = named(advise(program.trace(), Policy("paged")), "warmup")[0]
    assert one.arguments == {"warmup": [(8 * MIB, 5)]}
    assert one.helps
    assert (one.before.misses, one.after.misses) == (5, 0)
    assert set(one.after.driver_calls) <= {"cuEventRecord"}
    assert (one.after.takes, one.after.frees) == (5, 0)
    assert one.after.duration == one.before.duration
    assert one.after.peak_reserved == one.before.peak_reserved


def test_what_gains_nothing_is_not_advised() -> None:
    """One block that lives for ever needs no other segments and no limit."""
    advice = advise(Program().take("a", 64 * MIB).trace())
    assert [one.against for one in named(advice, "segments")] == ["it saves too little"]
    assert [one.against for one in named(advice, "limit")] == ["it saves too little"]
    assert "segments" not in advice.arguments()


def test_what_costs_too_much_is_not_advised() -> None:
    """A program of no time at all pays no driver that maps a handle in ten milliseconds."""
    trace, dear = read(TRACES / "stream_prefetch.npz"), {"cuMemMap": [(2 * MIB, 10_000_000)]}
    (segments,) = named(advise(trace, model=Model(pace=0.01, costs=dear)), "segments")
    assert segments.after.peak_reserved < segments.before.peak_reserved
    assert segments.against == "the driver takes too long"


def test_the_policy_of_today_is_what_is_compared_with() -> None:
    """Its own kind is not tried, and its other settings are kept."""
    trace = random_program(1, (40_000, 3 * MIB))
    advice = advise(trace, Policy.parse("paged,small_limit=64KiB"))
    assert [one.arguments["segments"] for one in named(advice, "segments")] == ["stream_ordered"]
    assert {one.after.policy.options.small_limit for one in advice.suggestions} == {64 << 10}


def test_what_replays_take_for_granted_is_an_argument_too(advice: Advice) -> None:
    """Streams of a replay wait for each other; of a program with one stream there is nothing to say."""
    assert advice.assumed == {"overlap": 0}
    assert advise(random_program(2, (3 * MIB,), steps=50)).assumed == {}


def test_an_empty_program_gets_no_advice() -> None:
    """There is nothing to help."""
    advice = advise(Program().trace())
    assert not any(one.helps for one in advice.suggestions)
    assert advice.code() == 'from asyncmem import AsyncMemoryPool\n\npool = AsyncMemoryPool(\n    "cuda:0",\n)\n'


@pytest.mark.parametrize(
    ("name", "model", "advised"),
    [
        ("stream_prefetch", LATE, {"segments", "limit", "overlap"}),
        ("stream_prefetch", Model(lag=0.05), {"segments", "patience", "overlap"}),
        ("gpt2_train_varlen", LATE, {"segments", "warmup", "limit"}),
    ],
)
def test_the_lines_to_paste_are_the_arguments(name: str, model: Model, advised: set[str]) -> None:
    """They are a program, no line is too long, and a pool takes what they say."""
    advice = advise(read(TRACES / f"{name}.npz"), model=model)
    code = advice.code("simulated")
    assert max(map(len, code.splitlines())) <= 120
    call = ast.parse(code).body[-1]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    assert [ast.literal_eval(one) for one in call.value.args] == ["simulated"]
    given = {one.arg: ast.literal_eval(one.value) for one in call.value.keywords}
    assert given == advice.arguments()
    assert set(given) == advised
    options = PoolOptions().replace(**{name: value for name, value in given.items() if name in OPTIONS})
    assert options.segments == "paged"
    assert options.warmup == tuple(given.get("warmup", ()))


class TestWarmUp:
    """What a trace says is to be ready."""

    def test_it_is_what_was_live_at_the_peak(self) -> None:
        """Neither what was gone by then nor what came after; the largest first."""
        program = Program().take("gone", 9 * MIB).free("gone").take("a", 100).take("b", 5 * MIB).take("c", 5 * MIB)
        trace = program.take("none", 0).free("a").take("after", 50).trace()
        assert trace.warmup() == ((5 * MIB, 2), (100, 1))

    def test_it_is_no_longer_than_is_asked(self) -> None:
        """Those pairs are left that come to the most bytes."""
        trace = Program().take("a", 100).take("b", 70).take("c", 70).take("d", 3).trace()
        assert trace.warmup(2) == ((70, 2), (100, 1))
        assert trace.warmup(0) == Program().trace().warmup() == ()

    @pytest.mark.parametrize("seed", range(3))
    def test_it_comes_to_the_peak(self, seed: int) -> None:
        """All of it together is what was requested at most."""
        trace = random_program(seed, (700, 40_000, 3 * MIB), steps=500)
        pairs = np.array(trace.warmup(10_000))
        assert (pairs[:, 0] * pairs[:, 1]).sum() == trace.peak_requested

    @pytest.mark.asyncio
    async def test_a_pool_takes_it(self) -> None:
        """As an option and as a call; the program that follows misses nothing."""
        pairs = Trace.warmup(Program().take("a", 3 * MIB).take("b", 3 * MIB).trace())
        async with AsyncMemoryPool("simulated", warmup=pairs) as pool:
            await pool.wait()
            grown = pool.stats().grows
            async with pool.allocate_async(3 * MIB), pool.allocate_async(3 * MIB):
                assert pool.stats().grows == grown > 0
        async with AsyncMemoryPool("simulated") as pool:
            await pool.warmup(pairs)
            assert pool.stats().reserved_bytes >= 6 * MIB
