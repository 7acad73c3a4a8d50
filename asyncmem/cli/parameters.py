"""Kinds of command-line values that more than one command takes."""

import click

from asyncmem.errors import InvalidRequest
from asyncmem.units import parse_size


class SizeParameter(click.ParamType[int]):
    """A number of bytes: an integer, or text such as "64 MiB"."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it where it is given, so that a mistake names the option."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value), what=param.human_readable_name if param else self.name)
        except InvalidRequest as error:
            self.fail(f"expected {error.expected}, got {error.got}", param, ctx)
