"""Kinds of command-line values that more than one command takes."""

import click

from asyncmem.errors import InvalidRequest
from asyncmem.units import parse_duration, parse_size


def read_size(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Read a number of bytes, an integer or text such as "64 MiB", as the callback of an option.

    Read there and not where it is used, a mistake is shown with the option's name.
    """
    try:
        return parse_size(text)
    except InvalidRequest as error:
        message = f"expected {error.expected}, got {error.got}"
        raise click.BadParameter(message, ctx=context, param=parameter) from error


def read_duration(context: click.Context, parameter: click.Parameter, text: str) -> float:
    """Read a time span, seconds or text such as "20 ms", as the callback of an option."""
    try:
        return parse_duration(text)
    except InvalidRequest as error:
        message = f"expected {error.expected}, got {error.got}"
        raise click.BadParameter(message, ctx=context, param=parameter) from error
