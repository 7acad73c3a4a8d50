"""The reference page names what there is, as it is."""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import asyncmem
import asyncmem.pipeline
from asyncmem import errors, insight, planning
from asyncmem.arrays.elements import SHORT_FLOATS, element_type
from asyncmem.cli.bench import ROWS
from asyncmem.figures import format_duration, format_share, format_size
from asyncmem.insight import pictures, reports
from asyncmem.insight.prometheus import PoolCollector
from asyncmem.options import COMMON_OPTIONS, OPTIONS, RUNTIME_OPTIONS, PoolOptions
from asyncmem.pipeline import parallel
from asyncmem.stats import DERIVED, PoolStats
from benchmarks import comparison
from tests.cli.commands import COMMANDS

# Short floats, and the names that the page's ranges of numpy's own end with.
ELEMENTS = [*SHORT_FLOATS, "bool", "int8", "int64", "uint8", "uint64", "float16", "float64", "complex64", "complex128"]

RECORDS = {"rows", "names", "path"}  # attributes that only an object has

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Cut out what stands under one heading."""
    return REFERENCE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> Iterator[list[str]]:
    """Read the cells of the section's tables, without the head of the first."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def option_tables() -> list[list[list[str]]]:
    """Read the cells of both tables of options, without their heads."""
    tables: list[list[list[str]]] = []
    for cells in rows("Options of a pool"):
        if not tables or cells[0] == "option":
            tables.append([])
        if cells[0].startswith("`"):
            tables[-1].append(cells)
    return tables


def field_docs() -> dict[str, str]:
    """Read the first paragraph of what is said of each option where it is declared."""
    source = inspect.getsource(PoolOptions)
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]  # a class has one
    return {
        before.target.id: " ".join(after.value.value.partition("\n\n")[0].split())
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr)
    }


def names(cell: str) -> list[str]:
    """Read the names in a cell."""
    return re.findall(r"`(\w+)", cell)


def written(name: str, value: object) -> str:
    """Write a default as the page does."""
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case str():
            return f'"{value}"'
        case int():
            return str(value) if name.endswith(("_blocks", "_every")) else format_size(value)
        case float():
            return written_float(name, value)
    return str(value)


def written_float(name: str, value: float) -> str:
    if name == "bypass":
        return str(value)
    return format_duration(value) if name == "stall_after" else format_share(value)


def test_every_option_is_listed_with_its_default() -> None:
    """One table has what programs set, another the rest, in their order, with default and meaning as declared."""
    defaults, docs = PoolOptions(), field_docs()
    common, expert = ([(names(cells[0])[0], cells[1], cells[2]) for cells in table] for table in option_tables())
    assert [name for name, _, _ in common] == list(COMMON_OPTIONS)
    assert common + expert == [(name, written(name, getattr(defaults, name)), docs[name]) for name in OPTIONS]


def test_the_docstring_of_options_has_the_same_two_tables() -> None:
    """Every option is in the table of the docstring that it is in on the page."""
    tables = re.findall(r"=\n *option.*?=\n(.*?)\n *=", PoolOptions.__doc__ or "", re.DOTALL)
    common, expert = ({name for name in re.findall(r"\w+", table) if name in OPTIONS} for table in tables)
    assert common == set(COMMON_OPTIONS)
    assert expert == set(OPTIONS) - common


def test_programs_set_a_dozen_options() -> None:
    """The first table stays short."""
    assert len(COMMON_OPTIONS) == 12


def test_what_cannot_be_changed_at_run_time_is_named() -> None:
    """The page names the options that `configure` refuses."""
    sentence = re.search(r"except (.*?),\s+which", section("Options of a pool"), re.DOTALL)
    assert sentence is not None
    assert set(names(sentence[1])) == set(OPTIONS) - RUNTIME_OPTIONS


def test_every_statistic_is_listed() -> None:
    """The table of statistics has every field and every derived figure, and no other."""
    listed = [name for cells in rows("Statistics") for name in names(cells[0])]
    assert sorted(listed) == sorted([*(one.name for one in fields(PoolStats)), *DERIVED])


def all_errors() -> set[type[asyncmem.AsyncmemError]]:
    """Collect the whole tree, without its root."""
    found: set[type[asyncmem.AsyncmemError]] = set()
    fresh = {asyncmem.AsyncmemError}
    while fresh:
        fresh = {child for kind in fresh for child in kind.__subclasses__() if child.__module__.startswith("asyncmem")}
        found |= fresh
    return {kind for kind in found if not kind.__module__.startswith(("asyncmem.testing", "asyncmem.core"))}


def test_every_error_is_listed() -> None:
    """The table of errors has the tree's leaves."""
    listed = {names(cells[0])[0] for cells in rows("Errors")}
    assert listed >= {kind.__name__ for kind in all_errors() if hasattr(errors, kind.__name__)}
    assert listed <= {kind.__name__ for kind in all_errors()}


@pytest.mark.parametrize("cells", list(rows("Errors")), ids=lambda cells: cells[0])
def test_an_error_is_also_the_builtin_that_is_named(cells: list[str]) -> None:
    """An error that the page calls a `MemoryError` too is one."""
    kinds = {kind.__name__: kind for kind in all_errors()}
    builtin = {parent.__name__ for parent in kinds[names(cells[0])[0]].__mro__}
    assert set(names(cells[1])) <= builtin


def test_every_door_that_is_listed_is_there() -> None:
    """Pool, budget and lease have what the page says they share."""
    table = rows("What a pool, a budget and a lease have")
    doors = {found[1] for cells in table for found in re.finditer(r"`(\w+)\(", cells[0])}
    assert doors
    for kind in (asyncmem.AsyncMemoryPool, asyncmem.Budget, asyncmem.Lease):
        assert doors <= set(dir(kind))


def test_every_part_of_an_array_is_listed() -> None:
    """The table of an array's parts has all that are public, and the protocols that it speaks."""
    table = [cells for cells in rows("Arrays") if cells[0].startswith("`") and len(cells) == 2]
    listed = {name for cells in table for name in names(cells[0])} - set(ELEMENTS)
    parts = {name for name in vars(asyncmem.Array) if not name.startswith("_")}
    protocols = {name for name in vars(asyncmem.Array) if re.search("array_interface|dlpack", name)}
    assert listed == parts | protocols


def test_every_part_of_a_pipeline_is_listed() -> None:
    """The table of channels and pipelines has every public name, with the methods and fields that it names."""
    table = {names(cells[0])[0]: cells for cells in rows("Channels and pipelines")}
    listed = {name for cells in table.values() for name in names(cells[0])}
    fed = set(names(section("Feeding a device")))
    assert listed | fed >= set(asyncmem.pipeline.__all__)
    for report in (asyncmem.pipeline.StageReport, asyncmem.pipeline.PipelineReport, asyncmem.pipeline.ChannelStats):
        told = set(names(table[report.__name__][1]))
        assert told >= {one.name for one in fields(report)}
        assert told <= set(dir(report))
    for kind in (asyncmem.pipeline.Channel, asyncmem.pipeline.Pipeline):
        assert {one[1] for one in re.finditer(r"`(\w+)\(", table[kind.__name__][1])} <= set(dir(kind))


def test_every_element_type_is_listed() -> None:
    """The names of element types are those that arrays take."""
    listed = {name for cells in rows("Arrays") for name in names(cells[0])} & set(ELEMENTS)
    assert listed >= {name for name in ELEMENTS if element_type(name).numpy is None}
    assert "float64" in listed


def test_everything_of_pipeline_parallelism_is_listed() -> None:
    """The table has all that the package exports, and the parts that it names of each are there."""
    listed = [(names(cells[0]), names(cells[1])) for cells in rows("Pipeline parallelism")]
    assert sorted(name for found, _ in listed for name in found) == sorted(parallel.__all__)
    for found, parts in listed:
        kind = getattr(parallel, found[0])
        there = {*dir(kind), *getattr(kind, "__annotations__", {})}
        assert there.issuperset(parts)


def test_everything_of_buckets_is_listed() -> None:
    """The table has what a bucket pool is called by, and every figure that it tells."""
    listed = {name for cells in rows("Buckets") for name in (*names(cells[0]), *names(cells[1]))}
    figures = {one.name for one in fields(asyncmem.buckets.BucketStats)}
    assert listed >= figures | {"hit_rate", "pressure", "limit"}
    assert {name for name in listed - figures if name in dir(asyncmem.BucketPool)} >= {
        "try_get",
        "return_buffer",
        "record_allocation",
        "shrink",
        "clear",
        "stats",
    }


def test_everything_of_planning_is_listed() -> None:
    """The table has all that the package exports; the parts that it names of each class, and all fields, are there."""
    listed = {names(cells[0])[0]: set(names(cells[1])) for cells in rows("Planning")}
    assert sorted(listed) == sorted(planning.__all__)
    for kind in (planning.InferenceMemoryEstimate, planning.TrainingMemoryEstimate, planning.MemoryEstimate):
        assert listed[kind.__name__] <= {*dir(kind), *(one.name for one in fields(kind))}
    for kind in (planning.InferenceMemoryEstimate, planning.TrainingMemoryEstimate):
        assert listed[kind.__name__] >= {one.name for one in fields(kind)}


def test_everything_of_insight_is_listed() -> None:
    """The table has all that the package exports, and the parts that it names of each are there."""
    listed = [(names(cells[0]), names(cells[1])) for cells in rows("Where memory goes")]
    exported = set(insight.__all__)
    assert exported <= {name for pair in listed for found in pair for name in found}
    for found, parts in listed:
        there = {name for one in [*found, *parts] if one in exported for name in dir(getattr(insight, one))}
        assert there.issuperset(name for name in parts if name not in exported and name not in RECORDS)


@pytest.mark.parametrize(("section", "prefix"), [("Prometheus", "pool"), ("Prometheus, for budgets", "budget")])
def test_every_metric_is_listed(section: str, prefix: str) -> None:
    """The tables of metrics have what the collector returns, by the names that Prometheus sees."""
    listed = [name for cells in rows(section) for name in names(cells[1]) if name not in {"level", "remedy"}]
    answered = [one for one in PoolCollector().collect() if one.name.startswith(f"asyncmem_{prefix}_")]
    assert sorted(listed) == sorted(
        one.name.removeprefix(f"asyncmem_{prefix}_") + "_total" * (one.type == "counter") for one in answered
    )


def test_every_report_is_listed() -> None:
    """Each function of the reports has a row, with the figures that it returns."""
    listed = [(names(cells[0])[0], names(cells[1])) for cells in rows("Reports")]
    functions = {name for name in reports.__all__ if name.islower()}
    assert {name for name, _ in listed} == functions
    assert {name for _, answered in listed for name in answered} == set(reports.__all__) - functions


def test_every_picture_is_listed() -> None:
    """Each function of the pictures has a row, with the columns that it returns."""
    listed = [(names(cells[0])[0], names(cells[1])) for cells in rows("Pictures")]
    functions = {name for name in pictures.__all__ if name.islower()}
    assert {name for name, _ in listed} == functions
    assert {name for _, answered in listed for name in answered} == set(pictures.__all__) - functions


def test_every_command_is_listed_with_its_options() -> None:
    """The table of commands has all of them, each with its own options and no other."""
    listed = {cells[0].split()[1].rstrip("`"): set(re.findall(r"--[\w-]+", cells[1])) for cells in rows("Command line")}
    there = {name: {word for option in one.params for word in option.opts} for name, one in COMMANDS.items()}
    assert listed == {name: {word for word in words if word.startswith("--")} for name, words in there.items()}


def test_every_benchmark_has_a_row_on_its_page() -> None:
    """The page of benchmarks lists the rows that there are, those against floors and those of a device."""
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*ROWS, *comparison.SUITE.rows]
