"""Options from the environment: `ASYNCMEM_<OPTION>`, and several at once in `ASYNCMEM_CONF="limit:80%,pregrow:1GiB"`.

Only text is handled here: which variable speaks about which option. What the text means is the options' business.
"""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from asyncmem.errors import InvalidRequest

PREFIX: Final = "ASYNCMEM_"
CONF: Final = "ASYNCMEM_CONF"
TESTS: Final = "ASYNCMEM_TEST_"  # what the test suite is told, which is no option


class Setting(NamedTuple):
    """What the environment says about one option."""

    text: str
    """The value, as it was written."""
    origin: str
    """The variable that says so."""


def read_environment(environ: Mapping[str, str], known: Collection[str]) -> dict[str, Setting]:
    """Collect what the environment says about the known options.

    A variable of its own beats `ASYNCMEM_CONF`, in which a later entry beats an earlier one. Empty text says nothing.

    Raises:
        InvalidRequest: A variable or an entry names no known option, or an entry has no value.
    """
    settings = dict(_entries(environ.get(CONF, ""), known))
    for variable, text in environ.items():
        ours = variable.startswith(PREFIX) and variable != CONF and not variable.startswith(TESTS)
        if ours and text.strip():
            name = variable.removeprefix(PREFIX).lower()
            if name not in known:
                raise unknown_option(variable, [PREFIX + one.upper() for one in known], "environment")
            settings[name] = Setting(text, variable)
    return settings


def unknown_option(name: str, known: Collection[str], what: str = "options") -> InvalidRequest:
    """Make the error for a name that no option has: with the nearest one, or with all of them where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
    return InvalidRequest(what, name, "the name of an option", hint=hint)


def _entries(text: str, known: Collection[str]) -> Iterator[tuple[str, Setting]]:
    for entry in filter(None, map(str.strip, text.split(","))):
        name, colon, value = (part.strip() for part in entry.partition(":"))
        if not (colon and value):
            raise InvalidRequest(CONF, entry, '"option:value" entries separated by commas')
        if name.lower() not in known:
            raise unknown_option(name, known, CONF)
        yield name.lower(), Setting(value, CONF)
