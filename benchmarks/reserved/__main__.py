"""`python -m benchmarks.reserved`: what is reserved for programs that no policy was tuned to, beside PyTorch."""

import math
from pathlib import Path

import click

from asyncmem.replay import Model, Patience, Policy, Replay, fit, read, replay
from benchmarks.reserved.expandable import expandable
from benchmarks.reserved.programs import unseen

_LATE = 0.02
_SETTINGS = {
    "up to date": (Policy(), Model()),
    "20 ms late": (Policy(), Model(lag=_LATE)),
    "patience 2%": (Policy(patience=Patience(share=0.02)), Model(lag=_LATE)),
    "stream_ordered": (Policy("stream_ordered"), Model(lag=_LATE)),
}


def _share(one: Replay) -> float:
    return one.driver_seconds / one.duration


@click.command()
@click.argument("recordings", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--half", type=click.Choice(["tune", "report", "known"]), default="report", show_default=True)
@click.option("--fit/--no-fit", "fits", default=True, help="Also find the smallest limits.")
@click.option("--only", default="", help="Programs with this in their names.")
def main(recordings: tuple[Path, ...], half: str, fits: bool, only: str) -> None:
    """Print reserved over requested for programs made from seeds, and for RECORDINGS cut and changed.

    The last columns are driver calls, as a share of the program's time: with the GPU up to date, and 20 ms late.
    """
    traces = [read(one) for one in recordings]
    columns = ["expandable", *_SETTINGS, *(["fit"] if fits else []), "calls", "calls late"]
    click.echo("| program | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    rows: list[list[float]] = []
    for trace in traces if half == "known" else unseen(traces, int(half == "report")):
        if only not in trace.name:
            continue
        need = trace.peak_requested
        found = [replay(trace, policy, model) for policy, model in _SETTINGS.values()]
        row = [expandable(trace, _LATE) / need, *(one.reserved_over_requested for one in found)]
        if fits:
            row.append(fit(trace) / need)
        rows.append([*row, 1 + _share(found[0]), 1 + _share(found[1])])
        _print(trace.name, rows[-1])
    _print("geometric mean", [math.exp(sum(map(math.log, column)) / len(rows)) for column in zip(*rows, strict=True)])


def _print(name: str, row: list[float]) -> None:
    shares = [f"{100 * (one - 1):.1f} %" for one in row[-2:]]
    click.echo(f"| {name} | " + " | ".join([*(f"{one:.3f}" for one in row[:-2]), *shares]) + " |")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.reserved")
