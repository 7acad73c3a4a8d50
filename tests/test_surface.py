"""The public surface: what is exported is meant to be, and has its words and its types."""

import ast
import collections.abc
import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import asyncmem
import asyncmem.core._core as compiled
from asyncmem import core
from tests.cli.commands import COMMANDS

# The sources, which an installed package has not all of.
ROOT = Path(__file__).parents[1] / "asyncmem"
PACKAGES = (
    "asyncmem",
    "asyncmem.buckets",
    "asyncmem.devices",
    "asyncmem.distributed",
    "asyncmem.insight",
    "asyncmem.insight.reports",
    "asyncmem.pipeline",
    "asyncmem.pipeline.parallel",
    "asyncmem.planning",
    "asyncmem.pool",
    "asyncmem.ranks",
    "asyncmem.replay",
    "asyncmem.share",
    "asyncmem.testing",
    "asyncmem.testing.device_contract",
)
FILES = sorted(path for kind in ("*.py", "*.pyx") for path in ROOT.rglob(kind))

# The guard against blocking puts its own functions in the place of some methods.
pytestmark = pytest.mark.may_block

Function = ast.FunctionDef | ast.AsyncFunctionDef
Parameter = tuple[str, str, bool]
"""Name, kind, and whether it has a default."""


def exports() -> Iterator[tuple[str, object]]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            yield f"{package}.{name}", getattr(module, name)


CLASSES = [(name, one) for name, one in exports() if isinstance(one, type)]
FUNCTIONS = [(name, one) for name, one in exports() if inspect.isroutine(one)]


def ours(kind: type) -> list[type]:
    return [one for one in kind.__mro__ if one.__module__.partition(".")[0] == "asyncmem"]


def members(kind: type) -> Iterator[tuple[str, object]]:
    """The public attributes that a class has from this package, each as its class has it."""
    for name in sorted({name for one in ours(kind) for name in vars(one) if not name.startswith("_")}):
        if hasattr(kind, name):  # others' names for ours are there for their errors alone
            yield name, inspect.getattr_static(kind, name)


@cache
def documented() -> frozenset[tuple[str, str]]:
    """The pairs of class and attribute for which a string follows the attribute in the source."""
    found = set()
    for path in (path for kind in ("*.py", "*.pyi") for path in ROOT.rglob(kind)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= {(node.name, name) for name in documented_attributes(node)}
    return frozenset(found)


def documented_attributes(node: ast.ClassDef) -> Iterator[str]:
    for before, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
                yield before.target.id
            if isinstance(before, ast.Assign) and isinstance(before.targets[0], ast.Name):
                yield before.targets[0].id


def has_words(kind: type, name: str, member: object) -> bool:
    """Whether a method or property has a docstring; an attribute may have one after it, or be named in its class's."""
    if inspect.isroutine(member) or isinstance(member, property | staticmethod | classmethod):
        return bool(inspect.getdoc(getattr(kind, name)))
    written = any((one.__name__, name) in documented() for one in ours(kind))
    return written or bool(inspect.getdoc(member)) or any(name in (one.__doc__ or "") for one in ours(kind))


def untyped(function: object) -> list[str]:
    signature = inspect.signature(function)  # type: ignore[arg-type]  # callables only
    gaps = [
        name
        for name, one in signature.parameters.items()
        if one.annotation is one.empty and name not in ("self", "cls")
    ]
    return gaps + (["return"] if signature.return_annotation is signature.empty else [])


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_exported_is_what_is_there(package: str) -> None:
    """`__all__` names every public thing of the package, once and in order, and nothing else."""
    module = importlib.import_module(package)
    there = {name for name, one in vars(module).items() if not name.startswith("_") and not isinstance(one, ModuleType)}
    assert sorted(module.__all__) == list(module.__all__)
    assert set(module.__all__) == there


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    """The first thing in a file is a sentence about it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".pyx":
        text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        assert text.lstrip().startswith('"""')
    else:
        assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize(("name", "one"), list(exports()), ids=lambda one: one if isinstance(one, str) else "")
def test_every_public_name_has_words(name: str, one: object) -> None:
    """Classes, functions and types that users meet have a docstring of their own."""
    if isinstance(one, type) or inspect.isroutine(one):
        inherited = {parent.__doc__ for parent in getattr(one, "__mro__", ())[1:]}
        assert one.__doc__, name
        assert one.__doc__ not in inherited, name


@pytest.mark.parametrize(("name", "kind"), CLASSES, ids=[name for name, _ in CLASSES])
def test_every_public_member_has_words(name: str, kind: type) -> None:
    """So have their methods and properties; fields too, except where a small record says them all in its docstring."""
    small = dataclasses.is_dataclass(kind) and name.count(".") > 1
    found = [(member, one) for member, one in members(kind) if not (small and inspect.ismemberdescriptor(one))]
    assert not [f"{name}.{member}" for member, one in found if not has_words(kind, member, one)]


@pytest.mark.parametrize(("name", "function"), FUNCTIONS, ids=[name for name, _ in FUNCTIONS])
def test_every_public_function_has_types(name: str, function: object) -> None:
    """Every parameter and every return has a type."""
    assert not untyped(function), name


@pytest.mark.parametrize(("name", "kind"), CLASSES, ids=[name for name, _ in CLASSES])
def test_every_public_method_has_types(name: str, kind: type) -> None:
    """So has every method written in Python; the stub has those of the compiled module."""
    methods = [(f"{name}.{member}", inspect.unwrap(getattr(kind, member))) for member, _ in members(kind)]
    assert not [(label, untyped(one)) for label, one in methods if inspect.isfunction(one) and untyped(one)]


def stub() -> ast.Module:
    path = Path(compiled.__file__).with_name("_core.pyi")
    return ast.parse(path.read_text(encoding="utf-8"))


def stub_classes() -> dict[str, ast.ClassDef]:
    return {one.name: one for one in stub().body if isinstance(one, ast.ClassDef)}


def stub_names(body: list[ast.stmt]) -> set[str]:
    names = {one.target.id for one in body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    names |= {one.name for one in body if isinstance(one, Function | ast.ClassDef)}
    return {name for name in names if not name.startswith("_")}


def inherited_names(node: ast.ClassDef) -> set[str]:
    """What a class in the stub has from the abstract classes it names."""
    bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
    return {name for base in bases if hasattr(collections.abc, base) for name in dir(getattr(collections.abc, base))}


def written(function: Function) -> list[Parameter]:
    """The parameters of a function in the stub."""
    args = function.args
    places = args.posonlyargs + args.args
    defaults = [False] * (len(places) - len(args.defaults)) + [True] * len(args.defaults)
    found = [(one.arg, "by place", default) for one, default in zip(places, defaults, strict=True)]
    found += [(args.vararg.arg, "rest", False)] if args.vararg else []
    named = zip(args.kwonlyargs, args.kw_defaults, strict=True)
    found += [(one.arg, "by name", value is not None) for one, value in named]
    found += [(args.kwarg.arg, "rest by name", False)] if args.kwarg else []
    return [one for one in found if one[0] not in ("self", "cls")]


def at_run_time(method: object) -> list[Parameter]:
    """The same of the method that was compiled, from the signature that it shows."""
    shown = str(getattr(method, "__text_signature__", "")).replace("$self", "self")
    function = ast.parse(f"def shown{shown}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return written(function)


def agree(promised: list[Parameter], compiled_ones: list[Parameter]) -> bool:
    """Whether they are the same; where the compiled function takes any name, the stub may say which."""
    if any(kind == "rest by name" for _, kind, _ in compiled_ones):
        promised = [one for one in promised if not one[1].endswith("by name")]
        compiled_ones = [one for one in compiled_ones if not one[1].endswith("by name")]
    return promised == compiled_ones


def test_the_stub_names_what_the_compiled_module_has() -> None:
    """The stub invents nothing, and everything that the rest of the package takes from the module is in it."""
    there = set(vars(compiled))
    assert stub_names(stub().body) <= there
    taken = {name for name in core.__all__ if getattr(core, name) is getattr(compiled, name, None)}
    elsewhere = {name for name in taken if getattr(compiled, name).__class__ is type} - set(stub_classes())
    assert not {name for name in elsewhere if getattr(compiled, name).__module__ == compiled.__name__}


@pytest.mark.parametrize("name", sorted(stub_classes()))
def test_the_stub_names_what_compiled_classes_have(name: str) -> None:
    """Methods and attributes of each class agree, by name."""
    node = stub_classes()[name]
    kind = getattr(compiled, name)
    there = {one for one in vars(kind) if not one.startswith("_") and hasattr(kind, one)}
    assert stub_names(node.body) | (inherited_names(node) & there) == there


@pytest.mark.parametrize("name", sorted(stub_classes()))
def test_the_stub_has_the_signatures_of_compiled_methods(name: str) -> None:
    """Parameters agree by name, kind and whether they may be left out."""
    kind = getattr(compiled, name)
    for function in stub_classes()[name].body:
        if isinstance(function, Function) and function.name in stub_names([function]):
            method = inspect.getattr_static(kind, function.name)
            if inspect.isroutine(method):
                assert agree(written(function), at_run_time(method)), f"{name}.{function.name}"


def test_the_surface_is_small() -> None:
    """What most programs use is at most 40 names."""
    assert len(asyncmem.__all__) <= 40


def test_submodules_are_there_after_one_import() -> None:
    """Those that programs rarely use are imported when they are asked for; what is not there is said so."""
    program = """if True:
        import sys, asyncmem
        assert "asyncmem.insight" not in sys.modules
        assert {"insight", "profile_memory", "replay", "tag"} <= set(dir(asyncmem))
        for name in ("devices", "errors", "facts", "options", "stats", "pool", "buckets", "runtime", "arrays"):
            assert getattr(asyncmem, name) is sys.modules[f"asyncmem.{name}"]
        try:
            asyncmem.nonsense
        except AttributeError as error:
            assert str(error).endswith("'nonsense'")
        with asyncmem.AsyncMemoryPool("simulated") as pool:
            pool.allocate(1).free()
        assert "asyncmem.insight" not in sys.modules
        assert asyncmem.profile_memory is asyncmem.insight.profile_memory
        for name in ("pipeline", "planning", "replay", "testing"):
            assert getattr(asyncmem, name) is sys.modules[f"asyncmem.{name}"]
        from asyncmem import *
        assert profile_memory is asyncmem.insight.profile_memory
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


LISTING = Path(__file__).with_name("surface.txt")
"""The public surface as it was when somebody last agreed to it. `python -m tests.test_surface` writes it anew."""


def shown(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{star}{parameter.name}{'' if parameter.default is parameter.empty else '=...'}"


def call_of(one: object) -> str:
    """How something is called, without types and values, which type checkers and other tests hold."""
    try:
        parameters = [one for one in inspect.signature(one).parameters.values() if one.name != "self"]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(...)"
    words = list(map(shown, parameters))
    if words == ["object"]:  # what 3.14 says of any compiled method of one argument
        return "(...)"
    kinds = [one.kind for one in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        words.insert(sum(kind is inspect.Parameter.POSITIONAL_ONLY for kind in kinds), "/")
    return f"({', '.join(words)})"


def surface() -> Iterator[str]:
    """List what is public, a line for each name."""
    for name, one in sorted(exports(), key=lambda pair: pair[0]):
        if not isinstance(one, type):
            yield name + (call_of(one) if inspect.isroutine(one) else "")
            continue
        made = any("__init__" in vars(kind) for kind in ours(one))
        yield name + (call_of(one) if made else "")
        for member, _ in members(one):
            bound = getattr(one, member)
            yield f"{name}.{member}" + (call_of(bound) if inspect.isroutine(bound) else "")
    for command, group in sorted(COMMANDS.items()):
        yield " ".join([f"$ asyncmem {command}", *sorted(word for option in group.params for word in option.opts)])


def test_the_surface_is_the_one_that_was_agreed_to() -> None:
    """A change of what is public shows in the diff of the listing: docs/explanation/stability.md."""
    listed, there = LISTING.read_text(encoding="utf-8").splitlines(), list(surface())
    gone, new = sorted(set(listed) - set(there)), sorted(set(there) - set(listed))
    assert listed == there, f"run `python -m tests.test_surface` if that is meant; gone: {gone}, new: {new}"


if __name__ == "__main__":
    LISTING.write_text("".join(f"{line}\n" for line in surface()), encoding="utf-8")
