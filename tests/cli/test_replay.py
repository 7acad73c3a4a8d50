"""`asyncmem replay`: recordings in, figures out."""

import ast
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from asyncmem import AsyncMemoryPool
from asyncmem.insight import Recording
from asyncmem.replay import Op, Trace, fit, read

Invoke = Callable[..., Result]

TRACES = Path(__file__).parents[1] / "traces"
GNN, STREAMS = str(TRACES / "gnn_sampled.npz"), str(TRACES / "four_streams.npz")
MIB = 1 << 20

NUMBERS = {
    "peak_requested",
    "peak_active",
    "peak_reserved",
    "driver_calls",
    "waits",
    "largest_hole",
}
REALS = {"reserved_over_requested", "driver_ms", "wait_ms", "recorded_ms", "ns_per_op", "fragmentation"}


def figures(invoke: Invoke, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """Run the command for its JSON."""
    result = invoke("replay", *arguments, "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, list)
    return found


def test_the_table_has_a_line_a_program(invoke: Invoke) -> None:
    """Each with its name and its ratio."""
    result = invoke("replay", GNN, STREAMS, "--lag", "20ms")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == ["program", "gnn_sampled", "four_streams"]
    (one,) = figures(invoke, GNN, "--lag", "20ms")
    assert f" {one['reserved_over_requested']:.4f} " in lines[1]


def test_help_keeps_the_lines_of_policies(invoke: Invoke) -> None:
    """Each kind of segments has its own, and no marks of the help's own language are left."""
    lines = [line.split() for line in invoke("replay", "--help").output.splitlines()]
    assert {"paged", "stream_ordered", "direct"} <= {line[0] for line in lines if line}
    assert not any("\\b" in word for line in lines for word in line)


def test_json_is_one_array_of_flat_figures(invoke: Invoke) -> None:
    """An object a file, with all that the table says and more, in the order of the files."""
    found = figures(invoke, GNN, STREAMS)
    assert [one["file"] for one in found] == [GNN, STREAMS]
    for one in found:
        assert all(isinstance(one[name], int) for name in NUMBERS)
        assert all(isinstance(one[name], float) for name in REALS)
        assert set(one) - NUMBERS - REALS == {
            "file",
            "policy",
            "limit",
            "note",
            "completed",
            "driver_calls_by_name",
            "stranded_by_stream",
        }
        assert sum(one["driver_calls_by_name"].values()) == one["driver_calls"]
        assert one["peak_reserved"] / one["peak_requested"] == one["reserved_over_requested"]
    assert len(found[1]["stranded_by_stream"]) == read(STREAMS).streams


def test_policies_are_compared(invoke: Invoke) -> None:
    """Each has its figures, under the text that was given."""
    found = figures(invoke, GNN, "--policy", "paged", "--policy", "stream_ordered,segment_size=256MiB")
    assert [one["policy"] for one in found] == ["paged", "stream_ordered,segment_size=256MiB"]
    assert found[0]["peak_reserved"] < found[1]["peak_reserved"]


def test_a_limit_may_be_relative(invoke: Invoke) -> None:
    """A multiple of what each program needs, or a size."""
    (one,) = figures(invoke, GNN, "--limit", "1.02x", "--lag", "20ms")
    assert one["limit"] == int(one["peak_requested"] * 1.02)
    assert one["peak_reserved"] <= one["limit"]
    assert one["wait_ms"] > 0
    (one,) = figures(invoke, GNN, "--limit", "40GiB")
    assert one["limit"] == 40 << 30


def test_what_does_not_fit_is_said(invoke: Invoke) -> None:
    """It exits with 1, and says which row asked for how much."""
    result = invoke("replay", GNN, "--limit", "1 GiB")
    assert result.exit_code == 1
    assert "out of memory under 1 GiB: row " in result.output
    (one,) = figures(invoke, GNN, "--limit", "1 GiB", code=1)
    assert one["completed"] is False


def test_the_smallest_limit_is_found(invoke: Invoke) -> None:
    """As a multiple of what was requested."""
    (one,) = figures(invoke, GNN, "--fit")
    assert one["fit_over_requested"] == fit(read(GNN)) / one["peak_requested"]
    assert "1.00" in invoke("replay", GNN, "--fit").output


def test_patience_is_passed_on(invoke: Invoke) -> None:
    """As a share or as a time, for all policies at once."""
    prefetch = str(TRACES / "stream_prefetch.npz")
    (one,) = figures(invoke, prefetch, "--lag", "20ms", "--patience", "2%")
    assert 0 < one["wait_ms"] <= 0.02 * one["recorded_ms"]
    (one,) = figures(invoke, prefetch, "--lag", "20ms", "--patience", "1s")
    assert one["waits"] > 0


def test_measured_costs_are_read_again(invoke: Invoke, tmp_path: Path) -> None:
    """What `costs --json` prints is a file for `--costs`; the simulated device's calls are those that are built in."""
    costs = tmp_path / "costs.json"
    result = invoke("costs", "--device", "simulated", "--json")
    assert result.exit_code == 0, result.output
    costs.write_text(result.stdout)
    (measured,), (built_in,) = figures(invoke, GNN, "--costs", str(costs)), figures(invoke, GNN)
    assert 0.8 < measured["driver_ms"] / built_in["driver_ms"] < 1.25  # type: ignore[operator]


def test_measured_costs_are_shown_by_size(invoke: Invoke) -> None:
    """A line for each call, a column for each size; no line for what the device has not."""
    lines = invoke("costs", "--device", "simulated").stdout.splitlines()
    assert lines[0].split() == ["simulated:0", "2", "MiB", "20", "MiB", "64", "MiB", "256", "MiB", "1", "GiB"]
    assert [line.split()[0] for line in lines[1:4]] == ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
    assert [line.split()[0] for line in invoke("costs", "--device", "host").stdout.splitlines()[1:]] == [
        "cuMemAlloc",
        "cuMemFree",
    ]


def test_costs_and_pace_are_passed_on(invoke: Invoke, tmp_path: Path) -> None:
    """Another driver's costs, and another program's speed."""
    costs = tmp_path / "costs.json"
    costs.write_text('{"cuMemCreate": [[0, 1000000]]}')
    (one,) = figures(invoke, GNN, "--costs", str(costs), "--pace", "2")
    assert one["driver_ms"] >= one["driver_calls_by_name"]["cuMemCreate"]
    assert one["recorded_ms"] == pytest.approx(2000 * read(GNN).duration)


def test_a_plot_is_written(invoke: Invoke, tmp_path: Path) -> None:
    """One page for all that was replayed; a file that exists is kept unless that is said."""
    path = tmp_path / "out.html"
    result = invoke("replay", GNN, STREAMS, "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_text(encoding="utf-8").count("<svg") == 2
    path.write_text("precious")
    assert invoke("replay", STREAMS, "--plot", str(path)).exit_code == 2
    assert path.read_text() == "precious"
    assert invoke("replay", STREAMS, "--plot", str(path), "--force").exit_code == 0
    assert path.read_text(encoding="utf-8").count("<svg") == 1


@pytest.mark.parametrize("mode", [(), ("--advise",), ("--device", "simulated")])
def test_what_is_missing_in_a_recording_is_said(invoke: Invoke, tmp_path: Path, mode: tuple[str, ...]) -> None:
    """On the error output, and in JSON: the figures are those of what there is."""
    entry = {"action": "alloc", "addr": 1 << 30, "size": 512, "stream": 0, "time_us": 1, "frames": []}
    path = tmp_path / "lacking.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[entry, entry]]}))
    result = invoke("replay", str(path), *mode)
    assert "1 free missing, put in where" in result.stderr
    assert "missing" not in result.stdout
    (found,) = json.loads(invoke("replay", str(path), *mode, "--json").stdout)
    assert found["note"] == read(path).note
    whole = invoke("replay", STREAMS, "--json")
    assert not whole.stderr
    assert json.loads(whole.stdout)[0]["note"] == ""


def test_a_plot_that_cannot_be_written_is_named(invoke: Invoke, tmp_path: Path) -> None:
    """Without a traceback, with 1."""
    result = invoke("replay", STREAMS, "--plot", str(tmp_path / "nowhere" / "out.html"))
    assert result.exit_code == 1
    assert "nowhere" in result.output
    assert "Traceback" not in result.output


def test_a_device_of_several_is_chosen(invoke: Invoke, tmp_path: Path) -> None:
    """A snapshot of two devices needs to be told which."""
    entry = {"action": "alloc", "addr": 1 << 30, "size": 512, "stream": 0, "time_us": 1, "frames": []}
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[entry], [entry, entry | {"addr": 1 << 31}]]}))
    assert invoke("replay", str(path)).exit_code == 2
    (one,) = figures(invoke, str(path), "--of", "1")
    assert one["peak_requested"] == 1024


@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "mapped"],
        ["--policy", "paged,timeout=3"],
        ["--limit", "much"],
        ["--limit", "x"],
        ["--limit", "0x"],
        ["--limit", "nanx"],
        ["--lag", "soon"],
        ["--lag", "20"],
        ["--limit", "64"],
        ["--patience", "20"],
        ["--pool", "mine"],
        ["--device", "recorded"],
        ["--patience", "much"],
        ["--pace", "-1"],
        ["--costs", GNN],
        ["--of", "3"],
    ],
    ids=" ".join,
)
def test_a_mistake_is_a_usage_error(invoke: Invoke, arguments: list[str]) -> None:
    """It exits with 2, with a sentence and without a traceback."""
    result = invoke("replay", GNN, *arguments)
    assert result.exit_code == 2
    assert "Error: " in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04.", b"{", b"hello", b"\x80\x04cos\nsystem\n."])
def test_a_broken_file_is_named(invoke: Invoke, tmp_path: Path, content: bytes) -> None:
    """Whatever is in it, it is refused by name, and nothing of it is run."""
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    result = invoke("replay", str(path))
    assert result.exit_code == 2
    assert "broken.npz" in result.output
    assert "Traceback" not in result.output


def test_no_file_is_a_usage_error(invoke: Invoke) -> None:
    """Something must be replayed."""
    assert invoke("replay").exit_code == 2
    assert invoke("replay", "nowhere.npz").exit_code == 2


def test_an_empty_recording_has_figures(invoke: Invoke, tmp_path: Path) -> None:
    """Nothing was needed, and nothing was reserved."""
    path = tmp_path / "empty.npz"
    empty = np.array([], np.int64)
    Trace(empty, empty, empty, empty, empty).save(path)
    (one,) = figures(invoke, str(path), "--fit")
    assert (one["peak_reserved"], one["reserved_over_requested"], one["fit_over_requested"]) == (0, 1.0, 1.0)
    assert invoke("replay", str(path)).exit_code == 0


def test_huge_requests_do_not_hurt(invoke: Invoke, tmp_path: Path) -> None:
    """A hundred TiB are as good a number as any, and more than there are addresses for do not fit."""
    path = tmp_path / "huge.npz"
    rows = np.array([(Op.ALLOCATE, 0, 0, 100 << 40, 0)])
    Trace(*rows.T).save(path)
    (one,) = figures(invoke, str(path))
    ahead = one["peak_reserved"] - (100 << 40)
    assert 0 <= ahead <= 64 << 20


def test_words_of_a_recording_do_not_steer_the_terminal(invoke: Invoke, tmp_path: Path) -> None:
    """Its name and note are whatever a file says, and may be no Unicode."""
    path = tmp_path / "evil.npz"
    Trace(*np.zeros((5, 1), np.int64), name="\x1b[2J\ud800", note="\x1b]0;\ud800").save(path)
    for more in ([], ["--advise"], ["--plot", str(tmp_path / "out.html")]):
        result = invoke("replay", str(path), *more)
        assert result.exit_code == 0
        assert "\x1b" not in result.output


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """What `asyncmem run` would write of a program with two pools."""
    path = tmp_path / "run.amem"
    with (
        AsyncMemoryPool("simulated", name="mine", limit="64 MiB", segments="paged", small_limit="512 KiB") as pool,
        AsyncMemoryPool("simulated", name="other") as other,
    ):
        before = pool.allocate("1 MiB")
        with Recording(pool, other, file=path):
            held = [pool.allocate("3 MiB") for _ in range(4)]
            before.free()
            other.allocate("1 MiB").free()
            held.clear()
            pool.allocate("5 MiB").free()
    return str(path)


class TestOfRun:
    """`replay` reads what `run` writes."""

    def test_a_recording_is_replayed_as_it_was(self, invoke: Invoke, recorded: str) -> None:
        """With the limit and the options of its pool, unless others are given."""
        (one,) = figures(invoke, recorded, "--pool", "mine")
        assert (one["peak_requested"], one["limit"], one["note"]) == (13 * MIB, 64 * MIB, "")
        assert one["policy"] == "paged,small_limit=524288"
        assert one["recorded"] == {
            "name": "mine", "device": "simulated:0", "limit": 64 * MIB, "options": "paged,small_limit=524288",
        }  # fmt: skip
        (other,) = figures(invoke, recorded, "--pool", "mine", "--policy", "stream_ordered", "--limit", "1 GiB")
        assert (other["policy"], other["limit"]) == ("stream_ordered", 1 << 30)

    def test_it_is_replayed_on_its_device(self, invoke: Invoke, recorded: str) -> None:
        """By its name, or on another one."""
        (one,) = figures(invoke, recorded, "--pool", "mine", "--device", "recorded")
        assert (one["device"], one["limit"]) == ("simulated:0", 64 * MIB)
        assert one["policy"] == "paged,small_limit=524288"
        (one,) = figures(invoke, recorded, "--pool", "mine", "--device", "host", "--policy", "auto")
        assert (one["device"], one["peak_requested"]) == ("host", 13 * MIB)

    def test_of_several_pools_one_is_chosen(self, invoke: Invoke, recorded: str) -> None:
        """They are named; snapshots have devices instead."""
        for arguments in ((), ("--pool", "nobody")):
            result = invoke("replay", recorded, *arguments)
            assert result.exit_code == 2
            assert "mine, other" in result.output
        assert invoke("replay", recorded, "--pool", "other").exit_code == 0
        assert invoke("replay", recorded, "--pool", "mine", "--of", "0").exit_code == 2

    def test_advice_begins_with_the_options_it_had(self, invoke: Invoke, recorded: str) -> None:
        """And a damaged file is replayed as far as it is whole."""
        (one,) = figures(invoke, recorded, "--pool", "mine", "--advise")
        assert one["before"]["policy"] == "paged,small_limit=524288"
        Path(recorded).write_bytes(Path(recorded).read_bytes()[:-10])
        result = invoke("replay", recorded, "--pool", "mine", "--json")
        assert "ends in the middle" in result.stderr
        assert "ends in the middle" in json.loads(result.stdout)[0]["note"]

    def test_advice_is_for_the_pool_that_was_recorded(self, invoke: Invoke, recorded: str) -> None:
        """The lines have its device, its limit and its settings, but for those that are advised otherwise."""
        (one,) = figures(invoke, recorded, "--pool", "mine", "--advise")
        device, given = told(one["code"])
        assert device == "simulated:0"
        had = {"segments": "paged", "small_limit": 512 << 10, "limit": "64 MiB"} | one["arguments"]
        assert json.loads(json.dumps(given)) == had

    def test_a_host_is_advised_no_segments_that_it_lacks(self, invoke: Invoke, tmp_path: Path) -> None:
        """Nor are they tried, whatever kind it has now."""
        path = str(tmp_path / "host.amem")
        for kind in ("auto", "direct"):
            with AsyncMemoryPool("host", limit=(64 << 20) + 4096, segments=kind) as pool:
                with Recording(pool, file=path, force=True):
                    for nbytes in (3 << 20, 5 << 20, 7 << 20):
                        pool.allocate(nbytes).free()
                (one,) = figures(invoke, path, "--advise")
                device, given = told(one["code"])
                assert not [tried for tried in one["suggestions"] if "segments" in tried["arguments"]]
                assert (device, given["segments"]) == ("host", pool.options.segments)
            AsyncMemoryPool(device, **given).close()


def told(code: str) -> tuple[str, dict[str, Any]]:
    """Return the device and the arguments of the pool that lines make."""
    call = ast.parse(code).body[-1]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    (device,) = map(ast.literal_eval, call.value.args)
    return device, {str(one.arg): ast.literal_eval(one.value) for one in call.value.keywords}


class TestOnADevice:
    """`--device` replays through a real pool."""

    def test_the_table_names_it(self, invoke: Invoke) -> None:
        """With what is measured there instead of modelled."""
        result = invoke("replay", GNN, "--device", "simulated")
        assert result.exit_code == 0
        head, line = result.output.splitlines()
        assert head.split()[:2] == ["program", "device"]
        assert line.split()[:3] == ["gnn_sampled", "simulated:0", "auto"]
        assert line.endswith(" ns")

    def test_json_has_the_same_figures(self, invoke: Invoke) -> None:
        """But for those that only the model knows."""
        (one,) = figures(invoke, GNN, "--device", "host")
        assert set(one) == (NUMBERS | REALS | {"file", "note", "device", "policy", "limit", "completed"}) - {
            "driver_ms",
            "largest_hole",
            "fragmentation",
        }
        assert (one["device"], one["completed"]) == ("host", True)
        assert one["peak_requested"] == read(GNN).peak_requested
        assert one["peak_reserved"] / one["peak_requested"] == one["reserved_over_requested"]

    def test_policies_are_options_of_a_pool(self, invoke: Invoke) -> None:
        """Those too that have no effect on the model."""
        arguments = ("--device", "simulated", "--policy", "stream_ordered,overlap=0", "--policy", "segment_size=1GiB")
        found = figures(invoke, STREAMS, *arguments)
        assert [one["policy"] for one in found] == ["stream_ordered,overlap=0", "segment_size=1GiB"]
        assert found[0]["peak_reserved"] < found[1]["peak_reserved"]

    def test_limits_and_lags_are_passed_on(self, invoke: Invoke) -> None:
        """A multiple of what is requested; a program whose device is late waits for memory under it."""
        arguments = ("--lag", "60ms", "--limit", "2x", "--pace", "0.2")
        (one,) = figures(invoke, GNN, "--device", "simulated", *arguments)
        assert one["limit"] == pytest.approx(2 * one["peak_requested"])
        assert one["peak_reserved"] <= one["limit"]
        assert one["waits"] > 0
        assert one["wait_ms"] > 1
        assert one["recorded_ms"] == pytest.approx(200 * read(GNN).duration)

    def test_what_does_not_fit_is_said(self, invoke: Invoke) -> None:
        """It exits with 1, and says which row asked for how much."""
        result = invoke("replay", GNN, "--device", "simulated", "--limit", "1 GiB")
        assert result.exit_code == 1
        assert "out of memory under 1 GiB: row " in result.output

    @pytest.mark.parametrize("of_the_model", [("--fit",), ("--patience", "2%"), ("--plot", "out.html")])
    def test_what_is_about_the_model_is_refused(self, invoke: Invoke, of_the_model: tuple[str, ...]) -> None:
        """Rather than left out without a word."""
        result = invoke("replay", GNN, "--device", "simulated", *of_the_model)
        assert result.exit_code == 2
        assert f"{of_the_model[0]} does not go with --device" in result.output

    def test_a_device_that_is_not_there_is_named(self, invoke: Invoke) -> None:
        """As everywhere."""
        result = invoke("replay", GNN, "--device", "hots")
        assert result.exit_code == 2
        assert "'hots'" in result.output


class TestAdvice:
    """`--advise` says what would have helped."""

    def test_the_table_is_followed_by_lines_to_paste(self, invoke: Invoke) -> None:
        """What is there now comes first, what was tried next, each with whether it is advised."""
        result = invoke("replay", GNN, "--advise", "--lag", "20ms")
        assert result.exit_code == 0
        table, code = result.output.split("\n\n", 1)
        lines = table.splitlines()
        assert lines[0].startswith("gnn_sampled: 11.23 GiB requested")
        assert lines[1].startswith("as it is, stream_ordered")
        assert lines[2].split()[:2] == ['segments="paged"', "yes"]
        assert lines[-1].startswith("all that is advised")
        assert 'segments="paged"' in code
        compile(code, "advice", "exec")

    def test_json_has_all_figures(self, invoke: Invoke) -> None:
        """Before and after each option, and what is advised in all."""
        (one,) = figures(invoke, GNN, "--advise", "--policy", "paged")
        assert set(one) == {"file", "note", "before", "suggestions", "after", "arguments", "code"}
        assert one["before"]["policy"] == "paged"
        for tried in one["suggestions"]:
            assert set(tried) == {"arguments", "advised", "against", "before", "after"}
            assert tried["advised"] == (not tried["against"])
            assert set(tried["after"]) > REALS
        advised = {name for tried in one["suggestions"] if tried["advised"] for name in tried["arguments"]}
        assert set(one["arguments"]) == advised

    @pytest.mark.parametrize(
        "arguments",
        [("--limit", "2x"), ("--fit",), ("--patience", "2%"), ("--policy", "direct", "--policy", "paged")],
    )
    def test_what_it_tries_itself_is_refused(self, invoke: Invoke, arguments: tuple[str, ...]) -> None:
        """It is asked about one program as it is."""
        result = invoke("replay", GNN, "--advise", *arguments)
        assert result.exit_code == 2
        assert "--advise" in result.output
