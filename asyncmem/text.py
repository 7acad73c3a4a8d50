"""Untrusted text (tags, names, paths, messages), escaped for output, and as JSON.

Inside, such text stays as it came. Outputs have it from here: terminals and logs, errors and `repr`, pages and files.
"""

import json
import re
from typing import Final

MOST: Final = 500
"""The most characters shown of one name; the middle of a longer one is left out."""

_NOTICE: Final = 48  # characters that tell what is left out
_NOT_PLAIN: Final = re.compile(r"[^\n -~]")
_SURROGATES: Final = range(0xD800, 0xE000)


def printable(text: str, *, most: int | None = MOST) -> str:
    r"""Return text as a line may show it: unchanged where it is harmless, else with escapes such as ``\x1b``.

    Escaped is what `str.isprintable` refuses, as in `repr`: control characters, ends of lines, marks that reorder or
    hide text, and what is no Unicode.

    Args:
        text: Any text.
        most: Of more characters than this the middle is left out, and how many they were is said; None for any number.
    """
    if not text.isprintable():
        text = "".join(map(_escaped, text))
    return text if most is None or len(text) <= most else _shortened(text, most)


def printable_lines(text: str) -> str:
    """Return text of several lines, each as `printable` makes it and as long as it is."""
    return text if text.isprintable() else "\n".join(printable(line, most=None) for line in text.split("\n"))


def quoted(text: str) -> str:
    """Return `repr` of a text, of a long one without its middle."""
    shown = repr(text)
    return shown if len(shown) <= MOST else _shortened(shown, MOST)


def encodable(text: str) -> str:
    r"""Return text that UTF-8 can hold: what a name of a file has besides is escaped, as in ``\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_json(value: object, *, indent: int | None = None) -> str:
    r"""Return JSON in plain ASCII, whose texts every reader can decode: ``\udcff`` stays so, with its backslash."""
    return _NOT_PLAIN.sub(_in_json, json.dumps(value, ensure_ascii=False, indent=indent))


def _shortened(text: str, most: int) -> str:
    # With the notice it is no longer than allowed, so that it may go through here again.
    head = most * 2 // 3
    tail = len(text) - (most - head - _NOTICE)
    return f"{text[:head]}...({tail - head:,} characters left out)...{text[tail:]}"


def _escaped(one: str) -> str:
    return one if one.isprintable() else one.encode("unicode_escape").decode("ascii")


def _in_json(found: re.Match[str]) -> str:
    number = ord(found[0])
    if number in _SURROGATES:
        return f"\\\\u{number:04x}"
    return f"\\u{number:04x}" if number < 1 << 16 else json.dumps(found[0])[1:-1]
