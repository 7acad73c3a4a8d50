"""What a pool leaves behind of an out-of-memory error: a line in the log, and a file where it is asked for one."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from asyncmem.pool.alarm import alarm, report
from asyncmem.pool.held import held_by_site, held_by_tag
from asyncmem.pool.holdings import label

if TYPE_CHECKING:
    from asyncmem.errors import OutOfMemoryError
    from asyncmem.facts import OutOfMemoryFacts
    from asyncmem.pool.flow import Flow
    from asyncmem.pool.waiting import Waiting

_TOP = 100

_logger = logging.getLogger("asyncmem")
_logger.addHandler(logging.NullHandler())  # a library says nothing of its own accord


def log(error: OutOfMemoryError, pool: str) -> None:
    """Tell the program's log of a request that was refused; the record has its `facts` and the name of the `pool`.

    It has the words of the error and not the error, whose traceback would keep alive all that its frames hold.
    """
    try:
        _logger.error("pool %r: %s", pool, str(error), extra={"pool": pool, "facts": error.facts})
    except Exception as trouble:  # noqa: BLE001 -- of the program's handlers, and no reason to keep others waiting
        report(trouble)


class Postmortem:
    """The state of a pool when a request was refused; written to a file by `save`, which blocks."""

    def __init__(self, flow: Flow, refused: Waiting, facts: OutOfMemoryFacts, path: str) -> None:
        self._flow = flow
        self._path = Path(path)
        core = flow.core
        self._content: dict[str, object] = {
            "version": 1,
            "time": time.time(),
            "pool": flow.pool.name,
            "facts": asdict(facts) | {"rungs": dict(facts.rungs)},
            "waiters": [
                {"owner": label(one.owner), "nbytes": one.nbytes, "age": one.age, "tag": one.tag}
                for one in flow.waiters()
                if one is not refused
            ],
            "tags": held_by_tag(core, _TOP) or sorted(core.tag_bytes().items(), key=lambda one: -one[1])[:_TOP],
            "sites": held_by_site(core, _TOP),
        }

    def save(self) -> None:
        """Write it, over what is there, as a whole or not at all; what goes wrong is warned of."""
        self._content["segments"] = [asdict(one) for one in self._flow.upkeep.segments()]
        draft = self._path.with_name(f"{self._path.name}.part")
        try:
            draft.write_text(json.dumps(self._content, indent=1), encoding="utf-8")
            draft.replace(self._path)
        except OSError as error:
            alarm(f"the snapshot of an out-of-memory error could not be written: {error}", RuntimeWarning)
