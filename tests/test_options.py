"""Options: argument beats variable beats default, every value is checked, and it is known where each came from."""

import ast
import copy
import dataclasses
import gc
import inspect
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem import options
from asyncmem.errors import AsyncmemWarning, InvalidRequest
from asyncmem.facts import OutOfMemoryFacts
from asyncmem.options import OPTIONS, RUNTIME_OPTIONS, OptionArguments, PoolOptions
from asyncmem.readers import Patience

MIB, GIB = 1 << 20, 1 << 30

# One text for every option, as the environment would have it, and what it means.
TEXTS: dict[str, tuple[str, object]] = {
    "limit": ("80%", 0.8),
    "fraction": ("50%", 0.5),
    "min_free": ("1 GiB", GIB),
    "segment_size": ("128 MiB", 128 * MIB),
    "segments": ("direct", "direct"),
    "pregrow": ("1GiB", GIB),
    "need": ("1GiB", GIB),
    "warmup": ("4KiB*100; 1MiB*10", ((4096, 100), (MIB, 10))),
    "small_limit": ("2MiB", 2 * MIB),
    "strategy": ("good_fit", "good_fit"),
    "merge_threshold": ("0.2", 0.2),
    "defragment": ("off", False),
    "adaptive": ("off", False),
    "shrink_after": ("30 s", 30.0),
    "zero_segments": ("yes", True),
    "stream_cache_blocks": ("10", 10),
    "stream_cache_bytes": ("1 MiB", MIB),
    "shared_cache_blocks": ("0", 0),
    "shared_cache_bytes": ("0", 0),
    "max_waiting": ("16", 16),
    "timeout": ("500 ms", 0.5),
    "bypass": ("1.5", 1.5),
    "on_oom": ("gc:isenabled", gc.isenabled),
    "collect": ("1", True),
    "fallback": ("host", "host"),
    "spill_limit": ("50%", 0.5),
    "share_limit": ("1 GiB", 1 << 30),
    "late_fences": ("false", False),
    "fence_every": ("16", 16),
    "overlap": ("30%", 0.3),
    "patience": ("2%", Patience(math.inf, 0.02)),
    "watch_captures": ("no", False),
    "peers": ("cuda:1; cuda:2", ("cuda:1", "cuda:2")),
    "stall_after": ("none", None),
    "track": ("TRUE", True),
    "oom_snapshot": ("oom.json", "oom.json"),
    "journal": ("pool.jsonl", "pool.jsonl"),
    "name": ("decode", "decode"),
}


def variable(name: str) -> str:
    return f"ASYNCMEM_{name.upper()}"


def retry(facts: OutOfMemoryFacts) -> bool:
    return facts.waiting == 0


def test_a_limit_may_be_shared() -> None:
    """As a word, from the environment too; it counts as `fraction` of the device, and leaves `min_free`."""
    options = PoolOptions.from_environment({"ASYNCMEM_LIMIT": "shared"}, fraction=0.5, min_free=100)
    assert (options.limit, options.ceiling(1000), options.spared("cuda")) == ("shared", 500, 100)


def test_every_option_is_tried_here() -> None:
    """No option is added without a text that the environment may hold."""
    assert set(TEXTS) == set(OPTIONS)


def test_arguments_and_fields_agree() -> None:
    """What may be written and what is kept are the same names, in the same order."""
    assert tuple(OptionArguments.__annotations__) == OPTIONS
    assert {one.name for one in dataclasses.fields(PoolOptions)} == {*OPTIONS, "origins"}


@pytest.mark.parametrize("name", TEXTS)
def test_every_option_comes_from_its_variable(name: str) -> None:
    """`ASYNCMEM_<OPTION>` sets the option, and the origin says so."""
    text, value = TEXTS[name]
    found = PoolOptions.from_environment({variable(name): text, "PATH": "/bin"})
    assert getattr(found, name) == value
    assert found.origins == {name: variable(name)}


@pytest.mark.parametrize("name", TEXTS)
def test_every_option_comes_from_the_common_variable(name: str) -> None:
    """`ASYNCMEM_CONF` sets several at once."""
    text, value = TEXTS[name]
    found = PoolOptions.from_environment({"ASYNCMEM_CONF": f" {name} : {text} ,, "})
    assert getattr(found, name) == value
    assert found.origin(name) == "ASYNCMEM_CONF"


@given(
    st.sets(st.sampled_from(sorted(TEXTS))),
    st.sets(st.sampled_from(sorted(TEXTS))),
    st.sets(st.sampled_from(sorted(TEXTS))),
)
def test_argument_beats_variable_beats_common_variable_beats_default(
    conf: set[str], variables: set[str], arguments: set[str]
) -> None:
    """Whatever is set where, the nearest wins and the rest keeps its default."""
    environ = {variable(name): TEXTS[name][0] for name in variables}
    environ["ASYNCMEM_CONF"] = ",".join(f"{name}:{TEXTS[name][0]}" for name in conf)
    given_ones = {name: getattr(PoolOptions(), name) for name in arguments}
    found = PoolOptions.from_environment(environ, **given_ones)
    for name in OPTIONS:
        origin = found.origin(name)
        if name in arguments:
            assert (origin, getattr(found, name)) == ("argument", given_ones[name])
        elif name in variables or name in conf:
            assert origin == (variable(name) if name in variables else "ASYNCMEM_CONF")
            assert getattr(found, name) == TEXTS[name][1]
        else:
            assert (origin, getattr(found, name)) == ("default", getattr(PoolOptions(), name))


def test_options_of_a_base_count_as_arguments() -> None:
    """What was chosen in code is not undone by the environment, even where it equals the default."""
    base = PoolOptions(pregrow=0, limit="1 GiB")
    found = PoolOptions.from_environment(
        {"ASYNCMEM_PREGROW": "1 GiB", "ASYNCMEM_BYPASS": "1", "ASYNCMEM_LIMIT": "3 GiB"}, base=base, limit="2 GiB"
    )
    assert (found.pregrow, found.limit, found.bypass) == (0, 2 * GIB, 1.0)


def test_an_empty_variable_says_nothing() -> None:
    """A shell that sets a variable to nothing leaves the default."""
    assert PoolOptions.from_environment({"ASYNCMEM_LIMIT": " ", "ASYNCMEM_CONF": ""}) == PoolOptions()


def test_what_the_test_suite_is_told_is_no_option() -> None:
    """`ASYNCMEM_TEST_...` chooses how tests run, and no pool minds it."""
    assert PoolOptions.from_environment({"ASYNCMEM_TEST_CUDA": "real"}) == PoolOptions()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"ASYNCMEM_CONF": "limti:1"}, "ASYNCMEM_CONF: .* got 'limti' \\(did you mean 'limit'\\?\\)"),
        ({"ASYNCMEM_CONF": "limit=1"}, "ASYNCMEM_CONF: expected \"option:value\" entries .* got 'limit=1'"),
        ({"ASYNCMEM_CONF": "limit:"}, 'ASYNCMEM_CONF: expected "option:value" entries'),
        ({"ASYNCMEM_CONF": "limit:much"}, "limit in ASYNCMEM_CONF: expected bytes"),
        ({"ASYNCMEM_LIMIT": "64M"}, "ASYNCMEM_LIMIT: expected bytes .* got '64M'"),
        ({"ASYNCMEM_TRACK": "maybe"}, "ASYNCMEM_TRACK: expected True or False"),
    ],
)
def test_the_environment_is_blamed_by_the_name_of_its_variable(environ: dict[str, str], message: str) -> None:
    """A mistake in the environment names the variable, what it says, and what was expected or meant."""
    with pytest.raises(InvalidRequest, match=message):
        PoolOptions.from_environment(environ)


def test_an_unknown_variable_is_warned_of_once_and_breaks_nothing() -> None:
    """It may be meant for another version; the warning names the nearest option."""
    environ = {"ASYNCMEM_LIMTI": "1", "ASYNCMEM_TRACK": "on"}
    with pytest.warns(AsyncmemWarning, match=r"'ASYNCMEM_LIMTI' \(did you mean 'ASYNCMEM_LIMIT'\?\); it is ignored"):
        found = PoolOptions.from_environment(environ)
    assert found.origins == {"track": "ASYNCMEM_TRACK"}
    assert PoolOptions.from_environment(environ) == found  # in silence


def test_unknown_options_are_named_with_the_nearest() -> None:
    """A slip in an option's name is an error at once; where nothing is near, all names are listed."""
    with pytest.raises(InvalidRequest, match=r"got 'segmentsize' \(did you mean 'segment_size'\?\)"):
        PoolOptions(segmentsize=1)  # type: ignore[call-arg]  # that is the point
    with pytest.raises(InvalidRequest, match=r"got 'qqq' \(there are adaptive, bypass, collect, .*zero_segments\)"):
        PoolOptions().replace(qqq=1)  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", 0),
        ("limit", "0%"),
        ("limit", 1.5),
        ("limit", -1),
        ("fraction", 0),
        ("segment_size", 0),
        ("segments", ""),
        ("warmup", 5),
        ("warmup", [4096]),
        ("warmup", [(0, 1)]),
        ("warmup", "4KiB"),
        ("strategy", "worst_fit"),
        ("merge_threshold", 2),
        ("defragment", 1),
        ("stream_cache_blocks", 1.5),
        ("max_waiting", -1),
        ("timeout", -1),
        ("bypass", -0.5),
        ("bypass", True),
        ("bypass", "much"),
        ("bypass", None),
        ("on_oom", 5),
        ("on_oom", "no.such.module:function"),
        ("fallback", "disk"),
        ("name", 5),
    ],
)
def test_values_that_cannot_be_right_are_refused(name: str, value: object) -> None:
    """The error names the option, what was expected and what came; the options are not made."""
    with pytest.raises(InvalidRequest, match=f"^{name}: expected .*, got "):
        PoolOptions(**{name: value})  # type: ignore[arg-type]  # that is the point


class Hostile:
    """Something that takes itself for a number, and raises what nobody expects."""

    def __index__(self) -> int:
        raise RuntimeError("no number")

    def __float__(self) -> float:
        raise RuntimeError("no number")


class Liar(int):
    """An integer that compares as it likes."""

    def __le__(self, other: object) -> bool:
        return True

    __ge__ = __lt__ = __gt__ = __le__  # type: ignore[assignment]  # that is the point
    __hash__ = int.__hash__


HOSTILE = [
    2**63, 2**64, 2**70, 10**400, -1, True, math.nan, math.inf, -math.inf, "1", b"1", None, Decimal(1), Fraction(1, 2),
    np.int64(1), np.float32(0.5), np.float64(math.nan), np.bool_(True), np.array([1, 2]), 0, Hostile(), Liar(2**70),
    object(), "", "\ud800", "\0", "9" * 10**6, f"{'9' * 10**6} MiB", f"{'9' * 10**6}%", "1e999999", [], {}, 1j, "nan",
    [("1 MiB", 2**70)], [("1 MiB", -1)], [("1 MiB", True)], [(2**70, 1)], "4KiB*1000000000", [(1, 2**18), (1, 1)],
]  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_whatever_is_given_is_refused_by_name_or_kept(name: str) -> None:
    """No value ends in an error of Python's own, and what is kept can be used: numbers are plain and in bounds."""
    for value in HOSTILE:
        kept: object = None
        blamed, said = name, ""
        try:
            kept = getattr(PoolOptions(**{name: value}), name)  # type: ignore[arg-type]  # that is the point
        except InvalidRequest as error:
            blamed, said = error.what, str(error)
        assert blamed == name
        assert len(said) < 1000
        assert type(kept) is not Liar
        assert not isinstance(kept, float) or math.isfinite(kept)
        assert not isinstance(kept, int) or 0 <= kept < 2**63


def test_a_partial_update_keeps_the_rest() -> None:
    """Replacing some options keeps the others and where they came from; the old ones are as they were."""
    old = PoolOptions.from_environment({"ASYNCMEM_BYPASS": "1"}, limit="80%")
    new = old.replace(pregrow="1 GiB", bypass=3)
    assert (new.limit, new.bypass, new.pregrow) == (0.8, 3.0, GIB)
    assert new.origins == {"bypass": "argument", "limit": "argument", "pregrow": "argument"}
    assert (old.bypass, old.pregrow, old.origin("bypass")) == (1.0, 0, "ASYNCMEM_BYPASS")


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - RUNTIME_OPTIONS))
def test_what_cannot_change_at_run_time_is_refused_by_name(name: str) -> None:
    """Changing a pool in use refuses the options that are fixed when it is made."""
    with pytest.raises(InvalidRequest, match=f"^{name}: expected no change while the pool is in use"):
        PoolOptions().reconfigured(**{name: TEXTS[name][1]})  # type: ignore[arg-type]  # any option


@pytest.mark.parametrize("name", sorted(RUNTIME_OPTIONS))
def test_what_can_change_at_run_time_is_checked_alike(name: str) -> None:
    """Changing a pool in use reads values just as making one does."""
    new = PoolOptions().reconfigured(**{name: TEXTS[name][1]})  # type: ignore[arg-type]  # any option
    assert getattr(new, name) == TEXTS[name][1]


def test_the_limit_is_bytes_or_a_share_of_the_device() -> None:
    """The ceiling is the limit, or a share of what the device has, and never just forgotten."""
    assert PoolOptions(limit="1 GiB").ceiling(8 * GIB) == GIB
    assert PoolOptions(limit="25%").ceiling(8 * GIB) == 2 * GIB
    assert PoolOptions(fraction=0.5).ceiling(8 * GIB) == 4 * GIB


@pytest.mark.parametrize("preset", [PoolOptions.for_inference, PoolOptions.for_constrained])
def test_presets_take_further_options(preset: type[PoolOptions]) -> None:
    """A preset is a start: what is given beside it wins, and the environment does not undo it."""
    chosen = preset(segment_size="16 MiB", name="x")
    assert (chosen.segment_size, chosen.name) == (16 * MIB, "x")
    assert PoolOptions.from_environment({"ASYNCMEM_FRACTION": "1%"}, base=chosen).fraction == chosen.fraction


def test_options_are_frozen_comparable_and_copyable() -> None:
    """Equal choices are equal and hash alike, whoever made them; copies are the same; nothing can be assigned."""
    one = PoolOptions(limit="1 GiB", on_oom=retry, warmup=[("4 KiB", 2)])
    two = PoolOptions.from_environment({"ASYNCMEM_LIMIT": "1024 MiB", "ASYNCMEM_WARMUP": "4KiB*2"}, on_oom=retry)
    assert one == two
    assert hash(one) == hash(two)
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(PoolOptions(limit=1))).origin("limit") == "argument"
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.limit = None  # type: ignore[misc]  # that is the point


def test_repr_shows_what_was_chosen() -> None:
    """The one line says what differs from the defaults."""
    assert repr(PoolOptions()) == "PoolOptions()"
    assert repr(PoolOptions(limit="80%", name="a")) == "PoolOptions(limit=0.8, name='a')"


def test_every_option_is_documented() -> None:
    """Each field is followed by what it means."""
    source = Path(inspect.getfile(options)).read_text(encoding="utf-8")
    made = next(one for one in ast.parse(source).body if isinstance(one, ast.ClassDef) and one.name == "PoolOptions")
    documented = {
        before.target.id
        for before, after in zip(made.body, made.body[1:], strict=False)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr)
    }
    assert documented == {*OPTIONS, "origins"}


def test_overlap_may_be_more_than_all_that_is_live() -> None:
    """A share of overlap has no upper end, unlike a share of the device; below nothing it cannot be."""
    assert PoolOptions(overlap=16.0).overlap == 16.0
    assert PoolOptions(overlap="400%").overlap == 4.0
    for wrong in (-0.5, "-1%", float("inf"), float("nan"), "much%"):
        with pytest.raises(InvalidRequest, match="overlap"):
            PoolOptions(overlap=wrong)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "auto"),
        ({"segments": "paged", "overlap": 0.25, "limit": "1 GiB", "name": "mine"}, "paged,overlap=25.00%"),
        ({"overlap": 0, "spill_limit": 1 / 3, "defragment": False}, None),
        ({"small_limit": "512 KiB", "bypass": 0.5, "merge_threshold": 0.29, "strategy": "good_fit"}, None),
        ({"patience": "2%", "timeout": 1.25, "max_waiting": 3, "track": True, "on_oom": lambda _: False}, None),
        ({"patience": "20 ms", "shrink_after": 1e-3}, None),
    ],
)
def test_options_as_text_are_read_as_the_same(settings: OptionArguments, text: str | None) -> None:
    """But for limits, names and objects, which are a program's own."""
    chosen = PoolOptions(**settings)
    kind, *rest = chosen.as_text().split(",")
    assert text is None or chosen.as_text() == text
    again = PoolOptions(segments=kind).replace(**dict(one.split("=") for one in rest))
    own = {name: getattr(chosen, name) for name in ("limit", "name", "on_oom")}
    assert again.replace(**own) == chosen
