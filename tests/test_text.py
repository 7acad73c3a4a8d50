"""Text that strangers chose goes through every output, and steers no terminal, forges no line and breaks no format."""

import asyncio
import contextlib
import csv
import inspect
import io
import json
import logging
import os
import pickle
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry
from rich.console import Console

import asyncmem
from asyncmem import AsyncMemoryPool, OutOfMemoryError, errors
from asyncmem.cli.app import commands
from asyncmem.cli.doctor import Diagnosis, OptionLine, show_diagnosis
from asyncmem.cli.machine import DeviceLine, describe_machine
from asyncmem.cli.top import listed, picture
from asyncmem.facts import OutOfMemoryFacts, OwnerInfo, Shortfall
from asyncmem.insight import (
    AllocationTracker,
    LifetimeAnalyzer,
    Recording,
    Records,
    analyze_allocation_patterns,
    dump_allocation_trace,
    profile_memory,
    read,
    read_plan,
    write_plan,
)
from asyncmem.insight.exports import FORMATS
from asyncmem.insight.live.server import look, said
from asyncmem.insight.prometheus import PoolCollector
from asyncmem.insight.reports.summary import summarize
from asyncmem.insight.trackers import Watch
from asyncmem.pipeline import Pipeline
from asyncmem.pipeline import stage as a_stage
from asyncmem.pipeline.parallel import ParallelStage, PipelineParallel
from asyncmem.pipeline.report import ParallelReport, ParallelStageReport, PipelineReport, StageReport, show
from asyncmem.planning import InferenceMemoryEstimate, read_model
from asyncmem.pool.alarm import alarm
from asyncmem.replay import Journal, Trace
from asyncmem.text import MOST, encodable, printable, printable_lines, quoted, to_json

pytestmark = pytest.mark.may_block

ROOT: Final = Path(__file__).parents[1]
MARK: Final = "mark7"
"""What has to be left of each text, so that it is recognized."""

STEERING: Final = "\x1b[2J\x1b]0;pwned\x07\x1b[8m\x08\x9b31m\x7f\x00"
HOSTILE: Final = {
    "escape sequences": MARK + STEERING,
    "ends of lines": f"{MARK}\nforged: all is well\r\vforged\x85forged\u2028forged\u2029\tforged",
    "order and hiding": f"{MARK}\u202edetrever\u2066\u2069\u200b\u200d\u2060\ufeff\u061c\U000e0041\xad",
    "no Unicode": os.fsdecode(b"mark7-\xff\xc3.bin") + "\ud83d",
    "a formula": f"=HYPERLINK({MARK});@SUM(1)|+cmd",
    "a formula behind blanks": f"\t -1+{MARK}",
    "tags of HTML": f"</script><script>alert('{MARK}')</script><img src=x onerror=\"alert(1)\"><!-- & ]]>",
    "markup": f"{MARK}[red][/] [link=http://x]a[/link] [/bold] :skull: {{0}} %s %(x)d $$x$$ @tag $index",
    "all of 100,000 letters": MARK + "x" * 100_000,
}
EVERYTHING: Final = "=" + "".join(HOSTILE.values())


def is_shown(text: str) -> bool:
    """Whether nothing in a text steers what shows it; ends of lines are the output's own."""
    return text.encode("utf-8").decode() == text and all(one == "\n" or one.isprintable() for one in text)


def texts_in(value: object) -> Iterator[str]:
    """All texts of something that was JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for one in pair for text in texts_in(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in texts_in(one))


# -- a world in which all names are hostile ----------------------------------------------------------------------------


@dataclass
class World:
    """A text, and what was made with it wherever a name can be chosen."""

    text: str
    folder: Path
    records: Records
    pool: AsyncMemoryPool
    file: str
    said: list[str] = field(default_factory=list)
    """What was printed, warned of and logged meanwhile."""

    @property
    def argument(self) -> str:
        """The text as a command line can have it."""
        return re.sub("[\0\ud83d]", "", self.text)

    def path(self, end: str) -> str:
        """The path of a file whose name is hostile, too; names have at most 255 bytes."""
        return str(self.folder / (self.argument.replace("/", "")[:40] + end))


def allocating(text: str) -> Callable[..., Any]:
    """A function whose file and name are hostile: it calls what it is given."""
    space: dict[str, Any] = {}
    exec(compile("def call(what):\n    return what()", "x", "exec"), space)
    call = space["call"]
    call.__code__ = call.__code__.replace(co_filename=text.replace("\0", ""), co_name=text, co_qualname=text)
    return call  # type: ignore[no-any-return]


@cache
def world(text: str, folder: Path) -> World:
    """Record a pool, a task, a thread, a budget and buffers of that name: held, waited for, leaked and refused."""
    folder.mkdir()
    call = allocating(text)
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    logging.getLogger("asyncmem").addHandler(handler)
    snapshot, journal = (str(folder / name) for name in ("oom.json", "journal.jsonl"))
    pool = AsyncMemoryPool(
        "simulated", name=text, limit="8 MiB", oom_snapshot=snapshot, journal=journal, stall_after="10 ms"
    )
    found = World(text, folder, None, pool, "")  # type: ignore[arg-type]
    found.file = found.path(".amem")

    async def program() -> None:
        async def wait() -> None:
            with contextlib.suppress(asyncmem.PoolTimeout):
                await call(lambda: pool.allocate_async("6 MiB", tag=text, timeout=0.05))

        async with pool, pool.allocate_async("3 MiB", tag=text):
            opened.append(pool._opened)
            keep.append(call(lambda: pool.allocate("1 MiB", tag=text)))
            thread = threading.Thread(target=lambda: call(lambda: pool.allocate("8 KiB", tag=text).free()), name=text)
            thread.start()
            thread.join()
            with contextlib.suppress(OutOfMemoryError), pool.owner(text):
                call(lambda: pool.allocate("9 MiB", tag=text))
            await asyncio.create_task(wait(), name=text)
            part = pool.budget(text, limit="1 MiB")
            with contextlib.suppress(asyncmem.PoolTimeout):
                found.said.append(repr(part))
                with part.allocate("1 MiB", tag=text):
                    await call(lambda: part.allocate_async("1 MiB", tag=text, timeout=0.01))
            figures = generate_latest(metrics()).decode().splitlines()
            figures = [line for line in figures if MARK in line]  # other tests' pools have some, too
            found.said += [repr(pool), pool.summary(), pool._repr_html_(), "\n".join(figures), said()]
            found.said.append(top_of(look()))

    keep: list[Any] = []
    opened: list[Any] = []
    with warnings.catch_warnings(record=True) as warned, Recording(pool, file=found.file, frames=3) as recording:
        warnings.simplefilter("always")
        with Watch(limit=1, leaks=True) as watch, profile_memory(pool) as profile:
            tracker = AllocationTracker(pool)
            with tracker:
                asyncio.run(program())
        found.said += [repr(recording), watch.complaint(), profile.memory_summary(), tracker.report()]
        found.said += list(map(str, tracker.live()))
    keep.clear()
    end = time.monotonic() + 60
    while not opened[0].released and time.monotonic() < end:  # the worker does it, now that the last buffer is free
        time.sleep(0.001)
    found.records = profile.records()
    logging.getLogger("asyncmem").removeHandler(handler)
    found.said += [warnings.formatwarning(one.message, one.category, one.filename, one.lineno, "") for one in warned]
    found.said.append(heard.getvalue())
    return found


def metrics() -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    return registry


def top_of(now: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(now))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], World]]:
    """The world of a text, made once."""
    folder = tmp_path_factory.mktemp("worlds")
    yield lambda text: world(text, folder / str(sorted({*HOSTILE.values(), EVERYTHING}).index(text)))
    world.cache_clear()


@pytest.fixture(params=[*HOSTILE, "everything"])
def made(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> World:
    """The world of each text."""
    return worlds(HOSTILE.get(request.param, EVERYTHING))


def need_shown(told: str, where: str = "", *, marked: bool = True) -> None:
    """Fail where a text is not harmless, or cannot be recognized."""
    odd = {one for one in told if one != "\n" and not one.isprintable()}
    assert is_shown(told), f"{where}: {odd!r} in {told[:2000]!r}"
    assert not any(line.startswith("forged") for line in told.splitlines()), f"{where}: {told[:2000]}"
    assert len(told) < 60_000, f"{where}: a name of 100,000 letters is shown whole"
    assert MARK in told or not marked, f"{where}: {told[:2000]}"


# -- the function ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "attention.layer.12", "Größe: 12 µs", "漢字 🦊 a\u0301", r"C:\x1b", "-", "[red]"])
def test_harmless_text_stays_as_it_is(text: str) -> None:
    """Whatever the language."""
    assert printable(text) is text
    assert printable_lines(text) is text
    assert encodable(text) == text
    assert quoted(text) == repr(text)


def test_each_character_that_steers_or_hides_is_escaped() -> None:
    """All are tried that Unicode has for that."""
    everything = "".join(map(chr, [*range(0x11000), *range(0xE0000, 0xE0200)]))
    shown = printable(everything, most=None)
    assert is_shown(shown)
    assert "\n" not in shown
    assert printable("\x1b\x07\n\t\x9b\u202e\u2028\udcff\U000e0041") == (
        r"\x1b\x07\n\t\x9b\u202e\u2028\udcff\U000e0041"
    )
    assert printable_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"


def test_long_text_says_how_much_is_left_out() -> None:
    """Both ends stay, and what was cut is cut no more."""
    told = printable("a" * 50_000 + "z" * 50_000)
    assert len(told) <= MOST
    left = int(re.fullmatch(r"a+\.\.\.\(([\d,]+) characters left out\)\.\.\.z+", told)[1].replace(",", ""))  # type: ignore[index]
    assert told.count("a") + told.count("z") - len("characters") + 7 + left >= 100_000 - 10
    assert printable(told) is told
    assert printable("a" * 2000, most=None) == "a" * 2000
    assert quoted("a" * 2000).startswith("'aaa")
    assert quoted("a" * 2000).endswith("aaa'")


def test_json_is_plain_ascii_that_every_reader_takes() -> None:
    """What UTF-8 can hold comes back as it was, and the rest with a backslash."""
    everything = "".join(map(chr, [*range(0x3000), *range(0xD7F0, 0xD800), *range(0xE000, 0x10100)]))
    told = to_json({everything: [everything, 1, None]}, indent=1)
    assert told.isascii()
    assert is_shown(told)
    assert json.loads(told) == {everything: [everything, 1, None]}
    assert json.loads(to_json("a\\\udcff\ud83d\\ud83d")) == r"a\\udcff\ud83d\ud83d"


# -- what pools and reports say ----------------------------------------------------------------------------------------


def test_all_that_a_pool_says_is_harmless(made: World) -> None:
    """Reprs, summaries, HTML, metrics, the live view, warnings and logs, while it was at work."""
    for number, told in enumerate(made.said):
        need_shown(
            told[: 50_000 if told.startswith("{") else None], f"said {number}", marked=False
        )  # JSON has all of it
    assert sum(MARK in told for told in made.said) >= len(made.said) - 3


def instance_of(hint: str, text: str) -> object:
    """Something of a type, with the text wherever it takes any."""
    facts = OutOfMemoryFacts(asked=1, device=text, level="pool 'a'", holders=((text, 1),), sites=((text, 1),))
    short = Shortfall(device=text, reason=text)
    owner = OwnerInfo(owner=text, held=1, waiting=1, age=1.0, site=text)
    known = {"Shortfall]": [short], "OwnerInfo]": [owner], "Sequence[str]": [text], "OutOfMemoryFacts": facts,
             "str": text, "object": text, "int": 1, "float": 1.0, "bool": True}  # fmt: skip
    return next(one for name, one in known.items() if name in hint)


KINDS: Final = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.AsyncmemError)]
OURS: Final = {
    "level",
    "holders",
    "hints",
    "hint",
    "what",
    "expected",
    "install",
    "advice",
    "call",
    "code_name",
    "action",
}
"""What these arguments say, nobody else has chosen; some of it has several lines."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_every_error_is_harmless(kind: type[errors.AsyncmemError], text: str) -> None:
    """With such text in every argument; attributes have it as it came, and so have copies."""
    if kind is errors.AsyncmemError:
        assert is_shown(str(kind(text)))
        return
    parameters = inspect.signature(kind).parameters
    given = {name: "it" if name in OURS else instance_of(str(one.annotation), text) for name, one in parameters.items()}
    raw = {name: one for name, one in given.items() if name in {"pool", "tag", "stage", "reason", "device", "file"}}
    first = [given.pop(name) for name, one in parameters.items() if one.kind == one.POSITIONAL_OR_KEYWORD]
    made = kind(*first, **given)
    for one in (made, pickle.loads(pickle.dumps(made))):
        need_shown(
            str(one),
            kind.__name__,
            marked=kind not in {errors.PoolTimeout, errors.InvalidRequest, errors.UnknownOption, errors.ReaderLost},
        )
        assert {name: getattr(one, name) for name in raw} == raw


def test_a_warning_shows_no_hostile_line(made: World) -> None:
    """Neither its text nor the file that it points at."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        alarm(made.text, RuntimeWarning, f"{made.text}:3")
    one = warned[0]
    assert is_shown(warnings.formatwarning(one.message, one.category, one.filename, one.lineno, ""))
    assert "\n" not in one.filename


def test_a_warning_may_point_at_code_without_lines() -> None:
    """As generated code is, and a frame between two lines."""

    def program() -> None:
        alarm("it is said", RuntimeWarning)

    program.__code__ = program.__code__.replace(co_linetable=b"")
    with pytest.warns(RuntimeWarning, match="it is said"):
        program()


def test_what_is_said_of_records_is_harmless(made: World) -> None:
    """Summaries, dumps, patterns, plans."""
    records = made.records
    out = io.StringIO()
    dump_allocation_trace(records, last=None, file=out)
    lifetimes = LifetimeAnalyzer.from_records(records)
    need_shown(out.getvalue(), "dump")
    sites = (str(one.site) for one in records if one.site)
    patterns, plan = analyze_allocation_patterns(records), lifetimes.compute_reuse_plan()
    said = (summarize(records), repr(records), patterns, plan, lifetimes.get_optimization_suggestions(), *sites)
    for number, told in enumerate(map(str, said)):
        need_shown(told, f"said {number}", marked=False)


def test_names_are_found_as_they_were_written(made: World) -> None:
    """By filters and groups, in memory and in a file, which has what UTF-8 can hold."""
    for records, known in ((made.records, made.text), (read(made.file), encodable(made.text))):
        assert known in {one.name for one in records.by("tag")}
        assert len(records.in_pool(made.pool.name)) == len(records) > 0
        assert known in {one.tag for one in records} & {one.task for one in records} & {one.thread for one in records}
        assert not records.note


def test_reports_of_pipelines_and_models_are_harmless(made: World) -> None:
    """As text, and as the table that is drawn while one runs."""
    stage = StageReport(
        name=made.text, workers=1, items=1, items_per_s=1.0, busy=0.1, waiting_for_memory=0.9, waiting_for_input=0.0,
        held_back=0.0, peak_bytes=0, kept_bytes=1,
    )  # fmt: skip
    report = PipelineReport(stages=(stage, stage), items=1, seconds=1.0, limit_bytes=1, peak_bytes=1)
    part = ParallelStageReport(
        name=made.text, device=made.text, forward_s=1.0, backward_s=1.0, busy=0.5, live=1, peak_bytes=1, bound_bytes=1
    )
    parallel = ParallelReport(
        schedule="1F1B", micro_batches=1, stages=(part,), seconds=1.0, bubble=0.0, least_bubble=0.0, transfer_s=0.0,
        overlap=1.0,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=1000)

    async def shown() -> None:
        task = asyncio.create_task(show(lambda: report, console))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(shown())
    model = read_model({
        "model_type": made.text, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
        "num_attention_heads": 1,
    })  # fmt: skip

    async def work(item: object, _: object) -> object:
        return item

    work.__name__ = work.__qualname__ = made.text
    step = ParallelStage(work, work, saved=1, output=1, working=1, name=made.text)
    runner = PipelineParallel([step], [AsyncMemoryPool("host")])
    for shown_as in (repr(step), repr(runner), repr(a_stage(work))):
        need_shown(shown_as)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for told in (str(report), str(parallel), drawn, InferenceMemoryEstimate(model=model, seq_len=1).summary()):
        need_shown(told)


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("raised", [Nameless(), *map(ValueError, HOSTILE.values())], ids=["no text at all", *HOSTILE])
def test_what_a_stage_raises_is_told_in_one_line(raised: Exception) -> None:
    """Also where its own class cannot say it."""

    async def program() -> None:
        async def stage(item: int, pool: object) -> None:  # noqa: ARG001 -- what a stage is given
            raise raised

        async with AsyncMemoryPool("host", limit="1 MiB") as pool, Pipeline(stage, pool=pool) as pipe:
            await anext(pipe.map([1]))

    with pytest.raises(asyncmem.errors.StageError) as failed:
        asyncio.run(program())
    need_shown(str(failed.value), marked=not isinstance(raised, Nameless))
    assert "\n" not in str(failed.value)


# -- files -------------------------------------------------------------------------------------------------------------


def written(records: Records, to: str) -> bytes:
    out = io.BytesIO()
    FORMATS[to][1](records, out)
    return out.getvalue()


def check_csv(made: World, content: bytes) -> None:
    told = content.decode("utf-8")
    assert is_shown(told)
    rows = list(csv.reader(io.StringIO(told)))
    assert len(rows) == len(made.records) + 1
    cells = {cell for row in rows for part in re.split("[;|]", ",".join(row)) for cell in (*row, part)}
    assert not [cell for cell in cells if re.match(r"\s*[=+@\t\r]|\s*-\D", cell)]
    assert any(MARK in cell for cell in cells)


def check_json(made: World, content: bytes) -> None:
    assert content.isascii()
    assert is_shown(content.decode())
    found = json.loads(content)
    assert [one for one in texts_in(found) if encodable(one) != one] == []
    assert encodable(made.text) in set(texts_in(found))


def check_perfetto(made: World, content: bytes) -> None:
    assert content.isascii()
    told = list(texts_in(json.loads(content)))
    assert all(map(is_shown, told))
    assert any(MARK in one for one in told)
    del made


def check_torch(made: World, content: bytes) -> None:
    told = list(texts_in(pickle.loads(content)))
    assert all(map(is_shown, told))
    assert printable(made.text, most=None) in told


EXPORTS: Final = {"csv": check_csv, "json": check_json, "perfetto": check_perfetto, "torch": check_torch}


@pytest.mark.parametrize("to", FORMATS)
def test_exports_are_harmless(made: World, to: str) -> None:
    """Each in its way; one that is not checked here has to be."""
    EXPORTS[to](made, written(made.records, to))


def test_files_of_a_pool_are_valid(made: World) -> None:
    """Its snapshot of an out-of-memory error and its journal; the journal is read as it was written."""
    check_json(made, (made.folder / "oom.json").read_bytes())
    assert Journal(made.folder / "journal.jsonl").pool == printable(made.pool.name)


def test_a_plan_is_found_by_the_names_that_the_program_has(made: World) -> None:
    """Also once it went through a file, which holds no more than UTF-8 can."""
    analyzer = LifetimeAnalyzer()
    analyzer.record_usage(0, {made.text: 4096})
    path = made.path(".json")
    write_plan(analyzer.compute_reuse_plan(), path)
    check_json(made, Path(path).read_bytes())
    with AsyncMemoryPool("simulated", limit="8 MiB") as pool, pool.apply_plan(read_plan(path), strict=True) as planned:
        planned.allocate(key=made.text).free()
        planned.next_step()
        planned.allocate(4096, key=made.text).free()


def test_metrics_of_names_that_look_alike_are_one(made: World) -> None:
    """Prometheus takes a scrape in which no series comes twice, and reads the label as it is shown."""
    with contextlib.ExitStack() as pools:
        for name in (made.pool.name, printable(made.pool.name)):
            pools.enter_context(AsyncMemoryPool("simulated", name=name, limit="8 MiB"))
        told = generate_latest(metrics()).decode()
    need_shown(told)
    series = [line.rpartition(" ")[0] for line in told.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series))
    labels = {one.labels["pool"] for family in text_string_to_metric_families(told) for one in family.samples}
    assert printable(made.pool.name) in labels
    assert printable(made.pool.name) == made.pool.name or made.pool.name not in labels


@pytest.mark.parametrize("text", [HOSTILE["no Unicode"], EVERYTHING], ids=["no Unicode", "everything"])
def test_a_page_has_no_script_but_its_own(worlds: Callable[[str], World], text: str, tmp_path: Path) -> None:
    """In the file of `asyncmem report`, and in what a notebook shows."""
    made = worlds(text)
    bundle = made.records._repr_mimebundle_()
    need_shown(bundle["text/plain"])
    path = tmp_path / "page.html"
    done = CliRunner().invoke(commands, ["report", made.file, "-o", str(path), "--force"])
    assert done.exit_code == 0, done.output
    for told in (path.read_text(encoding="utf-8"), bundle["text/html"]):
        assert MARK in told
        assert told.count("<script>alert") == told.count('onerror="alert') == 0
        assert not {"\x1b", "\x00", "\x9b", "\u202e", "\u2066", "\udcff"} & set(told)


# -- the command -------------------------------------------------------------------------------------------------------


def run_command(*arguments: str, status: tuple[int, ...] = (0, 1, 2)) -> str:
    done = CliRunner().invoke(commands, list(arguments), prog_name="asyncmem", env={"COLUMNS": "200"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in status, done.output
    return done.output


def of_records(name: str, *options: str) -> Callable[[World], Iterable[str]]:
    """A report as text and as JSON."""

    def told(made: World) -> Iterable[str]:
        yield run_command(name, made.file, *options)
        found = run_command(name, made.file, *options, "--json")
        yield found
        assert found.isascii()
        json.loads(found)

    return told


def tables(made: World) -> Iterable[str]:
    for by in ("tag", "site", "task", "thread", "pool", "nbytes"):
        yield from of_records("table", "--by", by)(made)


def plans(made: World) -> Iterable[str]:
    output = made.path(".plan.json")
    shown = printable(encodable(made.pool.name))
    yield run_command("plan", made.file, "--pool", shown, "-o", output, "--force", status=(0,))
    yield run_command("plan", made.file, "-o", output)
    yield run_command("plan", made.file, "--pool", made.argument + "?")
    yield run_command("plan", made.file, "--json")


def pages(made: World) -> Iterable[str]:
    yield run_command("report", made.file, "-o", made.file)


def exported(made: World) -> Iterable[str]:
    output = made.path(".csv")
    for _ in range(2):
        yield run_command("export", made.file, "--to", "csv", "-o", output)


def replays(made: World) -> Iterable[str]:
    path, page = made.path(".npz"), made.folder / "plot.html"
    ops = {"op": [0, 0, 1, 1], "stream": [0] * 4, "id": [0, 1, 0, 1], "nbytes": [4096] * 4, "time_us": [0, 1, 2, 3]}
    trace = Trace(**{name: np.array(one) for name, one in ops.items()}, name=made.text, note=f"It is {made.text}.")  # type: ignore[arg-type]
    yield repr(trace)
    trace.save(path)
    yield run_command("replay", path, "--plot", str(page))
    yield page.read_text(encoding="utf-8")
    yield run_command("replay", path, "--limit", "1 KiB", "--json")[:50_000]
    yield run_command("replay", path, "--limit", "1 KiB")
    yield run_command("replay", path, "--advise")
    yield run_command("replay", path, "--device", "simulated")
    yield run_command("replay", path, "--policy", made.argument)
    yield run_command("replay", path, "--limit", made.argument)


def journals(made: World) -> Iterable[str]:
    path = Path(made.path(".jsonl"))
    lines = (made.folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines))
    yield run_command("journal", str(path))
    yield run_command("journal", "--replay", str(path))
    changed = [json.loads(line) for line in lines]
    at = next(number for number, call in enumerate(changed[1:], 1) if call[0] == "serve")
    changed[at][1][0][made.text] = made.text
    changed[-1] = [made.text, [made.text], made.text]
    path.write_text("".join(to_json(call) + "\n" for call in changed))
    yield run_command("journal", str(path))
    yield run_command("journal", "--replay", str(path))
    yield run_command("journal", "--with", f"{made.argument}=1", str(path))


def estimates(made: World) -> Iterable[str]:
    path = made.path(".config.json")
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    Path(path).write_text(json.dumps({"model_type": made.text, **dict.fromkeys(keys, 64)}), encoding="utf-8")
    yield run_command("estimate", path, "--room", "1 GiB")
    yield run_command("estimate", path, "--room", "1 GiB", "--json")
    Path(path).write_text(json.dumps({"model_type": made.text}), encoding="utf-8")
    yield run_command("estimate", path)
    Path(path).write_text(json.dumps({"model_type": "llama", **dict.fromkeys(keys, made.text)}), encoding="utf-8")
    yield run_command("estimate", path)


def diagnoses(made: World) -> Iterable[str]:
    text = made.text
    line = DeviceLine(
        name=text, available=True, detail=text, segments=(text,), segments_reason=text, peers=(text,)
    )  # fmt: skip
    found = Diagnosis(
        machine=describe_machine(), devices=(line,),
        options=(OptionLine(name="name", value=text, origin="ASYNCMEM_NAME"),),
        nvidia={"found": False, "reason": text, "cards": [], "driver": text, "cuda": text}, options_error=text,
        options_warnings=(text,),
        advice=(text,),
    )  # fmt: skip
    out = io.StringIO()
    show_diagnosis(found, Console(file=out, width=200))
    yield out.getvalue()


def programs(made: World) -> Iterable[str]:
    name = made.argument[:200]
    yield run_command("run", name)
    yield run_command("run", "-m", name)
    yield run_command("run", "-o", made.file, __file__)


def lives(made: World) -> Iterable[str]:
    now = look()
    now["program"] = [made.text]
    yield listed([now])
    yield top_of(now)


COMMANDS: Final[dict[str, Callable[[World], Iterable[str]]]] = {
    **{name: of_records(name) for name in ("summary", "stats", "timeline", "segments", "waits", "leaks")},
    "tree": of_records("tree", "--all"),
    "table": tables,
    "plan": plans,
    "export": exported,
    "report": pages,
    "replay": replays,
    "journal": journals,
    "estimate": estimates,
    "doctor": diagnoses,
    "run": programs,
    "top": lives,
}
OWN: Final = {"demo", "bench", "costs", "completion"}
"""Commands that show no names but their own."""


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_nothing_that_steers_a_terminal(made: World, name: str) -> None:
    """On standard output and standard error, as text and as JSON, whatever file and arguments are called."""
    told = list(COMMANDS[name](made))
    for number, one in enumerate(told):
        # JSON has names as they are, in ASCII.
        long = one.lstrip()[:1] in "[{" and len(one) > 60_000
        assert is_shown(one) if long else True
        if not long:
            need_shown(one, f"{name} {number}", marked=False)
    assert name in {"timeline", "stats", "waits"} or any(MARK in one for one in told)


def test_mistakes_on_the_command_line_are_repeated_harmlessly(made: World) -> None:
    """By the command itself, and by click."""
    text = made.argument
    mistakes = [
        [text], [f"--{text}"], ["summary", text], ["summary", f"--{text}"], ["summary", made.file, text],
        ["table", made.file, "--by", text], ["timeline", made.file, "--moments", text], ["top", text],
    ]  # fmt: skip
    for arguments in mistakes:
        need_shown(run_command(*arguments, status=(1, 2)), str(arguments)[:200], marked=arguments[-1] == text)


def test_every_command_is_looked_at() -> None:
    """A new one that shows names has to be among them."""
    assert set(commands.list_commands(click.Context(commands))) == set(COMMANDS) | OWN


def test_every_json_is_made_in_one_place() -> None:
    """`json.dumps` leaves lone surrogates in it, which other readers refuse; items on a link have no other reader."""
    others = {
        str(path.relative_to(ROOT / "asyncmem"))
        for path in (ROOT / "asyncmem").rglob("*.py")
        if re.search(r"\bjson\.dumps?\(", path.read_text(encoding="utf-8"))
    }
    assert others == {"text.py", "replay/journal.py", "share/items.py"}


@pytest.mark.parametrize("name", ["a\0b", "a\ud83d"])
def test_names_that_no_file_can_have_end_nothing(name: str, tmp_path: Path) -> None:
    """They are refused by name, at once."""
    path = str(tmp_path / name)
    with pytest.raises(asyncmem.InvalidRequest, match="file"), Recording(file=path):
        pass
    with pytest.raises(asyncmem.InvalidRequest, match="journal"), AsyncMemoryPool("simulated", journal=path):
        pass
    with pytest.raises(asyncmem.InvalidRequest, match="oom_snapshot"):
        AsyncMemoryPool("simulated", limit="1 MiB", oom_snapshot=path)
