"""One harness for each reader of files: a function of bytes that lets pass only what the reader says it raises.

What was read is used as well, by whatever prints or computes of it. `python tests/fuzz/run.py NAME FILE` runs one.
"""

import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from asyncmem import InvalidRequest
from asyncmem.cli.tables import output
from asyncmem.cli.top import picture
from asyncmem.core import LOG_ROW
from asyncmem.distributed import frames
from asyncmem.insight import LifetimeAnalyzer, Records, analyze_allocation_patterns, read, read_plan, reports
from asyncmem.insight.amem import MAGIC, VERSION, Heading, NewNames, Pool, Rows, pack, pack_rows
from asyncmem.insight.exports import FORMATS
from asyncmem.insight.live import client
from asyncmem.insight.reports.summary import summarize
from asyncmem.options import PoolOptions
from asyncmem.planning import InferenceMemoryEstimate, TrainingMemoryEstimate, read_model
from asyncmem.replay import Journal, Model, Policy, Trace, read_costs, replay
from asyncmem.replay import read as read_trace
from asyncmem.share import items
from asyncmem.share.items import ProtocolError

HEADING = Heading(version=VERSION, began=9, wall=1e9, frames=8, program=["a"], process=1, python="3", asyncmem="0")
NAMES = NewNames(
    places=[("a.py", 1, "f"), ("b.py", 2, "g")], sites=[(1, 0), (2, 1)], tasks=["t"], tags=["x", "y"], threads={1: "m"}
)
POOLS = [Pool(number=n, name=f"p{n}", device=f"cuda:{n}", limit=1 << 30) for n in range(2)]
JOURNAL = b'{"journal": 1, "asyncmem": "0", "pool": "a", "device": "b"}\n'
EVENT = np.dtype([("op", "u1"), ("stream", "u1"), ("id", "<i2"), ("size", "<u4"), ("dt_us", "<u2")])
COLUMNS = EVENT.names or ()
_ROOM = 1 << 16
_FEW = 300
"""Records of which plans and pictures are made, and events that are replayed."""


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="asyncmem-fuzz-"))


def _file(data: bytes) -> Path:
    path = _folder() / "file"
    path.unlink(missing_ok=True)  # ext4 waits for the disk where a file is emptied and written anew
    path.write_bytes(data)
    return path


# -- recordings --------------------------------------------------------------------------------------------------------


def amem(data: bytes) -> None:
    """A recording, as it lies in a file."""
    with suppress(InvalidRequest):
        _use_records(read(_file(data)))


def blocks(data: bytes) -> None:
    """The blocks of one, each behind its length in two bytes; with right checksums, behind a heading."""
    found = [MAGIC, pack(HEADING)]
    while data:
        length = int.from_bytes(data[:2], "little")
        payload, data = data[2 : 2 + length], data[2 + length :]
        found += [len(payload).to_bytes(4, "little"), zlib.crc32(payload).to_bytes(4, "little"), payload]
    amem(b"".join(found))


def rows(data: bytes) -> None:
    """The rows of one, in blocks by their pool; the first byte says which are held at the end, and which are lost."""
    head, events = data[:1] or b"\0", np.frombuffer(data[1 : 1 + len(data[1:]) // 56 * 56], LOG_ROW)
    found = [HEADING, *POOLS, NAMES]
    for number, some in enumerate(np.array_split(events, 3)):
        held = bool(head[0] >> number & 1)
        found.append(
            Rows(pool=number % 2, count=len(some), columns=pack_rows(some), held=held, lost=(head[0] >> 4) * number)
        )
    amem(MAGIC + b"".join(map(pack, found)))


def _use_records(records: Records) -> None:
    summarize(records)
    analyze_allocation_patterns(records)
    for one in (reports.summary, reports.stats, reports.leaks, reports.tree, reports.waits, reports.segments):
        repr(one(records))
    for column in ("site", "tag", "task", "thread", "pool", "nbytes"):
        reports.table(records, column)
    reports.timeline(records, 7)
    for _, write in FORMATS.values():
        write(records, io.BytesIO())
    for pool in {pool.name for pool in records.names.pools[:3]}:
        analyzer = LifetimeAnalyzer.from_records(records.in_pool(pool))
        analyzer.get_optimization_suggestions()
        if len(records) < _FEW:
            str(analyzer.compute_reuse_plan())


# -- traces ------------------------------------------------------------------------------------------------------------


def trace(data: bytes) -> None:
    """An archive, or a snapshot as pickle or JSON, as it lies in a file."""
    with suppress(InvalidRequest):
        _use_trace(read_trace(_file(data)))


def members(data: bytes) -> None:
    """The arrays of an archive, each behind its length in two bytes, `meta` first."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("meta", *COLUMNS):
            length = int.from_bytes(data[:2], "little")
            archive.writestr(f"{name}.npy", data[2 : 2 + length])
            data = data[2 + length :]
    trace(file.getvalue())


def columns(data: bytes) -> None:
    """The events of one."""
    events = np.frombuffer(data[: len(data) // EVENT.itemsize * EVENT.itemsize], EVENT)
    file = io.BytesIO()
    np.savez(file, **{name: np.ascontiguousarray(events[name]) for name in COLUMNS})
    trace(file.getvalue())


def pickled(data: bytes) -> None:
    """A snapshot as a pickle, without its beginning."""
    trace(b"\x80" + data)


def _use_trace(found: Trace) -> None:
    repr(found)
    found.warmup()
    if len(found) < _FEW:
        for policy in ("paged", "stream_ordered", "direct"):
            str(replay(found, Policy.parse(policy), samples=5))
        str(LifetimeAnalyzer.from_trace(found).compute_reuse_plan())


# -- the others --------------------------------------------------------------------------------------------------------


def journal(data: bytes) -> None:
    """The calls of a journal, below a heading."""
    path = _file(JOURNAL + data)
    with suppress(InvalidRequest):
        for line in Journal(path).lines():
            str(line)
    with suppress(InvalidRequest):
        str(Journal(path).replay())


def journal_file(data: bytes) -> None:
    """A journal, as it lies in a file."""
    with suppress(InvalidRequest):
        repr(Journal(_file(data)))


def plan(data: bytes) -> None:
    """A plan of reuse."""
    with suppress(InvalidRequest):
        str(read_plan(_file(data)))


def model(data: bytes) -> None:
    """A model's config.json."""
    with suppress(InvalidRequest):
        found = read_model(_file(data))
        for kind in (InferenceMemoryEstimate, TrainingMemoryEstimate):
            one = kind(model=found, seq_len=4)
            one.summary()
            json.dumps(one.as_dict())
            one.largest_batch("80 GiB")
            one.largest_seq_len("80 GiB")


def costs(data: bytes) -> None:
    """The costs of a driver's calls."""
    with suppress(InvalidRequest):
        Model(costs=read_costs(_file(data))).curves()


def look(data: bytes) -> None:
    """What a process returns that is asked for its pools."""
    with suppress(OSError):
        now = client.read_look(data, Path("1.sock"))
        console = output()
        console.file = io.StringIO()
        console.print(picture(now, now))


def options(data: bytes) -> None:
    """Options from the environment."""
    text = data.decode("utf-8", "surrogateescape")
    name, _, value = text.partition("\0")
    with suppress(InvalidRequest):
        PoolOptions.from_environment({"ASYNCMEM_CONF": name, "ASYNCMEM_LIMIT": value})


def item(data: bytes) -> None:
    """What describes an item on a link between two workers, behind its header."""
    with suppress(ProtocolError):
        frame = frames.unpack(data[: frames.HEADER.size])
        tree, leaves = items.decode(data[frames.HEADER.size :][: frame.meta], _ROOM)
        assert sum(leaf.nbytes for leaf in leaves if leaf.inline is None) <= _ROOM
        items.unflatten(tree, [np.empty(leaf.shape, "u1") if leaf.nbytes < _ROOM else None for leaf in leaves], ())


HARNESSES: dict[str, Callable[[bytes], None]] = {
    one.__name__: one
    for one in (
        amem, blocks, rows, trace, members, columns, pickled, journal, journal_file, plan, model, costs, look, options,
        item,
    )
}  # fmt: skip


# -- where to begin ----------------------------------------------------------------------------------------------------


def seeds(name: str) -> list[bytes]:
    """Return good inputs for a harness."""
    return _SEEDS[name]()


def _sized(parts: list[bytes]) -> bytes:
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


def _some_rows() -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    found = np.zeros(24, LOG_ROW)
    found["time_ns"], found["number"] = np.arange(24) * 1000 + 9, np.arange(24) // 2
    found["nbytes"], found["address"] = 512, (np.arange(24) // 2 % 4) * 4096 + (1 << 21)
    found["kind"], found["site"], found["tag"] = [0, 1] * 12, np.arange(24) % 3, np.arange(24) % 2
    found["kind"][-7:], found["span_ns"] = range(2, 9), np.arange(24) * 50
    return found


def _amem() -> list[bytes]:
    block = Rows(pool=0, count=24, columns=pack_rows(_some_rows()))
    return [MAGIC + b"".join(map(pack, [HEADING, *POOLS, NAMES, block]))]


def _blocks() -> list[bytes]:
    block = Rows(pool=0, count=24, columns=pack_rows(_some_rows()))
    return [_sized([msgspec.msgpack.encode(one) for one in [*POOLS, NAMES, block]])]


def _events() -> "np.ndarray[tuple[int], np.dtype[np.void]]":
    return np.array(
        [(3, 0, -1, 2 << 20, 0), (0, 0, 0, 512, 3), (0, 1, 1, 700, 0), (1, 0, 0, 512, 20), (2, 0, 0, 512, 1)], EVENT
    )


def _arrays() -> dict[str, bytes]:
    found = {}
    meta = np.array(json.dumps({"version": 1, "name": "n", "device": 0, "note": ""}))
    for name, column in {"meta": meta, **{name: _events()[name].copy() for name in COLUMNS}}.items():
        file = io.BytesIO()
        np.save(file, column)
        found[name] = file.getvalue()
    return found


def _archive() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _arrays().items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def _snapshot() -> dict[str, object]:
    events = [
        {"action": action, "addr": 4096, "size": 512, "stream": 0, "time_us": 5 * at}
        for at, action in enumerate(("segment_alloc", "alloc", "free_requested", "free_completed", "oom"))
    ]
    block = {"size": 512, "requested_size": 500, "state": "active_allocated"}
    segment = {"device": 0, "address": 4096, "total_size": 1 << 21, "stream": 0, "blocks": [block]}
    return {"device_traces": [events], "segments": [segment], "allocator_settings": {"trace_alloc_overflowed": True}}


def _pickles() -> list[bytes]:
    import pickle

    return [pickle.dumps(_snapshot(), protocol)[1:] for protocol in (2, 4, 5)]


def _json(found: object) -> list[bytes]:
    return [json.dumps(found).encode()]


def _journal() -> list[bytes]:
    from asyncmem import AsyncMemoryPool

    path = _folder() / "journal"
    path.unlink(missing_ok=True)
    with AsyncMemoryPool("simulated", limit="4 MiB", segment_size="1 MiB", journal=str(path)) as pool:
        with pool.allocate("1 MiB"), pool.budget("few", limit="1 MiB").allocate(300):
            pool.configure(limit="3 MiB")
        with pool.lease("1 MiB") as lease, lease.allocate(5000):
            pool.check()
    return [path.read_bytes().partition(b"\n")[2]]


def _look() -> list[bytes]:
    from asyncmem import AsyncMemoryPool
    from asyncmem.insight.live.server import look as said

    with AsyncMemoryPool("simulated", limit="1 MiB", name="p") as pool, pool.allocate(500):
        return _json(said())


def _item() -> list[bytes]:
    tree, values = items.flatten({"a": [np.zeros((2, 3), "f4"), b"x", 1.5, None], 3: ("text", True)}, ())
    meta = items.encode(tree, [leaf for value in values if (leaf := items.leaf_of(value))])
    return [frames.pack(frames.ITEM, len(meta), 3, 4) + meta]


_SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "amem": _amem,
    "blocks": _blocks,
    "rows": lambda: [b"\x14" + _some_rows().tobytes()],
    "trace": lambda: [_archive(), *_json(_snapshot())],
    "members": lambda: [_sized(list(_arrays().values()))],
    "columns": lambda: [_events().tobytes()],
    "pickled": _pickles,
    "journal": _journal,
    "journal_file": lambda: [JOURNAL],
    "plan": lambda: _json(
        {
            "version": 1,
            "align": 512,
            "places": [
                {"key": None, "nbytes": 5, "start": 0, "end": 2, "offset": 0},
                {"key": "a", "nbytes": 700, "start": 1, "end": 3, "offset": 512},
            ],
        }
    ),
    "model": lambda: [
        one
        for family in ("llama", "mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "phi", "gpt2")
        for one in _json(dict.fromkeys(_KEYS, 4) | {"model_type": family, "mlp_only_layers": [1]})
    ],
    "costs": lambda: _json({"cuMemMap": [[0, 5], [2097152, 600.5]]}),
    "look": _look,
    "item": _item,
    "options": lambda: [b"limit:80%,pregrow:1GiB,segments:paged,warmup:4KiB*3\x0080%", b"journal:x\x001_000"],
}
_KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "num_key_value_heads",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_embd", "n_layer", "n_head",
    "n_positions", "shared_expert_intermediate_size", "sliding_window", "decoder_sparse_step",
)  # fmt: skip
