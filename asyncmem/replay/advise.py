"""Which options would have helped a recorded program: each is tried by a replay, and none is guessed."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from textwrap import fill, indent
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from asyncmem.figures import format_count, format_size
from asyncmem.readers import Patience
from asyncmem.replay.columns import Op
from asyncmem.replay.model import IMPATIENT, Model, Policy
from asyncmem.replay.run import PAGE, Replay, fit, replay
from asyncmem.replay.trace import Trace
from asyncmem.text import to_json

POOLED: Final = ("paged", "stream_ordered")
"""The kinds of segments to try. The third, "direct", is for suspicion."""

POOLING: Final = ("cuda", "rocm", "simulated")
"""The kinds of devices that have them."""

WORTH: Final = 0.005
"""What an option must save of what is reserved."""

DRIVER: Final = 0.03
"""The share of the program's time that the driver may take for it."""

WAITING: Final = 0.02
"""The share of its time that the program may wait for it."""

_MIB: Final = 1 << 20
_WIDTH: Final = 104


@final
@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One option that was tried.

    Attributes:
        arguments: What a pool is told, by the names of `PoolOptions`.
        before: The replay without it, with all that was found to help before.
        after: The replay with it.
        against: Why it is not advised; empty where it is.
    """

    arguments: Mapping[str, object]
    before: Replay
    after: Replay
    against: str = ""

    @property
    def helps(self) -> bool:
        """Whether it is advised."""
        return not self.against

    def __str__(self) -> str:
        return ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())


@final
@dataclass(frozen=True, kw_only=True)
class Advice:
    """What would have helped one program.

    Attributes:
        before: The replay of the program as it was.
        suggestions: What was tried, in its order.
        after: The replay with all that helps together.
        assumed: What these replays take for granted, as arguments of a pool: streams rather wait for each other than
            have memory of their own.
        device: The device that the program ran on.
    """

    before: Replay
    suggestions: tuple[Suggestion, ...]
    after: Replay
    assumed: Mapping[str, object]
    device: str = "cuda:0"

    def arguments(self) -> dict[str, object]:
        """Return the arguments of a pool that has all that helps, and what was taken for granted."""
        helping = (one.arguments for one in self.suggestions if one.helps)
        return {name: value for some in (*helping, self.assumed) for name, value in some.items()}

    def code(self, device: str | None = None, given: Mapping[str, object] | None = None) -> str:
        """Return lines of Python that make such a pool, on its device or another.

        Args:
            device: The name of another one.
            given: Arguments that the program's pool has now; what is advised replaces them.
        """
        arguments = {**(given or {}), **self.arguments()}
        told = [_literal(device or self.device), *(f"{name}={_literal(value)}" for name, value in arguments.items())]
        lines = "".join(f"    {one},\n" for one in told)
        return f"from asyncmem import AsyncMemoryPool\n\npool = AsyncMemoryPool(\n{lines})\n"


@dataclass
class _Trial:
    """What was found so far: the best policy, whether to warm up, and the replay of that."""

    trace: Trace
    model: Model
    policy: Policy
    now: Replay
    warm: bool = False
    found: list[Suggestion] = field(default_factory=list)

    def note(self, arguments: Mapping[str, object], after: Replay, against: str) -> bool:
        """Keep a trial, and continue from it unless something speaks against it."""
        self.found.append(Suggestion(arguments=arguments, before=self.now, after=after, against=against))
        if not against:
            self.now = after
        return not against


def advise(trace: Trace, policy: Policy | None = None, model: Model | None = None, *, device: str = "cuda:0") -> Advice:
    """Try what could help a program, one after another, and keep what does.

    That is another kind of segments; to let growth wait (`patience`) where memory comes by pages; to have memory ready
    from the start (`warmup`); and a `limit`, the smallest under which the program completes and waits for at most 2 %
    of its time. An option is advised where it saves half a percent of what is reserved and the driver takes no more
    than 3 % of the time for it; a warm-up, where the driver is called less. What each does is measured on top of those
    that were found to help before it.

    Args:
        trace: What the program did.
        policy: How it gets memory now; None for segments of a pool of the driver's.
        model: What the device is like; None for an H200 that is never late.
        device: The name of the device. Segments of a kind that it does not have are not tried.
    """
    policy, model = policy or Policy.parse("stream_ordered"), model or Model()
    before = replay(trace, policy, model)
    trial = _Trial(trace, model, policy, before)
    if device.partition(":")[0] in POOLING:
        _try_policies(trial)
    _try_warmup(trial)
    _try_limit(trial)
    assumed = {"overlap": 0} if trace.streams > 1 else {}
    return Advice(before=before, suggestions=tuple(trial.found), after=trial.now, assumed=assumed, device=device)


def _try_policies(trial: _Trial) -> None:
    for arguments, policy in _policies(trial):
        after = replay(trial.trace, policy, trial.model)
        if trial.note(arguments, after, _against(trial.now, after)):
            trial.policy = policy


def _policies(trial: _Trial) -> Iterator[tuple[Mapping[str, object], Policy]]:
    """Yield policies to try, each based on the best so far."""
    for kind in [one for one in POOLED if one != trial.policy.segments]:
        yield {"segments": kind}, replace(trial.policy, segments=kind, text="")
    if trial.policy.segments == "paged" and trial.model.lag and trial.policy.patience == IMPATIENT:
        yield {"patience": f"{WAITING:.0%}"}, replace(trial.policy, patience=Patience(share=WAITING), text="")


def _try_warmup(trial: _Trial) -> None:
    pairs = trial.trace.warmup()
    if not pairs:
        return
    after = _warmed(trial, None)
    against = ""
    if _calls(after) >= _calls(trial.now):
        against = "the driver is called as often"
    elif after.peak_reserved > trial.now.peak_reserved * (1 + WORTH):
        against = "more is reserved"
    trial.warm = trial.note({"warmup": list(pairs)}, after, against)


def _try_limit(trial: _Trial) -> None:
    if not trial.trace.peak_requested:
        return
    # What was allocated before the program began stays where it is: with it the program fits another limit.
    whole = _warm_traces(trial.trace, trial.model)[1] if trial.warm else trial.trace
    smallest = fit(whole, trial.policy, trial.model)
    within = fit(whole, trial.policy, trial.model, waiting=WAITING)
    for limit in sorted({_in_pages(smallest), _in_pages(within)}):
        after = _warmed(trial, limit) if trial.warm else replay(trial.trace, trial.policy, trial.model, limit=limit)
        if trial.note({"limit": f"{limit // _MIB} MiB"}, after, _against(trial.now, after)):
            return


def _against(before: Replay, after: Replay) -> str:
    if not after.completed:
        return "it runs out of memory"
    if after.peak_reserved >= before.peak_reserved * (1 - WORTH):
        return "it saves too little"
    if after.driver_seconds > max(DRIVER * after.duration, before.driver_seconds):
        return "the driver takes too long"
    return "waits are too long" if after.wait_seconds > WAITING * after.duration else ""


def _calls(one: Replay) -> int:
    return sum(one.driver_calls.values())


def _in_pages(limit: int) -> int:
    # What is no whole page cannot be used; a program that needs less than one gets one.
    return max(limit - limit % PAGE, PAGE)


def _warmed(trial: _Trial, limit: int | None) -> Replay:
    """Replay the program behind its warm-up, and leave out what the driver did for that."""
    warm, whole = _warm_traces(trial.trace, trial.model)
    alone = replay(warm, trial.policy, trial.model, limit=limit)
    after = replay(whole, trial.policy, trial.model, limit=limit)
    calls = {call: number - alone.driver_calls.get(call, 0) for call, number in after.driver_calls.items()}
    return replace(
        after,
        duration=trial.trace.duration * trial.model.pace,
        failed_row=None if after.failed_row is None else after.failed_row - len(warm),
        takes=after.takes - alone.takes,
        frees=after.frees - alone.frees,
        misses=after.misses - alone.misses,
        driver_calls={call: number for call, number in calls.items() if number},
        driver_seconds=after.driver_seconds - alone.driver_seconds,
    )


def _warm_traces(trace: Trace, model: Model) -> tuple[Trace, Trace]:
    """Return the warm-up by itself, and with the program behind it once the device is done with it."""
    sizes = np.array([size for size, count in trace.warmup() for _ in range(count)], np.int64)
    gap_us = math.ceil((model.lag * 1e6 + 2000) / model.pace) if model.pace else 0
    twice, kept = np.zeros(2 * sizes.size, np.int64), trace.op <= Op.FREE
    op = np.repeat([Op.ALLOCATE, Op.FREE], sizes.size)
    warm: list[NDArray[Any]] = [op, twice, np.tile(np.arange(sizes.size), 2), np.tile(sizes, 2), twice]
    whole = [
        np.append(first, np.asarray(column)[kept] + later)
        for first, column, later in zip(warm, trace.columns, (0, 0, sizes.size, 0, gap_us), strict=True)
    ]
    return Trace(*warm, name=trace.name), Trace(*whole, name=trace.name)


def _short(value: object) -> str:
    if isinstance(value, list):
        nbytes = sum(size * count for size, count in value)
        return f"[{format_count(len(value), 'size')}, {format_size(nbytes)}]"
    return _literal(value)


def _literal(value: object) -> str:
    if isinstance(value, list):
        pairs = fill(", ".join(f"({size},\0{count})" for size, count in value) + ",", _WIDTH).replace("\0", " ")
        return "[\n" + indent(pairs, " " * 8) + "\n    ]"
    return to_json(value) if isinstance(value, str) else repr(value)
