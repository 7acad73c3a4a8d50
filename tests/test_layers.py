"""The direction of imports: a file imports only from lower layers, strangers stay strangers, drivers stay unloaded.

The layers are those of the head of `asyncmem/__init__.py`; every file has one by its place.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

# The sources, which an installed package has not all of.
ROOT = Path(__file__).parents[1] / "asyncmem"

LAYERS = {
    "units": 0,
    "figures": 0,
    "facts": 0,
    "errors": 0,
    "readers": 0,
    "environment": 0,
    "text": 0,
    "files": 0,
    "lazy": 0,
    "options": 0,
    "stats": 0,
    "synonyms": 0,
    "records": 0,
    "core": 1,
    "devices": 1,
    "buckets": 1,
    "arrays": 2,
    "pool": 3,
    "runtime": 4,
    "exchange": 4,
    "__init__": 5,
    "testing": 5,
    "pipeline": 5,
    "insight": 5,
    "interop": 5,
    "planning": 5,
    "replay": 5,
    "share": 5,
    "ranks": 6,
    "distributed": 6,
    "cli": 7,
    "__main__": 7,
}

# Folders of one layer that must not know each other.
STRANGERS = (
    {"core", "devices", "buckets"},
    {"testing", "pipeline", "insight", "interop", "planning", "replay", "share"},
)

# What files below layer 5 may import from other projects, and the few that have a reason to import more.
FOREIGN = {"numpy", "anyio"}
ALLOWED = {
    "devices.base": {"typing_extensions"},  # for type checkers alone, which bring it along
    "devices.awaiting": {"trio"},  # a fence is awaited in the words of the loop that runs
    "pool.loops": {"trio"},  # so is a pool's wait
    "runtime": {"uvloop"},  # `asyncmem.run` uses it where it is installed
    "devices.cuda": {"cuda"},
    "devices.gpu.shared": {"cuda"},  # cuda.core's memory for other processes
    "devices.gpu.fence": {"trio"},  # as in `devices.awaiting`
    "devices.metal.driver": {"Metal", "objc"},
    **{f"devices.opencl.{part}": {"pyopencl"} for part in ("device", "driver")},
}

# What users find below though it lies above; it is imported when they ask for it.
CONVENIENT = {
    "pool.pool": "insight",
    "pool.open_pool": "share.limits",
    "pool.share": "interop",
    "__init__": "insight",
    "pipeline.pipeline": "distributed",
    "insight.records": "insight.pictures",
}

# Files that import each other all round, directly or by others, can only be understood together.
KNOT = 5

# The sources of the compiled core, lowest first: placement, and decisions.
COMPILED = (ROOT / "core" / "heap", ROOT / "core" / "scheduler")

Import = tuple[str, bool]
"""The full name of what is imported, and whether that waits: for types alone, or inside a function."""


@cache
def modules() -> tuple[str, ...]:
    found = (path for kind in ("*.py", "*.pyx") for path in ROOT.rglob(kind))
    return tuple(sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in found))


def head(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int:
    return LAYERS[head(module)]


@cache
def imports(module: str) -> tuple[Import, ...]:
    path = ROOT.joinpath(*module.split("."))
    if path.with_suffix(".pyx").exists():
        return tuple(cython_imports(path.with_suffix(".pyx")))
    tree = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8"))
    return tuple(python_imports(tree, waits=False))


def python_imports(node: ast.AST, *, waits: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((one.name, waits) for one in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports name the whole path"
            yield from ((f"{child.module}.{one.name}", waits) for one in child.names)
        else:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            inner |= isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from python_imports(child, waits=waits or inner)


def cython_imports(path: Path) -> Iterator[Import]:
    for line in path.read_text(encoding="utf-8").splitlines():
        found = re.match(r"\s*(?:from|import) ([\w.]+)", line)
        if found and "cimport" not in line:
            yield found[1], False


@cache
def inside(module: str) -> tuple[Import, ...]:
    """The modules of this package that a module imports, by their names within it."""
    known = set(modules())
    found = []
    for name, waits in imports(module):
        if head(name) == "asyncmem":
            parts = name.split(".")[1:]
            # The name may be a module, a name in a module, a package, or a name in a package.
            places = [".".join(parts), ".".join(parts[:-1])]
            places += [f"{place}.__init__" if place else "__init__" for place in places]
            place = next((one for one in places if one in known), None)
            assert place, f"{module} imports {name}, which is nowhere"
            found.append((place, waits))
    return tuple(found)


def is_convenient(module: str, name: str, waits: bool) -> bool:
    """Whether an import is one of those that only wait for a user who asks."""
    above = CONVENIENT.get(module)
    return waits and above is not None and f"{name}.".startswith(f"{above}.")


def outside(module: str) -> set[str]:
    return {head(name) for name, _ in imports(module)} - sys.stdlib_module_names - {"asyncmem"}


@pytest.mark.parametrize("module", modules())
def test_imports_point_downwards(module: str) -> None:
    """A file imports from its own layer or from lower ones, for types too."""
    upwards = {
        name for name, waits in inside(module) if layer(name) > layer(module) and not is_convenient(module, name, waits)
    }
    assert not upwards, f"{module} (layer {layer(module)}) imports {upwards}"


@pytest.mark.parametrize("module", modules())
def test_strangers_do_not_import_each_other(module: str) -> None:
    """Placement knows no device and devices know no placement; tools on top of pools know only pools."""
    for group in STRANGERS:
        if head(module) in group:
            others = group - {head(module)}
            assert not {name for name, _ in inside(module) if head(name) in others}


def includes(path: Path) -> set[str]:
    """The headers that a file names, but those of the language, by their last names."""
    found = re.findall(r'^\s*#\s*include\s+["<]([^">]+\.h(?:pp)?)[">]', path.read_text(encoding="utf-8"), re.MULTILINE)
    return {Path(name).name for name in found}


def test_decisions_know_neither_python_nor_devices() -> None:
    """The scheduler is plain C++ over the heap: it knows nobody who calls it or carries its effects out."""
    heap, scheduler = ({path.name for path in folder.glob("*.hpp")} for folder in COMPILED)
    assert scheduler
    for path in (path for kind in ("*.hpp", "*.cpp") for path in COMPILED[1].glob(kind)):
        assert includes(path) <= heap | scheduler, path
    for path in (path for kind in ("*.hpp", "*.cpp") for path in COMPILED[0].glob(kind)):
        assert not includes(path) & {"Python.h", *scheduler}, path


@pytest.mark.parametrize("module", [one for one in modules() if layer(one) < 5])
def test_foreign_packages_stay_out(module: str) -> None:
    """Below the tools, a file imports numpy and anyio at most; a device also its own package."""
    assert outside(module) <= FOREIGN | ALLOWED.get(module, set())


def test_pytest_is_for_the_contract_alone() -> None:
    """Those who write devices have it; nobody else needs it."""
    users = {module for module in modules() if "pytest" in outside(module)}
    assert users
    assert all(module.startswith("testing.device_contract.") for module in users)


def test_exceptions_are_needed() -> None:
    """An exception whose reason is gone goes too; those of devices yet to come wait for them."""
    for module, allowed in ALLOWED.items():
        assert module not in modules() or allowed <= outside(module)


def test_no_import_goes_round_in_a_circle() -> None:
    """Following what is imported when a file is loaded never leads back to that file."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for name, waits in inside(module):
                if not waits:
                    visit(name, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())


def knots() -> Iterator[set[str]]:
    """The groups of modules that import each other all round, for types and inside functions too."""
    below = {
        module: {name for name, waits in inside(module) if not is_convenient(module, name, waits)}
        for module in modules()
    }

    def reach(module: str) -> set[str]:
        found, todo = set[str](), [module]
        while todo:
            new = below[todo.pop()] - found
            found |= new
            todo += new
        return found

    reached = {module: reach(module) for module in modules()}
    for module in modules():
        knot = {other for other in reached[module] if module in reached[other]}
        if module == min(knot, default=None):
            yield knot


def test_no_more_than_a_few_files_import_each_other_all_round() -> None:
    """Imports for types count, too: a file that cannot be read without twenty others is no part of its own."""
    assert not [sorted(knot) for knot in knots() if len(knot) > KNOT]


def test_the_package_alone_loads_no_driver_terminal_or_loop(tmp_path: Path) -> None:
    """`import asyncmem` is cheap and takes nothing: no driver, no event loop, no library for terminals, no numpy."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"  # old cuda-bindings begin with the interpreter
        "import asyncmem\n"
        "heavy = {'cuda', 'numpy', 'rich', 'click', 'uvloop', 'trio', 'pyopencl', 'objc', 'bokeh', 'distributed'}\n"
        "heavy.add('asyncmem.cli')\n"
        "loaded = heavy & (set(sys.modules) - before)\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "print(sorted(loaded), 'libcuda' in maps)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] False"


def test_the_import_takes_a_tenth_of_a_second(tmp_path: Path) -> None:
    """At most 100 ms of a processor that imports asyncio, which is included, in 30; a busy one takes longer."""
    code = (
        "from time import process_time as now; began = now(); import asyncio; middle = now(); import asyncmem\n"
        "print(middle - began, now() - began)"
    )
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    shares = []
    while len(shares) < 2 or (min(shares) > 1 and len(shares) < 10):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        asyncio, whole = map(float, done.stdout.split())
        shares.append(whole / (0.1 * max(1, asyncio / 0.03)))
    assert min(shares) <= 1


def test_a_pool_opens_in_steps_of_a_loop(tmp_path: Path) -> None:
    """Also the first of a process: what a thread would have to import is there."""
    code = (
        "from asyncmem.testing import SteppedPool, run_steps\n"
        "async def main():\n"
        "    async with SteppedPool('simulated', limit='1 MiB') as pool:\n"
        "        (await pool.allocate_async(1)).free()\n"
        "run_steps(main())\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_numpy_is_there_before_a_buffer_is(tmp_path: Path) -> None:
    """What opens a pool imports it, on a thread: no task waits for it at its first view, nor for memory behind it."""
    code = (
        "import sys, asyncio, asyncmem, threading\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'numpy': print(threading.current_thread() is not threading.main_thread())\n"
        "sys.meta_path.insert(0, Finder())\n"
        "async def main():\n"
        "    async with asyncmem.AsyncMemoryPool('simulated', limit='1 MiB'):\n"
        "        print('numpy' in sys.modules)\n"
        "assert 'numpy' not in sys.modules\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
