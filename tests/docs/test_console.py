"""What pages show of the command line is what it prints."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from asyncmem.cli.app import commands

ROOT = Path(__file__).parents[2]
SESSION = re.compile(r"^```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Shown(NamedTuple):
    """A command on a page, and what is printed below it."""

    page: str
    command: str
    output: str


def shown() -> list[Shown]:
    found = []
    for path in sorted(ROOT.glob("docs/**/*.md")):
        for session in SESSION.finditer(path.read_text(encoding="utf-8")):
            command, _, output = session["text"].replace("\\\n", " ").partition("\n")
            # What a device took is another time's, and so is what a machine is.
            if re.match(r"\$ asyncmem (replay (?!.*--device)|estimate .*--room)", command):
                found.append(Shown(path.name, command.removeprefix("$ asyncmem "), output))
    return found


@pytest.mark.parametrize("one", shown(), ids=lambda one: f"{one.page}: {one.command}")
def test_commands_print_what_pages_show(one: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the letter: a replay on the model and an estimate are the same every time."""
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(commands, shlex.split(one.command))
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.output.splitlines()] == one.output.splitlines()


def test_pages_show_some() -> None:
    """The pattern finds what is there."""
    assert len(shown()) >= 5
