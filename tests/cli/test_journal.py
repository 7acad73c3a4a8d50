"""`asyncmem journal`: what a pool was told, in words, and told again."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncmem import AsyncMemoryPool
from asyncmem.cli.app import commands


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A journal of a pool that has grown twice."""
    path = str(tmp_path / "pool.jsonl")
    with (
        AsyncMemoryPool("simulated", limit="16 MiB", segment_size="4 MiB", journal=path) as pool,
        pool.allocate("3 MiB"),
        pool.allocate("3 MiB"),
    ):
        pass
    return path


def test_a_journal_is_printed_in_words(file: str) -> None:
    """Each call with its effects below it."""
    done = CliRunner().invoke(commands, ["journal", file])
    assert done.exit_code == 0
    assert "submit: request 1, 3 MiB" in done.output
    assert "→ grow: request 1, job 1, by caller, 4 MiB" in done.output


def test_a_replay_that_decides_the_same_says_so(file: str) -> None:
    """And exits with 0."""
    done = CliRunner().invoke(commands, ["journal", "--replay", file])
    assert (done.exit_code, done.output) == (0, f"{file}: the same is decided again\n")


def test_a_replay_with_another_setting_says_where_it_differs(file: str) -> None:
    """And exits with 1."""
    done = CliRunner().invoke(commands, ["journal", "--with", "segment_size=8 MiB", file])
    assert done.exit_code == 1
    assert f"{file}, row " in done.output
    assert "expected\n" in done.output
    assert "grow: request 1, job 1, by caller, 8 MiB" in done.output


@pytest.mark.parametrize(
    ("changes", "expected"),
    [("bypass", "SETTING=VALUE"), ("bypass=much", "bypass"), ("by_pass=1", "did you mean 'bypass'")],
)
def test_wrong_settings_are_refused_by_name(changes: str, expected: str, file: str) -> None:
    """As wrong options are."""
    done = CliRunner().invoke(commands, ["journal", "--with", changes, file])
    assert done.exit_code == 2
    assert expected in done.output


def test_a_damaged_file_is_refused_with_its_row(file: str) -> None:
    """And without a traceback."""
    with Path(file).open("a") as end:
        end.write("nonsense\n")
    done = CliRunner().invoke(commands, ["journal", file])
    assert done.exit_code == 2
    assert "row " in done.output
    assert "a damaged line" in done.output
