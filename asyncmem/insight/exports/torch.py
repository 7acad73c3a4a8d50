"""Records as a snapshot of PyTorch's memory, which its viewer and whatever else reads those accept.

The pickle has plain data alone, and no numbers or lengths of eight bytes: the viewer's own unpickler knows no more.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from asyncmem.core import Kind
from asyncmem.insight.exports.ground import Place
from asyncmem.insight.exports.grounds import grounds_of

if TYPE_CHECKING:
    from asyncmem.insight.exports.ground import Entry, Ground, What
    from asyncmem.insight.records import Records

PROTOCOL: Final = 4
"""Of the pickle. The viewer refuses a later one."""

_STREAMS: Final = 1 << 16
_SETTINGS: Final = {
    "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
    "expandable_segments": False, "pinned_num_register_threads": 1, "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False, "roundup_power2_divisions": {},
}  # fmt: skip


def write_torch(records: Records, file: BinaryIO) -> None:
    """Write what `torch.cuda.memory._dump_snapshot` would: history, segments, and what lies in them at the end."""
    pickle.dump(snapshot(records), file, protocol=PROTOCOL)


def snapshot(records: Records) -> dict[str, Any]:
    """Answer the same as an object.

    A pool's device has its number where that is a CUDA device. Pools of other devices, and pools of which it is not
    known where their segments lie, have the numbers behind those, one each.
    """
    by_pool = grounds_of(records)
    Telling(records, by_pool).run()
    grounds = sorted(set(by_pool), key=lambda one: one.number)
    traces: list[list[Entry]] = [[] for _ in range(1 + max((one.number for one in grounds), default=0))]
    for ground in grounds:
        traces[ground.number] = ground.entries
    return {
        "segments": [segment for one in grounds for segment in one.segments()],
        "device_traces": traces,
        "allocator_settings": dict(_SETTINGS),
        "external_annotations": [],
    }


class Telling:
    """Tells the grounds what happened, in its order."""

    def __init__(self, records: Records, by_pool: list[Ground]) -> None:
        self._records = records
        self._by_pool = by_pool
        self._frames: dict[int, list[dict[str, Any]]] = {}
        self._reserved = [0] * len(by_pool)

    def run(self) -> None:
        """Tell all of it."""
        rows = self._records.rows
        columns = (rows[name].tolist() for name in ("kind", "pool", "address", "nbytes", "stream", "site", "tag"))
        began = rows["time_ns"] == rows["time_ns"][:1]
        since = round(self._records.wall * 1e9) - self._records.began
        times = ((rows["time_ns"] + since) // 1000).tolist()
        for time, early, kind, pool, address, nbytes, stream, site, tag in zip(
            times, began.tolist(), *columns, strict=True
        ):
            ground = self._by_pool[pool]
            ground.now = time
            place = Place(address, nbytes, pool)
            match kind:
                case Kind.GREW | Kind.TRIMMED:
                    self._move(ground, place, came=kind == Kind.GREW, early=early)
                case Kind.ALLOCATED | Kind.HELD:
                    before = early and kind == Kind.HELD
                    ground.take(place, self._what(pool, stream, site, tag), before=before)
                case Kind.FREED:
                    ground.free(place)
                case Kind.OUT_OF_MEMORY:
                    free = max(self._records.names.pools[pool].limit - self._reserved[pool], 0)
                    ground.refuse(nbytes, free, self._what(pool, stream, site, tag))

    def _move(self, ground: Ground, place: Place, *, came: bool, early: bool) -> None:
        self._reserved[place.pool] += place.nbytes if came else -place.nbytes
        if not came:
            ground.trim(place)
        elif early and not ground.fixed:
            ground.begin_with(place)
        else:
            ground.grow(place)

    def _what(self, pool: int, stream: int, site: int, tag: int) -> What:
        names = self._records.names
        frames = self._frames.get(site)
        if frames is None:  # the same list for all of a site, so that the file has it once
            lines = names.frames(site)
            frames = [{"filename": one.file, "line": one.line, "name": one.function} for one in lines]
            self._frames[site] = frames
        return {
            "stream": stream and pool * _STREAMS + stream, "frames": frames,
            "compile_context": "N/A", "user_metadata": names.tag(tag) or "",
        }  # fmt: skip
