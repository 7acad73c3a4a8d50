"""The journal of a pool: written while it lives, read, and replayed to the same decisions."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import asyncmem
from asyncmem import AsyncMemoryPool, DeviceError, InvalidRequest, PoolTimeout
from asyncmem.core import Heap
from asyncmem.devices import Simulated
from asyncmem.errors import BadTrace
from asyncmem.replay import Journal
from asyncmem.replay.journal import PARAMETERS

CORE = Path(__file__).parents[2] / "asyncmem" / "core"
KIB, MIB = 1 << 10, 1 << 20


async def busy(pool: AsyncMemoryPool) -> None:
    """Grow, wait, time out, be cancelled, fill a budget and a lease, take a batch, resize."""

    async def task(number: int) -> None:
        for turn in range(6):
            async with pool.allocate_async((number + turn) % 4 * MIB + MIB):
                await asyncio.sleep(0)

    await asyncio.gather(*map(task, range(8)))
    async with pool.allocate_async(10 * MIB):
        with pytest.raises(PoolTimeout):
            await pool.allocate_async(8 * MIB, timeout=0.002)
        waiting = asyncio.create_task(hold(pool, 8 * MIB))
        await asyncio.sleep(0)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        late = asyncio.create_task(hold(pool, 7 * MIB))
        await asyncio.sleep(0)
    await late
    for buffer in await pool.allocate_batch([MIB, 300, 2 * MIB]):
        buffer.free()
    pool.allocate(MIB).free()  # at once, however the tasks took turns
    budget = pool.budget("few", limit=2 * MIB)
    async with budget.allocate_async(MIB) as held:
        other = asyncio.create_task(hold(budget, 2 * MIB))
        await asyncio.sleep(0)
        held.free()
        await other
    async with pool.lease(2 * MIB) as lease, lease.allocate_async(MIB):
        pool.check()
    pool.configure(limit=8 * MIB)
    async with pool.allocate_async(6 * MIB):
        await pool.trim()


async def hold(share: AsyncMemoryPool | asyncmem.Budget, nbytes: int) -> None:
    async with share.allocate_async(nbytes):
        await asyncio.sleep(0)


def journal_of(
    program: Callable[[AsyncMemoryPool], Awaitable[None]], folder: Path, device: object, **options: object
) -> Journal:
    """Have a program use a pool with a journal, and return that."""
    path = folder / "pool.jsonl"

    async def main() -> None:
        async with AsyncMemoryPool(device, journal=str(path), **options) as pool:  # type: ignore[arg-type]
            await program(pool)

    asyncio.run(main())
    return Journal(path)


def names(journal: Journal) -> set[str]:
    """The calls in a journal."""
    return {json.loads(line)[0] for line in journal.path.read_text().splitlines()[1:]}


@pytest.fixture
def simple(tmp_path: Path) -> Journal:
    """A journal of a busy pool."""
    return journal_of(busy, tmp_path, "simulated", limit="16 MiB", segment_size="4 MiB")


# -- the same again ----------------------------------------------------------------------------------------------------


@pytest.mark.may_block
@pytest.mark.parametrize(
    ("device", "segments"),
    [("host", "auto"), ("host", "direct"), ("simulated", "auto"), ("simulated", "direct"), ("simulated", "paged")],
)
def test_a_pool_decides_the_same_again(device: str, segments: str, tmp_path: Path) -> None:
    """Growth, waiting, deadlines, cancellation, budgets, leases, batches and limits, on a loop and on the worker."""
    journal = journal_of(busy, tmp_path, device, limit="16 MiB", segment_size="4 MiB", segments=segments)
    assert {"submit", "claim", "cancel", "expire", "open_share", "configure", "asleep", "close"} <= names(journal)
    assert journal.replay() is None


def test_streams_and_fences_are_the_same_again(tmp_path: Path) -> None:
    """What another stream may take depends on the fences that were seen, which are told in their order."""

    async def program(pool: AsyncMemoryPool) -> None:
        streams = [pool.device.create_stream() for _ in range(3)]
        for turn in range(60):
            stream, other = streams[turn % 3], streams[(turn + 1) % 3]
            buffer = await pool.allocate_async((turn % 5 + 1) * 300 * KIB, stream=stream)
            stream.launch(0.001, writes=[buffer])
            if turn % 2:
                buffer.use_on(other)
                other.launch(0.002, reads=[buffer])
            buffer.free(**({"stream": other} if turn % 4 == 3 else {}))

    device = Simulated(capacity="4 MiB")
    journal = journal_of(program, tmp_path, device, limit="4 MiB", segment_size="1 MiB", overlap=0)
    assert {"close_epoch", "publish", "mark_done", "ordered", "looked"} <= names(journal)
    assert journal.replay() is None


def test_faults_of_the_device_are_the_same_again(tmp_path: Path) -> None:
    """A refused growth is told as one."""
    device = Simulated(capacity="8 MiB")

    async def program(pool: AsyncMemoryPool) -> None:
        device.fail("allocate_segment")
        with pytest.raises(DeviceError):
            await pool.allocate_async(MIB)
        async with pool.allocate_async(MIB):
            pass

    journal = journal_of(program, tmp_path, device, limit="4 MiB")
    assert "grow_failed" in names(journal)
    assert journal.replay() is None


def test_looking_at_a_pool_is_told_where_it_changes_anything(tmp_path: Path) -> None:
    """Large blocks that come and go in turn are joined when somebody looks at all, and get other numbers after it."""

    def program(pool: AsyncMemoryPool) -> None:
        draw = random.Random(0)
        held: list[asyncmem.Buffer] = []
        for _ in range(600):
            buffer = pool.allocate(draw.randrange(MIB, 2 * MIB) * draw.choice([1, 1, 4]))
            if draw.random() < 0.05:
                held.append(buffer)
            else:
                buffer.free()
            if len(held) > 6:
                held.pop(0).free()
            if draw.random() < 0.1:
                pool.check()
        for buffer in held:
            buffer.free()

    journal = journal_of(partial(asyncio.to_thread, program), tmp_path, "simulated", limit="128 MiB")
    assert journal.replay() is None
    lines = journal.path.read_text().splitlines(keepends=True)
    journal.path.write_text("".join(line for line in lines if not line.startswith('["coalesce"')))
    assert journal.replay() is not None


def test_threads_are_told_in_one_order(tmp_path: Path) -> None:
    """Whoever takes and frees at once with others stands in the journal where the heap has heard of it."""

    def work(pool: AsyncMemoryPool, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            with suppress(asyncmem.OutOfMemoryError):
                pool.allocate(draw.choice([4096, 100 * KIB, 3 * MIB])).free()

    async def program(pool: AsyncMemoryPool) -> None:
        await asyncio.gather(*(asyncio.to_thread(work, pool, seed) for seed in range(4)))

    assert journal_of(program, tmp_path, "simulated", limit="8 MiB").replay() is None


def test_calls_that_raise_are_told_too(tmp_path: Path) -> None:
    """What was refused then is refused again."""
    heap = Heap(journal=True)
    with pytest.raises(ValueError, match="not a live block"):
        heap.free(7)
    path = tmp_path / "one.jsonl"
    path.write_text('{"journal": 1, "asyncmem": "0", "pool": "a", "device": "b"}\n' + heap.read_journal().decode())
    assert path.read_text().splitlines()[-1] == '["free",[7,[]],"error"]'
    assert Journal(path).replay() is None


def test_another_policy_is_noticed_by_its_first_difference(simple: Journal) -> None:
    """The row, the time and the call are named, with what came of it then and now."""
    found = simple.replay(segment_size=8 * MIB)
    assert found is not None
    assert found.call.startswith("submit: request 1")
    assert "grow: request 1, job 1, 4 MiB" in found.expected[0]
    assert "grow: request 1, job 1, 8 MiB" in found.got[0]
    assert str(found).startswith(f"row {found.row} at {found.time} s: submit")


def test_a_setting_that_there_is_not_is_refused_by_name(simple: Journal) -> None:
    """As options are."""
    with pytest.raises(InvalidRequest, match="did you mean 'bypass'"):
        simple.replay(by_pass=0)


def test_every_call_that_is_written_is_known() -> None:
    """The core's sources write no other calls than those that can be made again."""
    sources = "".join(path.read_text() for path in (*CORE.glob("heap/*.[ch]pp"), *CORE.glob("scheduler/*.cpp")))
    written = set(re.findall(r"ASYNCMEM_(?:WRITTEN|ENTER)\((\w+)[,)]", sources)) - {"name", "__VA_ARGS__"}
    written |= set(re.findall(r'journal(?:_|\(\))->(?:write|add)\(\s*"(\w+)"', sources))
    assert written == set(PARAMETERS)


# -- in words ----------------------------------------------------------------------------------------------------------


def test_lines_say_what_was_told_and_decided(simple: Journal) -> None:
    """Requests by number, sizes with units, effects below their call."""
    lines = list(simple.lines())
    first = next(number for number, line in enumerate(lines) if "submit" in line)
    assert re.fullmatch(r" +0\.\d{6}  submit: request 1, 1 MiB, waits", lines[first])
    assert lines[first + 1].strip() == "→ grow: request 1, job 1, 4 MiB, need 1 MiB, arena 1"
    assert any(re.search(r"until \d+\.\d{6}", line) for line in lines)
    assert any(re.search(r"take: 1 MiB, fast → block \d+ at 0x", line) for line in lines)
    assert repr(simple) == f"<asyncmem.replay.Journal {str(simple.path)!r} of pool {simple.pool!r}>"


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_file_that_exists_stays(tmp_path: Path) -> None:
    """Later pools number theirs."""
    path = tmp_path / "a.jsonl"
    for _ in range(3):
        with AsyncMemoryPool("simulated", journal=str(path)) as pool:
            pool.allocate(4096).free()
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == ["a.2.jsonl", "a.3.jsonl", "a.jsonl"]
    assert all(Journal(tmp_path / one).replay() is None for one in found)


def test_a_file_that_cannot_be_made_is_said_when_the_pool_opens(tmp_path: Path) -> None:
    """Before anything is allocated."""
    pool = AsyncMemoryPool("simulated", journal=str(tmp_path / "no" / "a"))
    with pytest.raises(InvalidRequest, match="journal"):
        pool.allocate(1)


def test_a_program_that_just_ends_leaves_a_journal(tmp_path: Path) -> None:
    """Of a pool that nobody has closed, too."""
    program = "import asyncmem; pool = asyncmem.AsyncMemoryPool('simulated'); held = pool.allocate(4096)"
    path = tmp_path / "a.jsonl"
    environment = {**os.environ, "ASYNCMEM_JOURNAL": str(path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, check=True)
    journal = Journal(path)
    assert "claim" in names(journal)
    assert journal.replay() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a journal"),
        ("asyncmem", "a journal"),
        ("[" * 100_000, "a journal"),
        ('{"journal": 1}\n', "a journal"),
        ('{"journal": 2, "asyncmem": "0", "pool": "a", "device": "b"}\n', "version 1"),
    ],
)
def test_other_files_are_refused(text: str, expected: str, tmp_path: Path) -> None:
    """By what they should be."""
    path = tmp_path / "a"
    path.write_text(text)
    with pytest.raises(BadTrace, match=expected):
        Journal(path)


@pytest.mark.parametrize(
    "line",
    [
        "{}", "nonsense", "[]", '["take"]', '["take", [], null]', '["take", [[1]], null]', '["nothing", [], null]',
        '["take", [["a", 0, 0, -1, false, false, false]], null]', '["grew", [1, 2, 3], null]', '["__init__", [], null]',
        '["take_many", [[1, 0, 0, -1, false, false, false], 5], null]', "[" * 100_000, '["free", [1e400], null]',
        '["serve", [{"granularity": 0}, 0], null]', '["add_stream", [], null, {}]',
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(line: str, simple: Journal) -> None:
    """With its row, and before anything is made of it."""
    good = simple.path.read_text().splitlines()
    simple.path.write_text("\n".join([*good[:3], line, *good[3:], ""]))
    with pytest.raises(BadTrace) as caught:
        simple.replay()
    assert caught.value.row == 3
    assert str(simple.path) in str(caught.value)


def test_what_a_dying_process_has_left_is_read_up_to_the_torn_line(simple: Journal) -> None:
    """The last line may have no end."""
    whole = simple.path.read_bytes()
    simple.path.write_bytes(whole[:-7])
    assert simple.replay() is None
    assert len(list(simple.lines())) < len(whole.splitlines()) * 3


@pytest.mark.parametrize("seed", range(40))
def test_a_changed_number_is_a_difference_or_a_damaged_line(seed: int, simple: Journal) -> None:
    """And never more than that."""
    draw = random.Random(seed)
    rows = [json.loads(line) for line in simple.path.read_text().splitlines()]
    arguments = draw.choice([row[1] for row in rows[1:] if row[1]])
    while isinstance(arguments[at := draw.randrange(len(arguments))], list) and arguments[at]:
        arguments = arguments[at]
    arguments[at] = draw.choice([0, -1, 3, 1 << 20, 1 << 33, 1 << 64, None, "x", [], 1e300])
    simple.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with suppress(BadTrace):
        simple.replay()
