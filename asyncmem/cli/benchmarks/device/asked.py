"""What is asked of asyncmem on a card, and whether one run shows it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

from asyncmem.cli.benchmarks.device.measured import Measured
from asyncmem.cli.benchmarks.peers.family import OURS

Found: TypeAlias = dict[tuple[str, str, str], Measured]
"""Everything that was measured, by row, case and peer."""
Held: TypeAlias = Callable[[Measured, Found], float | None]
"""Reads what is held against a bound; None where the run has not measured it."""

LEAST: Final = "at least"
MOST: Final = "at most"

BESIDE_HIT: Final = 1.1
"""How many times `hit` a large block may cost; what is above one is for the noise."""


def times_ours(one: Measured, found: Found) -> float | None:
    """Answer how many times asyncmem's figure this one is; asyncmem's in the same process, where there is one."""
    if one.beside is not None:
        return one.min / one.beside
    ours = found.get((one.row, one.case, OURS))
    return None if ours is None or ours.min <= 0 else one.min / ours.min


def _itself(one: Measured, found: Found) -> float | None:
    _ = found
    return one.min


def _figure(name: str) -> Held:
    def held(one: Measured, found: Found) -> float | None:
        _ = found
        value = one.figures.get(name)
        return None if value is None else float(value)

    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One bound."""

    row: str
    peer: str
    bound: float
    case: str | None = None
    """The case it is about; None for every one of the row."""
    sense: str = LEAST
    """Whether the bound is the least or the most that is asked for."""
    held: Held = times_ours

    def concerns(self, one: Measured) -> bool:
        """Tell whether it is about this figure."""
        return (self.row, self.peer) == (one.row, one.peer) and self.case in (None, one.case)


ASKED: Final = (
    Asked(row="hit", peer="CuPy pool", bound=6),
    Asked(row="hit", peer="torch raw", bound=6),
    Asked(row="hit", peer="torch.empty", bound=20),
    Asked(row="churn", peer="CuPy pool", bound=5),
    Asked(row="churn", peer="torch raw", bound=5),
    Asked(row="batch", peer="torch.empty", bound=20),
    *(
        Asked(row="large", case=case, peer=OURS, bound=BESIDE_HIT, sense=MOST, held=_figure("to_other"))
        for case in ("16 MiB", "1 GiB", "random, 1 live", "random, 8 live")
    ),
    Asked(row="cross_stream", peer="cuMemAllocAsync", bound=3),
    Asked(row="streams", case="reserved ÷ live", peer=OURS, bound=2, sense=MOST, held=_itself),
    Asked(row="streams", case="time", peer=OURS, bound=1.05, sense=MOST, held=_figure("to_torch")),
    Asked(row="loop_stall", peer=OURS, bound=150_000, sense=MOST, held=_figure("more_ns")),
    *(
        Asked(row="take_back", case=case, peer=OURS, bound=1.02, sense=MOST, held=_figure("to_floor"))
        for case in ("256 MiB a time", "2 GiB a time")
    ),
    *(Asked(row="replay", peer=peer, bound=1) for peer in ("torch raw", "CuPy pool")),
    *(
        Asked(row=row, peer=peer, bound=bound)
        for row, bound in {
            "same_size": 1.43,
            "large_tensors": 3.92,
            "transformer_step": 1.89,
            "pressure": 4.83,
            "variable_sizes": 0.83,
        }.items()
        for peer in ("torch.empty", "torch raw")
    ),
)
"""All bounds. For the last five rows they are what others published against PyTorch; ours are to be met or beaten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the result: what was measured, beside asyncmem, and what was asked."""

    measured: Measured
    ratio: float | None
    """This peer's minimum over asyncmem's of the same case, in the same process where it was measured there, too."""
    held: float | None = None
    """What is held against the bound."""
    bound: float | None = None
    sense: str | None = None
    """"at least" or "at most"."""

    @property
    def ok(self) -> bool | None:
        """Whether everything asked held; None where nothing was asked."""
        if self.measured.broken:
            return False
        if self.bound is None or self.held is None:
            return None
        return self.held >= self.bound if self.sense == LEAST else self.held <= self.bound

    def as_json(self) -> dict[str, object]:
        """Answer a mapping for JSON."""
        line = {key: value for key, value in asdict(self.measured).items() if key not in ("figures", "broken")}
        line |= {key: getattr(self, key) for key in ("ratio", "bound", "sense", "held", "ok")}
        if self.measured.broken:
            line["broken"] = self.measured.broken
        return line | {"figures": dict(self.measured.figures)}


def judge(measured: Iterable[Measured]) -> list[Entry]:
    """Put every figure beside asyncmem's and hold it against what is asked."""
    lines = list(measured)
    found = {(one.row, one.case, one.peer): one for one in lines}
    return [_entry(one, found) for one in lines]


def _entry(one: Measured, found: Found) -> Entry:
    ratio = times_ours(one, found)
    asked = next((each for each in ASKED if each.concerns(one)), None)
    if asked is None:
        return Entry(measured=one, ratio=ratio)
    held = asked.held(one, found)
    return Entry(measured=one, ratio=ratio, held=held, bound=asked.bound, sense=asked.sense)
