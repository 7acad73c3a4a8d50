"""What the tests of the commands share."""

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from asyncmem.cli.app import commands

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Run the command line in this process: `invoke("doctor", "--json")`; wide, so that no line is broken."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(commands, list(arguments), prog_name="asyncmem")

    return run
