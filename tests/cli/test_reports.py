"""The commands that read files of records: for a person, as JSON, with their exit codes."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from click.testing import Result

from asyncmem import AsyncMemoryPool
from asyncmem.core import LOG_ROW
from asyncmem.insight import Kind, Recording, read, reports
from asyncmem.insight.amem import MAGIC, VERSION, Block, End, Heading, NewNames, Pool, Rows, pack, pack_rows
from asyncmem.insight.exports import FORMATS
from asyncmem.insight.reports.summary import summarize

Invoke = Callable[..., Result]

REPORTS = ("summary", "stats", "table", "tree", "timeline", "segments", "waits", "leaks")


def plant(pool: AsyncMemoryPool) -> Any:
    return pool.allocate("64 KiB", tag="planted [here]")


def keep(pool: AsyncMemoryPool) -> Any:
    return pool.allocate("1 MiB", tag="kept")


def queue_up(pool: AsyncMemoryPool) -> None:
    pool.allocate("1 MiB", timeout=60).free()


@pytest.fixture(scope="module")
def leaky(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that forgets one buffer of many."""
    path = tmp_path_factory.mktemp("leaky") / "leaky.amem"
    with AsyncMemoryPool("simulated", name="mine") as pool:
        with Recording(pool, file=path, frames=2):
            held = [keep(pool) for _ in range(5)]
            forgotten = plant(pool)
            held.clear()
        forgotten.free()
    return str(path)


@pytest.fixture(scope="module")
def tidy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that frees what it allocates, on a pool by pages."""
    path = tmp_path_factory.mktemp("tidy") / "tidy.amem"
    # Of this pool alone: others of this process are those of other tests.
    with AsyncMemoryPool("simulated", segments="paged") as pool, Recording(pool, file=path):
        pool.allocate(1000).free()
    return str(path)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program of which one thread waits for what another one frees."""
    path = tmp_path_factory.mktemp("crowded") / "crowded.amem"
    with AsyncMemoryPool("simulated", limit="2 MiB") as pool, Recording(pool, file=path, frames=2):
        held = [keep(pool), keep(pool)]
        thread = threading.Thread(target=queue_up, args=(pool,))
        thread.start()
        while not pool.stats().waiting:
            time.sleep(0.001)
        held.clear()
        thread.join()
    return str(path)


def shown(invoke: Invoke, *arguments: str, code: int = 0) -> list[str]:
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


def figures(invoke: Invoke, *arguments: str, code: int = 0) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("report", REPORTS)
def test_json_has_the_figures_and_what_is_missing(invoke: Invoke, leaky: str, report: str) -> None:
    """By their names, after those of the records; sums are those of the function of that name."""
    found = figures(invoke, report, leaky)
    assert (found.pop("note"), found.pop("lost")) == ("", 0)
    want = vars(getattr(reports, report)(read(leaky)))
    assert found.keys() == want.keys()
    plain = {name: one for name, one in want.items() if isinstance(one, int | float | str | None)}
    assert plain == {name: found[name] for name in plain}
    assert "kept" in str(found) or report not in {"summary", "segments"}


def test_every_number_is_spelled_by_name(invoke: Invoke, leaky: str) -> None:
    """Rows are objects too, down to the innermost."""
    (line,) = figures(invoke, "leaks", leaky)["lines"]
    assert (line["line"], line["tags"]) == (plant.__code__.co_firstlineno + 1, ["planted [here]"])
    (root,) = figures(invoke, "tree", leaky)["calls"][:1]
    assert root["calls"][0]["nbytes"] == 5 << 20
    assert len(figures(invoke, "timeline", leaky, "--moments", "17")["moments"]) == 17
    assert figures(invoke, "table", leaky, "--by", "tag")["rows"][0]["name"] == "kept"
    assert sum(len(one["pieces"]) for one in figures(invoke, "segments", leaky)["segments"]) == 6


def test_the_summary_is_that_of_the_program(invoke: Invoke, leaky: str) -> None:
    """What `memory_summary()` says, line by line."""
    assert shown(invoke, "summary", leaky) == summarize(read(leaky)).splitlines()


def test_the_table_shows_who_held_most(invoke: Invoke, leaky: str) -> None:
    """By lines, or by tags with their brackets; what is left out is counted."""
    head, first, second = shown(invoke, "table", leaky)
    assert head.split()[-1] == "line"
    assert "5 MiB" in first
    assert "(keep)" in first
    assert "(plant)" in second
    lines = shown(invoke, "table", leaky, "--by", "tag", "--top", "1")
    assert lines[1].endswith("kept")
    assert lines[2] == "and 1 more: --top shows them"
    assert shown(invoke, "table", leaky, "--by", "tag")[2].endswith("planted [here]")
    assert shown(invoke, "table", leaky, "--by", "nbytes")[1].endswith("1 MiB")


def test_stats_show_sizes_lifetimes_and_lines(invoke: Invoke, leaky: str) -> None:
    """With bars that are as long as there are many."""
    lines = shown(invoke, "stats", leaky)
    assert lines[0].startswith("5.06 MiB in 6 allocations: the smallest 64 KiB, half of them up to 1 MiB")
    (size,) = [line for line in lines if line.split()[:2] == ["2", "MiB"]]
    assert size.endswith("█" * 30)
    assert {"sizes", "lifetimes", "lines that allocate most"} <= set(lines)


def test_the_tree_folds_what_is_small(invoke: Invoke, leaky: str) -> None:
    """Unless all of it is asked for; at another time it is another, and after the end there is none."""
    lines = shown(invoke, "tree", leaky)
    assert lines[0].startswith("5.06 MiB live after ")
    assert any("5 MiB (98.8%, 5 buffers)" in line and line.endswith("(keep)") for line in lines)
    assert "1 smaller line" not in "".join(shown(invoke, "tree", leaky, "--all"))
    end = read(leaky).duration
    assert shown(invoke, "tree", leaky, "--at", f"{end:.9f}s")[0].startswith("64 KiB live after ")
    for report in ("tree", "segments"):
        late = invoke(report, leaky, "--at", "1 h")
        assert late.exit_code == 2
        assert "--at: 1 h is after its end" in late.output


def test_the_timeline_is_drawn(invoke: Invoke, leaky: str, crowded: str) -> None:
    """As wide as it is asked for, the reserved line above what is live, and marks below."""
    lines = shown(invoke, "timeline", leaky, "--moments", "40")
    chart = [line for line in lines if "┤" in line]
    assert len(chart) == 12
    top = reports.summary(read(leaky)).most_reserved
    assert chart[0].split("┤")[0].strip() == f"{top >> 20} MiB"
    assert "─" in chart[0]
    assert "█" in chart[-1]
    assert lines[-1].strip().startswith("0 s")
    assert "w" in shown(invoke, "timeline", crowded, "--moments", "40")[13]


def test_segments_show_where_the_holes_are(invoke: Invoke, leaky: str, tidy: str) -> None:
    """One row each; memory by pages has none, which is said."""
    head, *rows = shown(invoke, "segments", leaky)
    assert head.split()[-1] == "map"
    assert len(rows) == len(reports.segments(read(leaky)).segments)
    assert all(row.startswith("mine") and "·" in row for row in rows)
    assert any("█" in row for row in rows)
    assert shown(invoke, "segments", tidy)[0].startswith("No segments")


def test_waits_name_the_line(invoke: Invoke, crowded: str, leaky: str) -> None:
    """That waited for others to free memory; growth is no wait."""
    lines = shown(invoke, "waits", crowded)
    assert lines[0].endswith("in 1 wait")
    assert lines[2].endswith("(queue_up)")
    assert shown(invoke, "waits", leaky) == ["No request waited."]


def test_leaks_fail_where_there_is_one(invoke: Invoke, leaky: str, tidy: str) -> None:
    """With 1 and the line's name, only if that was asked for."""
    lines = shown(invoke, "leaks", leaky, "--fail", code=1)
    assert lines[0] == "64 KiB in 1 buffer never freed"
    assert lines[2].endswith(f"{__file__}:{plant.__code__.co_firstlineno + 1} (plant)")
    assert shown(invoke, "leaks", leaky) == lines
    assert shown(invoke, "leaks", tidy, "--fail") == ["All that was allocated was freed."]
    assert figures(invoke, "leaks", leaky, "--fail", code=1)["buffers"] == 1


@pytest.mark.parametrize("report", [*REPORTS, "plan", "report"])
def test_a_wrong_file_is_named(invoke: Invoke, tmp_path: Path, report: str) -> None:
    """Without a traceback, with 2."""
    for content in (b"", b"asyncmem", b"something else"):
        path = tmp_path / "wrong.amem"
        path.write_bytes(content)
        result = invoke(report, str(path))
        assert result.exit_code == 2
        assert "wrong.amem" in result.output
        assert "Traceback" not in result.output
    assert invoke(report, str(tmp_path / "nowhere.amem")).exit_code == 2
    assert "--json" in invoke(report, "--help").output


def test_what_is_missing_is_said_beside_the_report(invoke: Invoke, leaky: str, tmp_path: Path) -> None:
    """On the error output, and in JSON; the report is there all the same."""
    torn = tmp_path / "torn.amem"
    content = Path(leaky).read_bytes()
    torn.write_bytes(content[:-10])
    result = invoke("summary", str(torn))
    assert result.exit_code == 0
    assert "ends in the middle" in result.stderr
    assert result.stdout.startswith("recorded")
    assert "ends in the middle" in figures(invoke, "leaks", str(torn))["note"]


def test_a_person_is_told_what_to_install(invoke: Invoke, leaky: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the extra for files is missing."""
    monkeypatch.setitem(sys.modules, "msgspec", None)
    for name in ("amem", "reading"):
        monkeypatch.delitem(sys.modules, f"asyncmem.insight.{name}")
    result = invoke("summary", leaky)
    assert result.exit_code == 1
    assert "pip install 'asyncmem[insight]'" in result.output


def test_what_was_lost_is_said(invoke: Invoke, tmp_path: Path) -> None:
    """How many records, and what that means for the figures."""
    path = tmp_path / "lossy.amem"
    rows = np.zeros(3, LOG_ROW)
    rows["number"] = range(3)
    heading = Heading(version=VERSION, began=0, wall=0.0, frames=1, program=[], process=1, python="", asyncmem="")
    blocks: list[Block] = [
        heading,
        Pool(number=0, name="busy", device="none", limit=1),
        Rows(pool=0, count=3, columns=pack_rows(rows), lost=4000),
        End(time=1),
    ]
    path.write_bytes(MAGIC + b"".join(pack(block) for block in blocks))
    result = invoke("leaks", str(path))
    assert (
        "4,000 records came too fast to be written: buffers that were freed in them look as if they were live."
        in result.stderr
    )
    assert figures(invoke, "leaks", str(path))["lost"] == 4000


def write_a_million(path: Path) -> None:
    """Write a file of a million records: 500,000 buffers, each held until 500 others came, and one for ever."""
    count = 500_000
    number = np.arange(count)
    rows = np.zeros(2 * count, LOG_ROW)
    taken, freed = rows[:count], rows[count:]
    taken["time_ns"], freed["time_ns"] = number * 1000, (number + 500) * 1000 + 500
    taken["kind"], freed["kind"] = Kind.ALLOCATED, Kind.FREED
    for part in (taken, freed):
        part["number"], part["nbytes"], part["site"] = number, 1000 + number % 640, 1
    freed["span_ns"] = 500_500
    rows = rows[np.argsort(rows["time_ns"], kind="stable")]
    rows = rows[(rows["number"] != 300_000) | (rows["kind"] == Kind.ALLOCATED)]
    blocks: list[Block] = [
        Heading(version=VERSION, began=0, wall=0.0, frames=1, program=[], process=1, python="", asyncmem=""),
        Pool(number=0, name="big", device="none", limit=1 << 30),
        NewNames(places=[("big.py", 7, "make")], sites=[(1, 0)]),
        *(Rows(pool=0, count=len(part), columns=pack_rows(part)) for part in np.array_split(rows, 200)),
        End(time=int(rows["time_ns"][-1])),
    ]
    path.write_bytes(MAGIC + b"".join(pack(block) for block in blocks))


# Processor time: what a busy machine does besides is not ours.
MEASURED = """
import resource, sys
from asyncmem.cli import main
sys.argv = ["asyncmem", *sys.argv[1:]]
code = main()
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which begins with that of the process that started this one.
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, peak, used.ru_utime + used.ru_stime)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are in other units elsewhere")
def test_a_million_records_are_read_in_seconds_and_little_memory(tmp_path: Path) -> None:
    """Below 1 GiB, in twice the three seconds that it is to take, and 15 for the pictures, because machines differ."""
    path, drawn = tmp_path / "big.amem", tmp_path / "big.html"
    write_a_million(path)
    for command, most in ((["summary", str(path)], 6), (["report", str(path), "-o", str(drawn)], 30)):
        start = [sys.executable, "-c", MEASURED, *command]
        done = subprocess.run(start, capture_output=True, text=True, check=True)
        *lines, last = done.stdout.splitlines()
        code, kib, seconds = last.split()
        assert (code, float(seconds) < most, int(kib) < 1 << 20) == ("0", True, True), last
        if command[0] == "summary":
            assert lines[0].startswith("recorded       999,999 records")
            assert "still live     1.45 KiB in 1 buffer" in lines
    page = drawn.read_text(encoding="utf-8")
    assert "still live     1.45 KiB in 1 buffer" in page
    assert len(page) < 15_000_000


@pytest.mark.parametrize("to", ["torch", "perfetto", "csv", "json"])
def test_an_export_goes_to_a_file_of_its_own(invoke: Invoke, leaky: str, tmp_path: Path, to: str) -> None:
    """Beside the recording or where it is told to; what exists is kept unless that is said."""
    copy = tmp_path / "copy.amem"
    copy.write_bytes(Path(leaky).read_bytes())
    assert invoke("export", str(copy), "--to", to).exit_code == 0
    (made,) = set(tmp_path.iterdir()) - {copy}
    assert made.name.startswith("copy.")
    content = made.read_bytes()
    made.write_bytes(b"precious")
    refused = invoke("export", str(copy), "--to", to)
    assert refused.exit_code == 2
    assert "--force" in refused.output
    assert made.read_bytes() == b"precious"
    assert invoke("export", str(copy), "--to", to, "--force").exit_code == 0
    assert made.read_bytes() == content
    other = tmp_path / "other"
    assert invoke("export", str(copy), "--to", to, "-o", str(other)).exit_code == 0
    assert other.read_bytes() == content
    assert invoke("export", str(copy), "--to", "nothing").exit_code == 2
    assert invoke("export", str(copy), "--to", to, "-o", str(tmp_path)).exit_code != 0


@pytest.mark.parametrize("ends", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_half_written(
    invoke: Invoke, leaky: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException
) -> None:
    """A file that could not be ended is taken away, so that the next try has its name."""

    def fail(_: object, out: BinaryIO) -> None:
        out.write(b"half")
        raise ends

    monkeypatch.setitem(FORMATS, "csv", (".csv", fail))
    out = tmp_path / "out.csv"
    assert invoke("export", leaky, "--to", "csv", "-o", str(out)).exit_code == (1 if isinstance(ends, OSError) else 130)
    assert not out.exists()


def test_several_files_are_one_recording(invoke: Invoke, leaky: str, tmp_path: Path) -> None:
    """Those of the workers of a cluster, say: each report adds them up, and none of them is overwritten."""
    other = tmp_path / "other.amem"
    with AsyncMemoryPool("simulated", name="other") as pool, Recording(pool, file=other):
        keep(pool).free()
    one, both = (json.loads(invoke("summary", *files, "--json").stdout) for files in ([leaky], [leaky, str(other)]))
    assert both["allocations"] == one["allocations"] + 1
    for command in REPORTS:
        assert invoke(command, leaky, str(other)).exit_code == 0
    assert "mine on simulated:0, other on simulated:0" in invoke("summary", leaky, str(other)).stdout
    page = tmp_path / "page.html"
    assert invoke("report", leaky, str(other), "-o", str(page)).exit_code == 0
    assert "other on simulated:0" in page.read_text(encoding="utf-8")
    refused = invoke("report", leaky, str(other), "-o", str(other), "--force")
    assert (refused.exit_code, "is what is read" in refused.stderr) == (2, True)
    assert invoke("summary").exit_code == 2
