"""Options from the environment: `ASYNCMEM_<OPTION>`, and several at once in `ASYNCMEM_CONF="limit:80%,pregrow:1GiB"`.

Only text is handled here: which variable speaks about which option. What the text means is the options' business.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from asyncmem.errors import AsyncmemWarning, InvalidRequest, UnknownOption
from asyncmem.synonyms import OPTIONS

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
        InvalidRequest: An entry names no known option, or has no value.

    A variable that names no known option may be meant for another version: it is only warned of, and once.
    """
    settings = dict(_entries(environ.get(CONF, ""), known))
    for variable, name, text in _ours(environ):
        if name in known:
            settings[name] = Setting(text, variable)
        elif variable not in _warned:
            _warned.add(variable)
            warnings.warn(f"{_unknown(variable, known)}; it is ignored", AsyncmemWarning, stacklevel=4)
    return settings


_warned: Final[set[str]] = set()


def unknown_variables(environ: Mapping[str, str], known: Collection[str]) -> list[tuple[str, InvalidRequest]]:
    """Return the variables that look like an option's and are none, each with the error that says so."""
    return [(one, _unknown(one, known)) for one, name, _ in _ours(environ) if name not in known]


def _unknown(variable: str, known: Collection[str]) -> UnknownOption:
    return unknown_option(variable, [PREFIX + one.upper() for one in known], "environment")


def _ours(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    # Text is asked for only where it is ours, because `os.environ` decodes it each time.
    for variable in environ:
        if variable.startswith(PREFIX) and variable != CONF and not variable.startswith(TESTS):
            text = environ[variable]
            if text.strip():
                yield variable, variable.removeprefix(PREFIX).lower(), text


def unknown_option(name: str, known: Collection[str], what: str = "options") -> UnknownOption:
    """Make the error for a name that no option has: with the nearest one, or with all of them where none is near."""
    import difflib

    near = [ours] if (ours := OPTIONS.get(name)) in known else difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"
    return UnknownOption(what, name, "the name of an option", hint=hint)


def _entries(text: str, known: Collection[str]) -> Iterator[tuple[str, Setting]]:
    for entry in filter(None, map(str.strip, text.split(","))):
        name, colon, value = (part.strip() for part in entry.partition(":"))
        if not (colon and value):
            raise InvalidRequest(CONF, entry, '"option:value" entries separated by commas')
        if name.lower() not in known:
            raise unknown_option(name, known, CONF)
        yield name.lower(), Setting(value, CONF)
