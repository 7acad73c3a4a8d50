"""Records of a program that was never run, so that it is known to the pixel what is to be seen of it."""

import numpy as np

from asyncmem.core import Kind
from asyncmem.insight import Records
from asyncmem.insight.names import Names, PoolName, Site
from asyncmem.insight.rows import ROW

MIB = 1 << 20
FIRST, SECOND = 1 << 32, 2 << 32

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"\\ $$x^2$$ @{time}"

LOAD, FORWARD, SERVE = 1, 2, 3  # calls
_PLACES = [
    None, Site("/app/main.py", 7, "main"), Site("/app/model.py", 21, "load"), Site("/app/model.py", 40, "forward"),
    Site("/app/server.py", 3, "serve"),
]  # fmt: skip

WEIGHTS, ACTIVATIONS, NO_NUMBER = 1, 2, 0  # tags


def staged(tag: str = "activations") -> Records:
    """A tenth of a second: weights that stay, activations that come and go, waits, a refusal, a segment that goes back.

    At the peak, from 45 to 80 ms, 22 of 32 MiB are live.
    """
    rows = [
        row(Kind.GREW, 0, nbytes=16, address=FIRST),
        row(Kind.ALLOCATED, 5, number=0, nbytes=8, address=FIRST, tag=WEIGHTS, site=LOAD),
        row(Kind.ALLOCATED, 20, number=1, nbytes=2, address=FIRST + 10 * MIB, site=SERVE),
        row(Kind.GREW, 40, span=1, nbytes=16, address=SECOND),  # growth takes time; what was there before took none
        row(Kind.ALLOCATED, 45, number=2, nbytes=12, address=SECOND + 2 * MIB, tag=ACTIVATIONS, site=FORWARD),
        row(Kind.WAITED, 60, span=30, nbytes=4, site=FORWARD),
        row(Kind.OUT_OF_MEMORY, 70, nbytes=1024, site=SERVE),
        row(Kind.WAITED, 75, span=10, nbytes=4, site=SERVE),
        row(Kind.FREED, 80, number=2, nbytes=12, address=SECOND + 2 * MIB, tag=ACTIVATIONS, site=FORWARD, span=35),
        row(Kind.FREED, 90, number=1, nbytes=2, address=FIRST + 10 * MIB, site=SERVE, span=70),
        row(Kind.TRIMMED, 95, nbytes=16, address=SECOND),
        row(Kind.PRESSURE, 100),
    ]
    names = Names(
        places=_PLACES, sites=[(0, 0), (2, 4), (3, 4), (4, 0), (1, 0)], tasks=[""], tags=["", "weights", tag],
        threads=[None], pools=[PoolName("staged", "none", 64 * MIB)],
    )  # fmt: skip
    together = np.concatenate(rows)
    return Records(together, names, began=0, wall=0.0, ended=int(together["time_ns"][-1]))


def row(
    kind: Kind,
    ms: int,
    *,
    number: int = 0,
    nbytes: int = 0,
    address: int = 0,
    tag: int = NO_NUMBER,
    site: int = 0,
    span: int = 0,
) -> np.ndarray:
    """A record at so many milliseconds, of so many MiB."""
    one = np.zeros(1, ROW)
    one["kind"], one["time_ns"], one["span_ns"] = kind, ms * 1_000_000, span * 1_000_000
    one["number"], one["nbytes"], one["address"], one["tag"], one["site"] = number, nbytes * MIB, address, tag, site
    return one
