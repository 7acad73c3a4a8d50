"""Read pickles of plain data, and nothing else: a file that names a class or a function is refused, not obeyed.

An unpickler that refuses classes can still be made to fill memory, or to hash for ever, by a file of a few bytes. So
the file is looked through first: only the codes of plain data may be in it, and only as far as they are harmless.
"""

import re
from io import BufferedReader, BytesIO
from pickle import BINUNICODE, SHORT_BINUNICODE, STOP, Unpickler, UnpicklingError
from typing import Final, NoReturn

from asyncmem.errors import BadTrace

PLAIN: Final = "dicts, lists, tuples of up to three integers, text, numbers, True, False and None"

_HEAD: Final = re.compile(rb"\x80[\x02-\x05]", re.DOTALL)
_CALLS: Final = b"c\x93iRob\x81\x92\x82\x83\x84PQ"
# A value that was remembered; None, True, False, marks, containers, filling them; remembering the last value; a float.
_SIMPLE: Final = rb"h.|j.{4}|[N\x88\x89(}\])aesu\x94]+|q.|G.{8}"
_LONGS: Final = b"|".join(rb"\x%02x.{%d}" % (nbytes, nbytes) for nbytes in range(10))  # wider ones could collide
_SHORTEST_PUT: Final = 6  # bytes for a value and for remembering it under a long number
_DAMAGE: Final = (AttributeError, EOFError, IndexError, KeyError, OverflowError, TypeError, UnpicklingError, ValueError)


def load_plain(data: bytes) -> object:
    """Answer what a pickle of protocol 2 to 5 holds.

    Raises:
        BadTrace: It is cut off, damaged, or has more in it than plain data.
    """
    _look_through(data)
    try:
        # The unpickler reads ahead where it can peek.
        return PlainUnpickler(BufferedReader(BytesIO(data))).load()
    except _DAMAGE as error:
        raise BadTrace(f"a damaged pickle ({error})", PLAIN) from error


class PlainUnpickler(Unpickler):
    """The second lock, should something have been overlooked: it refuses every class and every function."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise UnpicklingError(f"{module}.{name} is a class or a function")


def _look_through(data: bytes) -> None:
    tokens = _tokens(len(data))
    if not _HEAD.match(data):
        raise BadTrace("another beginning", "a pickle of protocol 2 to 5")
    at = 2
    while (code := data[at : at + 1]) != STOP:
        if code == SHORT_BINUNICODE:
            at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
        elif code == BINUNICODE:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif (found := tokens.match(data, at)) is not None:
            at = found.end()
        elif not code:
            raise BadTrace(f"an end after {len(data)} bytes", "a whole pickle", hint="was it cut off?")
        else:
            what = "a class or a function to call" if code in _CALLS else f"code {code[0]:#x}"
            raise BadTrace(f"{what} at byte {at}", PLAIN)


def _tokens(length: int) -> re.Pattern[bytes]:
    # Frames, which may begin between any two codes, are read ahead as a whole. The unpickler's memory has a place for
    # every number up to the largest that a value is remembered under.
    frame = rb"\x95%b" % _number(8, length)
    put = rb"r%b" % _number(4, length // _SHORTEST_PUT)
    whole = rb"(?:\x8a(?:%b)|K.|M..|J.{4})(?:%b)?" % (_LONGS, frame)
    # Tuples have only integers in them: the hash of a tuple of tuples may be asked for, and takes for ever.
    flat = rb"%b(?:\x85|%b(?:\x86|%b\x87))" % (whole, whole, whole)
    return re.compile(rb"(?:%b)++" % b"|".join((_SIMPLE, flat, whole, put, frame)), re.DOTALL)


def _number(width: int, most: int) -> bytes:
    # Matches the bytes of a number that is not much larger than `most`.
    used = min(max(1, (most.bit_length() + 7) // 8), width)
    top = min(most >> 8 * (used - 1), 255)
    return rb".{%d}[\x00-\x%02x]\x00{%d}" % (used - 1, top, width - used)
