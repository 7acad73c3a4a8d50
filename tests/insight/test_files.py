"""Files of records hold what was recorded, also when the process died, and say what is missing."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncmem import AsyncMemoryPool, tag
from asyncmem.core import LOG_ROW
from asyncmem.errors import BadTrace
from asyncmem.insight import Kind, Recording, Records, read
from asyncmem.insight.amem import MAGIC, VERSION, Block, Heading, NewNames, Pool, Rows, pack, pack_rows
from asyncmem.insight.reports import Leaks, leaks

from .support import Program, need_consistent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.amem"


def same(one: Records, other: Records) -> bool:
    return [str(record) for record in one] == [str(record) for record in other]


@pytest.mark.may_block
@pytest.mark.asyncio
async def test_a_file_has_what_a_ring_has(file: Path) -> None:
    """Two recordings of the same program, one in memory and one in a file, tell the same."""
    async with AsyncMemoryPool("simulated", name="mine", limit="256 MiB") as pool:
        program = Program(pool, 11)
        await program.run(50)
        async with Recording(pool, frames=3, file=file) as written, Recording(pool, frames=3) as kept:
            with tag("block"):
                await program.run(600)
            soon = written.records()
        program.live.clear()
    records, others = read(file), kept.records()
    need_consistent(records)
    assert soon.note == "The recording was not ended: its process died, or it goes on."
    assert len(soon.of(Kind.ALLOCATED)) == len(records.of(Kind.ALLOCATED))
    assert not records.note
    assert records.lost == 0
    kinds = Kind.ALLOCATED, Kind.FREED, Kind.WAITED, Kind.PRESSURE
    first, second = records.of(*kinds), others.of(*kinds)
    assert [(one.kind, one.nbytes, one.frames, one.tag, one.lifetime) for one in first] == [
        (one.kind, one.nbytes, one.frames, one.tag, one.lifetime) for one in second
    ]
    assert records.names.pools == others.names.pools
    assert same(written.records(), records)


def recorded(file: Path) -> list[int]:
    """Write some files' worth of blocks, and return the bytes of each buffer."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool, file=file) as recording:
        for nbytes in range(1, 40):
            pool.allocate(nbytes).free()
            recording.records()  # which has what there is written, as a block of its own
    return list(range(1, 40))


def test_a_torn_file_is_read_up_to_the_last_whole_block(file: Path, tmp_path: Path) -> None:
    """Wherever it is cut, what was whole before is there, and nothing else; the note says that something is missing."""
    sizes = recorded(file)
    whole = file.read_bytes()
    torn = tmp_path / "torn.amem"
    lengths = []
    for cut in np.linspace(len(whole) // 3, len(whole) - 1, 60).astype(int).tolist():
        torn.write_bytes(whole[:cut])
        records = read(torn)
        found = [one.nbytes for one in records.of(Kind.ALLOCATED)]
        assert found == sizes[: len(found)]
        assert "its process died" in records.note
        need_consistent(records)
        lengths.append(len(found))
    assert lengths == sorted(lengths)
    assert 0 < lengths[0] < lengths[-1] == 39


def busy(file: Path) -> dict[int, tuple[str, str]]:
    """Record a program that frees all but one buffer; return the tag and the function of each buffer, by its size."""
    made: dict[int, tuple[str, str]] = {}

    def early(nbytes: int) -> None:
        made[nbytes] = f"tag {nbytes % 7}", "early"
        pool.allocate(nbytes, tag=f"tag {nbytes % 7}").free()

    def late(nbytes: int) -> None:
        made[nbytes] = f"late {nbytes % 7}", "late"
        pool.allocate(nbytes, tag=f"late {nbytes % 7}").free()

    with AsyncMemoryPool("simulated") as pool:
        with Recording(pool, file=file) as recording:
            kept = pool.allocate(1000, tag="kept")
            for nbytes in range(1, 40):
                (early if nbytes < 20 else late)(nbytes)
                recording.records()  # which writes what there is, as a block of its own
        kept.free()
    return made


@pytest.mark.parametrize("width", [1, 60])
def test_a_damaged_file_keeps_what_is_whole_and_makes_no_leak(file: Path, width: int) -> None:
    """Wherever it is damaged: the note says so, names stay with their records, and only what was kept is a leak."""
    made = busy(file)
    whole = file.read_bytes()
    counts = []
    for at in range(len(MAGIC), len(whole) - width, max(len(whole) // 150, 1)):
        file.write_bytes(whole[:at] + bytes(one ^ 0x55 for one in whole[at : at + width]) + whole[at + width :])
        records = read(file)
        assert "The file is damaged" in records.note
        need_consistent(records)
        found = leaks(records)
        assert found.nbytes in ({1000} if found.known else {0})
        taken = [one for one in records.of(Kind.ALLOCATED) if one.nbytes < 1000]
        counts.append(len(taken))
        for one in taken:
            tag, function = made[one.nbytes]
            assert one.tag in {tag, None}
            assert one.site is None or one.site.function.endswith(function)
    assert min(counts) >= 30
    assert max(counts) == 39


def test_a_file_whose_end_is_missing_has_no_leaks_that_are_known(file: Path) -> None:
    """What was freed in the missing part cannot be told from what was never freed."""
    busy(file)
    whole = file.read_bytes()
    cut = len(whole) * 2 // 3
    file.write_bytes(whole[:cut])
    if read(file).end_known:  # by chance it ends with a block, as if no more had been written
        file.write_bytes(whole[: cut + 1])
    records = read(file)
    assert not records.end_known
    assert "ends in the middle" in records.note
    assert records.live_at().of(Kind.ALLOCATED)
    assert leaks(records) == Leaks(known=False, nbytes=0, buffers=0, outlived=0, lines=())


def test_names_that_claim_many_before_them_are_refused(file: Path) -> None:
    """Where the file is damaged, before memory is set aside for them."""
    recorded(file)
    with file.open("ab") as more:
        more.write(b"damage" + pack(NewNames(firsts=(1 << 31, 1, 1, 1))))
    with pytest.raises(BadTrace, match="names before others"):
        read(file)


def test_looking_for_whole_blocks_in_damage_ends(file: Path) -> None:
    """Also in a file that is full of what looks like the beginning of a long block."""
    recorded(file)
    size = (1 << 20).to_bytes(4, "little")
    with file.open("ab") as more:
        more.write(b"x" + (size + b"\0\0\0\0\x82\xa4type" + b" " * 3) * (1 << 17))
    began = time.monotonic()
    assert len(read(file).of(Kind.ALLOCATED)) == 39
    assert time.monotonic() - began < 20


KILLED = """
import os, signal, sys, time
from asyncmem import AsyncMemoryPool
from asyncmem.insight import Recording

pool = AsyncMemoryPool("simulated").__enter__()
recording = Recording(pool, file=sys.argv[1]).__enter__()
held = [pool.allocate(1000 + i) for i in range(500)]
while len(recording.records()) < 500:
    time.sleep(0.01)
print("written", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
def test_a_killed_process_leaves_a_file_that_can_be_read(file: Path) -> None:
    """All that was written is there, with its lines, and what was live is live at the end."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(file)], stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.kill()
    records = read(file)
    assert [one.nbytes for one in records.live_at()] == [1000 + i for i in range(500)]
    assert records[-1].site is not None
    assert "its process died" in records.note


def test_a_script_that_forgets_to_end_its_recording_has_a_whole_file(file: Path) -> None:
    """The end of the process is the end of the recording."""
    code = KILLED.partition("print")[0]
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(file)], check=True)
    assert not read(file).note


def row(**values: int) -> Rows:
    rows = np.zeros(1, LOG_ROW)
    for name, value in values.items():
        rows[name] = value
    return Rows(pool=0, count=1, columns=pack_rows(rows))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (row(site=2), "site 2"),
        (row(task=1), "task 1"),
        (row(tag=7), "tag 7"),
        (row(kind=200), "kind 200"),
        (row(level=5), "level 5"),
        (row(kind=Kind.WAITED, level=4), "level 4"),
        (Rows(pool=1, count=1, columns={}), "pool 1"),
        (Rows(pool=1 << 20, count=1, columns={}), "damaged"),
        (Rows(pool=0, count=2, columns={"time_ns": b"no columns"}), "damaged"),
        (Rows(pool=0, count=2, columns={"time_ns": zlib.compress(b"12345678" * 3)}), "damaged"),
        (NewNames(sites=[(1, 1), (1, 3)]), "call 3"),
        (NewNames(sites=[(9, 0)]), "line 9"),
    ],
)
def test_what_points_to_nothing_is_refused(file: Path, wrong: Block, said: str) -> None:
    """By what is wrong, when it is read and not when it is looked at; what is right beside it is read."""
    heading = Heading(version=VERSION, began=0, wall=0.0, frames=1, program=[], process=1, python="", asyncmem="")
    names = NewNames(places=[("a.py", 1, "f")], sites=[(1, 0)])
    right = [heading, Pool(number=0, name="p", device="none", limit=1), names, row(site=1, level=4)]
    file.write_bytes(MAGIC + b"".join(map(pack, right)))
    assert len(list(read(file))) == 1
    file.write_bytes(MAGIC + b"".join(map(pack, [*right, wrong])))
    with pytest.raises(BadTrace, match=said):
        read(file)


def test_what_is_no_such_file_is_refused(file: Path) -> None:
    """Other files, empty ones, and files of versions to come; each error names the file."""
    for content in (b"", b"something else entirely", MAGIC):
        file.write_bytes(content)
        with pytest.raises(BadTrace, match=r"run\.amem"):
            read(file)
    heading = Heading(version=VERSION + 1, began=0, wall=0.0, frames=1, program=[], process=1, python="", asyncmem="")
    file.write_bytes(MAGIC + pack(heading))
    with pytest.raises(BadTrace, match=f"version {VERSION + 1}"):
        read(file)


def test_what_later_versions_add_is_passed_over(file: Path) -> None:
    """A block of an unknown kind takes nothing from the rest."""
    recorded(file)
    payload = msgspec.msgpack.encode({"type": "weather", "rain": True})
    block = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload
    with file.open("ab") as more:
        more.write(block)
    records = read(file)
    assert len(records.of(Kind.ALLOCATED)) == 39
    assert "newer asyncmem" in records.note


def test_a_file_that_exists_is_not_written_over_unless_asked(file: Path) -> None:
    """The error comes before anything is recorded, and the file is as it was."""
    file.write_bytes(b"precious")
    with AsyncMemoryPool("simulated") as pool:
        with pytest.raises(FileExistsError), Recording(pool, file=file):
            pass
        assert file.read_bytes() == b"precious"
        assert not pool._opened.core.logged
        with Recording(pool, file=file, force=True):
            pool.allocate(5).free()
    assert len(read(file).of(Kind.FREED)) == 1


def test_without_msgspec_the_error_names_the_extra(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings need nothing; files say what to install."""
    monkeypatch.setitem(sys.modules, "msgspec", None)
    for name in ("amem", "reading", "spool"):
        monkeypatch.delitem(sys.modules, f"asyncmem.insight.{name}")
    with AsyncMemoryPool("simulated") as pool:
        with pytest.raises(ModuleNotFoundError, match=r"asyncmem\[insight\]"), Recording(pool, file=file):
            pass
        with Recording(pool) as recording:
            pool.allocate(5).free()
    assert len(recording.records().of(Kind.FREED)) == 1
    with pytest.raises(ModuleNotFoundError, match=r"asyncmem\[insight\]"):
        read(file)


def test_what_the_writer_was_too_slow_for_is_counted_and_what_is_live_is_not_lost(file: Path) -> None:
    """Records are dropped rather than a program be held up; what is live at the end is in the file all the same."""
    with AsyncMemoryPool("simulated") as pool:
        recording = Recording(pool, file=file, keep=10).__enter__()
        assert recording._spool is not None
        with recording._spool._writing:  # the disk takes its time
            held = [pool.allocate(nbytes) for nbytes in range(1, 101)]
            for _ in range(50):
                held.pop(0).free()
        recording.__exit__(None, None, None)
        records = recording.records()
        assert records.lost >= 140
        assert sorted(one.nbytes for one in records.live_at()) == list(range(51, 101))
        need_consistent(records)
        held.clear()


def overrun(file: Path, *, ends: bool) -> Records:
    """Record a program of which the writer misses how some of it is freed, and some of it allocated."""
    with AsyncMemoryPool("simulated") as pool:
        pool.allocate("1 MiB").free()
        recording = Recording(pool, file=file, keep=20).__enter__()
        assert recording._spool is not None
        early = [pool.allocate(nbytes) for nbytes in (1, 2, 3)]
        recording._spool.drain()
        with recording._spool._writing:  # the disk takes its time
            early.pop(0).free()
            kept = pool.allocate(4)
            short = pool.allocate(5)
            for _ in range(50):
                pool.allocate(6).free()
        recording._spool.drain()
        late = pool.allocate(7)
        short.free()
        if not ends:
            recording._spool.drain()
            found = recording.records()
            recording.__exit__(None, None, None)
        else:
            recording.__exit__(None, None, None)
            found = recording.records()
        for one in (*early, kept, late):
            one.free()
    return found


def test_what_was_freed_among_lost_records_is_not_taken_for_live(file: Path) -> None:
    """It is freed where records go on, and never a leak; what was allocated among them is one if it is kept."""
    records = overrun(file, ends=True)
    assert records.lost
    assert sorted(one.nbytes for one in records.live_at()) == [2, 3, 4, 7]
    assert leaks(records).nbytes == 2 + 3 + 4 + 7
    assert "taken as freed" in records.note
    freed = {one.nbytes: one for one in records.of(Kind.FREED)}
    first = {one.nbytes: one for one in records.of(Kind.ALLOCATED)}[1]
    assert first.time + freed[1].lifetime == pytest.approx(freed[1].time)
    taken = {one.nbytes: one.time for one in records if one.kind in {Kind.ALLOCATED, Kind.HELD}}
    assert taken[3] < taken[4] <= taken[5] < taken[7], "what was allocated meanwhile is where it belongs"
    need_consistent(records)


def test_file_that_was_not_ended_says_what_is_not_known(file: Path) -> None:
    """Without the list of what is live at the end, what was freed among lost records cannot be told from it."""
    records = overrun(file, ends=False)
    assert 1 in {one.nbytes for one in records.live_at()}
    assert "counts as live" in records.note


def test_recording_lasts_until_it_ends(file: Path) -> None:
    """And not only until the last record: how old a leak is counts from there."""
    with AsyncMemoryPool("simulated") as pool:
        kept = pool.allocate(1)
        with Recording(pool, file=file) as filed, Recording(pool) as recording:
            held = pool.allocate(5)
            time.sleep(0.05)
            going_on = recording.records()
        for records in (going_on, recording.records(), filed.records()):
            taken = next(one for one in records if one.nbytes == 5)
            assert records.duration >= taken.time + 0.04
            assert leaks(records).lines[0].age >= 0.04
            assert records.of(Kind.FREED).duration == records.duration
        held.free()
        kept.free()


def test_records_asked_for_on_the_way_are_not_the_last_word() -> None:
    """What comes after a look is in the next one, also where that comes after the end."""
    with AsyncMemoryPool("simulated") as pool, Recording(pool) as recording:
        pool.allocate(1).free()
        before = len(recording.records().of(Kind.ALLOCATED))
        pool.allocate(2).free()
    assert before == 1
    assert len(recording.records().of(Kind.ALLOCATED)) == 2
    assert recording.records() is recording.records()


@pytest.mark.asyncio
async def test_a_file_is_opened_and_ended_off_the_loop(file: Path) -> None:
    """The loop's thread does not block on it."""
    async with AsyncMemoryPool("simulated") as pool, Recording(pool, file=file) as recording:
        (await pool.allocate_async(100)).free()
    records = await asyncio.to_thread(recording.records)
    assert len(records.of(Kind.FREED)) == 1


def test_an_error_of_the_disk_is_raised_at_the_end(file: Path) -> None:
    """The program goes on without the file, and hears of it where recording ends."""
    with AsyncMemoryPool("simulated") as pool:
        recording = Recording(pool, file=file).__enter__()
        assert recording._spool is not None
        os.truncate(file, 0)
        read_only = os.open(file, os.O_RDONLY)
        os.dup2(read_only, recording._spool._file.fileno())  # as if the disk had gone
        os.close(read_only)
        pool.allocate(100).free()
        with pytest.raises(OSError, match="Bad file descriptor"):
            recording.__exit__(None, None, None)
        assert not pool._opened.core.logged


def test_file_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may change its folder while it is recorded."""
    monkeypatch.chdir(tmp_path)
    with AsyncMemoryPool("simulated") as pool, Recording(pool, file="run.amem") as recording:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        pool.allocate(5).free()
        assert len(recording.records().of(Kind.FREED)) == 1
    assert len(recording.records().of(Kind.FREED)) == 1
    assert (tmp_path / "run.amem").exists()


def wait_for(recording: Recording, state: str) -> None:
    end = time.monotonic() + 60
    while not repr(recording).endswith(f": {state}>"):
        assert time.monotonic() < end, recording
        time.sleep(0.001)


@pytest.mark.may_block
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.asyncio
async def test_recording_that_is_cancelled_while_it_begins_is_over(
    file: Path, monkeypatch: pytest.MonkeyPatch, *, early: bool
) -> None:
    """Whether the thread that opens the file is done after the cancellation, or before the loop hears of it."""
    going, may = threading.Event(), threading.Event()
    begin = Recording.__enter__

    def slow(self: Recording) -> Recording:
        going.set()
        assert may.wait(60)
        return begin(self)

    monkeypatch.setattr(Recording, "__enter__", slow)
    async with AsyncMemoryPool("simulated") as pool:
        recording = Recording(pool, file=file)
        task = asyncio.create_task(recording.__aenter__())
        assert await asyncio.to_thread(going.wait, 60)
        if not early:
            may.set()
            wait_for(recording, "going on")  # and the loop does not turn meanwhile
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may.set()
        await asyncio.to_thread(wait_for, recording, "over")
        pool.allocate(5).free()
        assert not recording.records().of(Kind.FREED)
