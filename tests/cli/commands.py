"""All commands by name, imported."""

from typing import Final

import click

from asyncmem.cli.app import commands

_CONTEXT: Final = click.Context(commands)

COMMANDS: Final = {
    name: found for name in commands.list_commands(_CONTEXT) if (found := commands.get_command(_CONTEXT, name))
}
