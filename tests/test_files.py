"""Files of strangers: whatever is in them or in their place, readers say so by name, soon and without much memory."""

import json
import os
import pickle
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import msgspec
import numpy as np
import pytest

from asyncmem import InvalidRequest
from asyncmem.core import LOG_ROW
from asyncmem.errors import BadTrace
from asyncmem.insight import read, read_plan
from asyncmem.insight.amem import MAGIC, VERSION, Block, Heading, NewNames, Pool, Rows, pack, pack_rows
from asyncmem.insight.exports.torch import snapshot
from asyncmem.insight.live import client
from asyncmem.planning import read_model
from asyncmem.replay import Journal, Trace, read_costs, replay
from asyncmem.replay import read as read_trace

from .fuzz import harnesses

READERS: dict[str, Callable[[Path], object]] = {
    "amem": read,
    "trace": read_trace,
    "plan": read_plan,
    "model": read_model,
    "costs": read_costs,
    "journal": lambda path: (Journal(path).replay(), list(Journal(path).lines())),
}
HEADING = Heading(version=VERSION, began=0, wall=0.0, frames=1, program=[], process=1, python="", asyncmem="")
POOL = Pool(number=0, name="p", device="none", limit=1)
DEEP = b"[" * 100_000
TEXT = [
    DEEP,
    b"{" * 100_000,
    b'{"a":' * 100_000,
    b"\xff\xfe\xfd",
    b"\0\0",
    b"",
    b"null",
    b"{}",
    b"[]",
    b"9" * 5000,
    b"NaN",
]
GOOD = {name: harnesses.seeds(name) for name in ("amem", "trace", "plan", "model", "costs")} | {
    "journal": [b"\n".join((harnesses.JOURNAL + harnesses.seeds("journal")[0]).splitlines()[:9]) + b"\n"]
}


def refused(name: str, path: Path) -> str:
    """Read a file, and return what is wrong with it; nothing where it is read."""
    try:
        READERS[name](path)
    except InvalidRequest as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """A folder, a pipe that nobody writes to, a device without end, links in a circle: none is waited for."""
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    for path in (tmp_path, pipe, Path(os.devnull), Path("/dev/zero"), circle, tmp_path / "nothing"):
        with pytest.raises((OSError, InvalidRequest), match=path.name):
            READERS[name](path)


@pytest.mark.skipif(sys.platform != "linux", reason="a file that cannot be read is known there")
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read_is_named(name: str) -> None:
    """As on a failing disk: it opens, and reading it is an error, which says of itself no more than that."""
    with pytest.raises((OSError, InvalidRequest), match="/proc/self/mem"):
        READERS[name](Path("/proc/self/mem"))


@pytest.mark.parametrize("name", READERS)
def test_other_contents_are_refused_with_the_file(name: str, tmp_path: Path) -> None:
    """Nested without end, no Unicode, numbers of thousands of digits: by the file's name, and in few words."""
    path = tmp_path / "file"
    for text in TEXT:
        path.write_bytes(text)
        said = refused(name, path)
        assert str(path) in said or (text == b"{}" and name in {"costs", "model"})
        assert len(said) < 1000


@pytest.mark.parametrize("name", READERS)
def test_a_file_cut_off_or_changed_anywhere_is_read_or_refused(name: str, tmp_path: Path) -> None:
    """At each byte; and nothing else is raised than what the reader says."""
    path = tmp_path / "file"
    for whole in GOOD[name]:
        path.write_bytes(whole)
        # Changed in place: a file that is emptied and written anew goes to the disk each time on ext4.
        with path.open("r+b", buffering=0) as file:
            for at, byte in enumerate(whole):
                os.pwrite(file.fileno(), bytes([byte ^ (1 << at % 8)]), at)
                refused(name, path)
                os.pwrite(file.fileno(), bytes([byte]), at)
            for length in reversed(range(len(whole))):
                file.truncate(length)
                refused(name, path)


# -- recordings --------------------------------------------------------------------------------------------------------


def amem(path: Path, *blocks: Block | bytes) -> Path:
    """Write a recording of some blocks, or of payloads with right checksums."""
    payloads = (msgspec.msgpack.encode(one) if not isinstance(one, bytes) else one for one in blocks)
    whole = (len(one).to_bytes(4, "little") + zlib.crc32(one).to_bytes(4, "little") + one for one in payloads)
    path.write_bytes(MAGIC + b"".join(map(pack, (HEADING, POOL))) + b"".join(whole))
    return path


def rows(**values: int | list[int]) -> Rows:
    """Make a block of rows that say the same but for what is given."""
    count = max([1, *(len(one) for one in values.values() if isinstance(one, list))])
    found = np.zeros(count, LOG_ROW)
    for name, value in values.items():
        found[name] = value
    return Rows(pool=0, count=count, columns=pack_rows(found))


BOMBS: dict[str, tuple[Block | bytes, str]] = {
    "rows without columns": (Rows(pool=0, count=1 << 31, columns={}), "records in"),
    "rows beyond number": (Rows(pool=0, count=1 << 63, columns={}), "damaged block at byte"),
    "fewer rows than none": (Rows(pool=0, count=-1, columns={}), "damaged block at byte"),
    "a column that swells": (Rows(pool=0, count=9, columns={"tag": zlib.compress(bytes(1 << 26))}), "number of bytes"),
    "columns that swell": (rows(tag=[0] * 400_000), "400,000 records in"),
    "the thread after many": (NewNames(threads={1 << 31: "x"}), "damaged block at byte"),
    "a thread before all": (NewNames(threads={-1: "x"}), "damaged block at byte"),
    "a long call": (NewNames(places=[("a", 1, "f")], sites=[(1, at) for at in range(50_000)]), "lines"),
    "a time of centuries": (rows(time_ns=(1 << 63) - 1), "time_ns"),
    "a time before all": (rows(time_ns=-(1 << 63)), "time_ns"),
    "a span of centuries": (rows(span_ns=1 << 62), "span_ns"),
    "a huge address": (rows(address=(1 << 64) - 1), "address"),
    "huge sums": (rows(nbytes=[1 << 61] * 3), "bytes in all"),
    "a deep block": (b"\x82\xa4type\xa5names\xa3foo" + b"\x91" * 99_999, "damaged block at byte"),
    "no Unicode": (b"\x82\xa4type\xa5names\xa5tasks\x91\xa1\xff", "damaged block at byte"),
    "a long list": (b"\x82\xa4type\xa5names\xa5tasks\xdd\xff\xff\xff\xff", "damaged block at byte"),
    "no structure": (b"\x01", "damaged block at byte"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_recording_that_asks_for_much_is_refused(bomb: str, tmp_path: Path) -> None:
    """Before it is given any of it, by the file's name and what is wrong."""
    block, said = BOMBS[bomb]
    path = amem(tmp_path / "file", block)
    with pytest.raises(BadTrace, match=said) as caught:
        read(path)
    assert caught.value.file == str(path)


def test_a_block_that_is_longer_than_the_file_is_torn(tmp_path: Path) -> None:
    """As that of a process which has died is; it is not set aside."""
    path = amem(tmp_path / "file")
    path.write_bytes(path.read_bytes() + (1 << 30).to_bytes(4, "little") + bytes(9))
    assert "ends in the middle" in read(path).note


def test_many_gaps_cost_no_more_than_their_rows(tmp_path: Path) -> None:
    """What is lost in each of thousands of them is found in one pass; what was freed there was freed at the next."""
    blocks = [msgspec.structs.replace(rows(time_ns=at * 10, number=at, nbytes=1), lost=at) for at in range(3000)]
    held = msgspec.structs.replace(rows(number=2999, nbytes=1), held=True)
    end = b"\x82\xa4type\xa3end\xa4time\xcd\xff\xff"
    found = read(amem(tmp_path / "file", *blocks, held, end))
    assert [one.number for one in found.live_at()] == [2999]
    assert {(one.number, round(one.lifetime * 1e9)) for one in found if one.lifetime} == {
        (at, 10) for at in range(2999)
    }


def test_a_device_of_a_large_number_is_one_of_a_few(tmp_path: Path) -> None:
    """A snapshot has a list for each device up to the largest, and names are whatever a file says."""
    pools = (
        Pool(number=at, name="p", device=name, limit=1) for at, name in enumerate(["cuda:4000000000", "cuda:2"], 1)
    )
    taken = (msgspec.structs.replace(rows(nbytes=5, address=4096), pool=at) for at in (1, 2))
    path = amem(tmp_path / "file", *pools, *taken)
    assert len(snapshot(read(path))["device_traces"]) < 9


# -- the others --------------------------------------------------------------------------------------------------------


def test_layers_are_not_listed_to_be_counted() -> None:
    """Whatever their number; those of a real model come to the same as one by one."""
    known = {"model_type": "qwen3_moe", **dict.fromkeys(harnesses._KEYS, 4)}
    config = {**known, "num_hidden_layers": 1 << 40, "decoder_sparse_step": 3, "mlp_only_layers": [2, 3, [], None, -1]}
    assert read_model(config).dense_layers == (1 << 40) - ((1 << 40) // 3 - 1)
    for layers in range(1, 9):
        for every in range(1, 5):
            for listed in ([], [0], [1, 3], [2, 2, 99]):
                shape = {"num_hidden_layers": layers, "decoder_sparse_step": every, "mlp_only_layers": listed}
                sparse = [one for one in range(layers) if one not in listed and (one + 1) % every == 0]
                assert read_model({**known, **shape}).dense_layers == layers - len(sparse)


@pytest.mark.parametrize("key", ["device_traces", "segments"])
def test_a_list_that_a_snapshot_has_thousands_of_times_is_refused(key: str, tmp_path: Path) -> None:
    """A pickle repeats it in two bytes; whoever goes through it each time takes the square of the file's size."""
    event = {"action": "alloc", "addr": 0, "size": 1, "stream": 0}
    block = {"state": "inactive", "size": 0}
    segment = {"device": 0, "total_size": 0, "stream": 0, "address": 0}
    other, blocks = [{"action": "oom"}] * 100_000, [block] * 100_000
    repeated = {
        "device_traces": {"device_traces": [[event], *[other] * 100_000]},
        "segments": {"device_traces": [[event]], "segments": [{**segment, "blocks": blocks} for _ in range(1000)]},
    }
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(repeated[key]))
    began = time.process_time()
    assert "one list for several" in refused("trace", path)
    assert time.process_time() - began < 5


def test_a_snapshot_of_many_devices_names_a_few_of_them(tmp_path: Path) -> None:
    """Where one is to be chosen."""
    path = tmp_path / "file"
    path.write_text(json.dumps({"device_traces": [[{"action": "alloc"}] for _ in range(5000)]}))
    assert "0, 1, 2, 3" in (said := refused("trace", path))
    assert len(said) < 200


def test_the_head_of_an_array_is_no_program(tmp_path: Path) -> None:
    """Nothing compiles it, so it can neither warn nor be nested; the archive is refused."""
    path, whole = tmp_path / "file", {name: np.zeros(1, np.uint8) for name in ("op", "stream", "size", "dt_us")}
    for head in ("1if 1else 2", "-" * 9000 + "1", "[" * 9000):
        with path.open("wb") as file:
            np.savez(file, **whole)
        with ZipFile(path, "a") as archive:
            archive.writestr("id.npy", b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode())
        assert "id.npy of another kind" in refused("trace", path)


def test_numbers_of_streams_may_have_gaps() -> None:
    """They cost no more than those that are used, and decide the same."""
    columns = [0, 0, 1, 1], [7, 65535, 7, 65535], [0, 1, 0, 1], [1 << 21] * 4, [0, 1, 2, 3]
    sparse = Trace(*map(np.array, columns))
    dense = Trace(*map(np.array, (columns[0], [1, 2, 1, 2], *columns[2:])))
    assert sparse.streams == dense.streams == 3
    assert sparse.steps().stream.tolist() == dense.steps().stream.tolist() == [1, 2, 1, 2]
    assert replay(sparse).driver_calls == replay(dense).driver_calls


def test_a_program_of_many_streams_is_read_and_not_replayed() -> None:
    """Each of them may hold what all others are searched for."""
    found = np.arange(4097)
    trace = Trace(found * 0, found, found, found * 0 + 512, found)
    assert trace.streams == 4097
    with pytest.raises(BadTrace, match="at most 4,096 to replay"):
        replay(trace)


def test_words_of_a_file_do_not_steer_the_terminal(tmp_path: Path) -> None:
    """What clears the screen, and what is no Unicode, is escaped where it is read; so all that prints it can."""
    evil, shown, path = "\x1b[2J\ud800", "\\x1b[2J\\ud800", tmp_path / "file"
    assert read_model({"model_type": evil, **dict.fromkeys(harnesses._KEYS, 4)}).family == shown
    heading = {"journal": 1, "pool": evil, "device": evil, "asyncmem": evil}
    call = ["take", [[5, 0, 0, -1, False, False, False]], evil, [{"kind": evil, evil: evil}]]
    path.write_text(f"{json.dumps(heading)}\n{json.dumps(call)}\n")
    journal = Journal(path)
    assert {journal.pool, journal.device, journal.asyncmem} == {shown}
    assert all(line.isprintable() for line in journal.lines())


def test_costs_and_plans_have_numbers_of_machines(tmp_path: Path) -> None:
    """What has hundreds of digits is neither nanoseconds nor bytes."""
    path = tmp_path / "file"
    path.write_text('{"cuMemMap": [[0, 1' + "0" * 400 + "]]}")
    with pytest.raises(InvalidRequest, match="costs of cuMemMap"):
        read_costs(path)
    path.write_text('{"version": 1, "places": [], "align": 512' + "0" * 400 + "}")
    with pytest.raises(InvalidRequest, match="a plan"):
        read_plan(path)


def test_a_result_of_a_journal_points_to_words_that_there_are(tmp_path: Path) -> None:
    """Or the line is damaged."""
    path = tmp_path / "file"
    path.write_bytes(harnesses.JOURNAL + b'["take", [[5, 0, 0, -1, false, false, false]], [1, [-9, 0, 0, 4096]], []]\n')
    with pytest.raises(BadTrace, match=r"row 1: .* a damaged line"):
        list(Journal(path).lines())


def test_an_answer_of_another_shape_is_refused() -> None:
    """What is shown of a process is there, and is what it should be."""
    (good,) = harnesses.seeds("look")
    assert client.read_look(good, Path("1.sock"))["pools"]
    stats = json.loads(good)["pools"][0]["stats"]
    for change in ({"limit": None}, {"limit": "1"}, {"allocated_bytes": -1}, {"reserved_bytes": 1e400}, {"name": 5}):
        found = json.loads(good)
        found["pools"][0]["stats"] = stats | change
        with pytest.raises(OSError, match=r"1\.sock answers something else"):
            client.read_look(json.dumps(found).encode(), Path("1.sock"))


CHILD = """
import json, resource, sys, time
from pathlib import Path
from asyncmem import InvalidRequest
from asyncmem.insight import read
from asyncmem.planning import read_model
from asyncmem.replay import read as read_trace, replay
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
for path in map(Path, sys.argv[1:]):
    began = time.process_time()
    try:
        if path.suffix == ".amem":
            read(path)
        elif path.suffix == ".json":
            read_model(path)
        else:
            str(replay(read_trace(path)))
        said = ""
    except InvalidRequest as error:
        said = str(error)
    print(json.dumps([path.name, said, time.process_time() - began]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process may have is known there")
def test_small_files_take_little_memory_and_time(tmp_path: Path) -> None:
    """In a process with 256 MiB left none of them runs out of it, and none takes a second."""
    files = [amem(tmp_path / f"{at}.amem", block) for at, (block, _) in enumerate(BOMBS.values())]
    config = {"model_type": "qwen3_moe", **dict.fromkeys(harnesses._KEYS, 4), "num_hidden_layers": 1 << 40}
    files.append(tmp_path / "config.json")
    files[-1].write_text(json.dumps(config))
    for at, columns in enumerate(([[0], [0], [0], [127 << 40], [0]], [[0], [65535], [0], [5], [1 << 52]])):
        files.append(tmp_path / f"{at}.npz")
        Trace(*map(np.array, columns)).save(files[-1])
    files.append(tmp_path / "swells.npz")
    zeros = {name: np.zeros(1 << 24, np.uint8) for name in ("op", "stream", "id", "size", "dt_us")}
    np.savez_compressed(files[-1], **zeros)
    child = subprocess.run([sys.executable, "-c", CHILD, *files], capture_output=True, text=True, check=True)
    found = {name: (said, seconds) for name, said, seconds in map(json.loads, child.stdout.splitlines())}
    assert len(found) == len(files)
    for name, (said, seconds) in found.items():
        assert "memory" not in said, (name, said)
        assert seconds < 1, (name, seconds)
    assert not any(found[name][0] for name in ("config.json", "0.npz", "1.npz"))
