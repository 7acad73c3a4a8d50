"""Random changes of inputs, for where Atheris is not installed: always the same ones of a seed."""

import random
import re
from collections.abc import Iterator, Sequence

_NUMBERS = [0, 1, 127, 128, 255, 256, 1 << 15, (1 << 16) - 1, 1 << 31, (1 << 32) - 1, 1 << 47, (1 << 62), (1 << 64) - 1]
_WORDS = [
    b"null", b"true", b"-1", b"1e400", b"NaN", b"[]", b"{}", b'""', b"[" * 3000, b"9" * 4400, b"9" * 400, b'"\\ud800"',
    b"\xff\xfe", b"\0", b"1" + b"0" * 18, b"-0.0", b"\x80", b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff",
]  # fmt: skip
_VALUE = re.compile(rb'-?\d[\d.e+-]*|"[^"]*"|true|false|null')


def changed(corpus: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Return inputs without end: each is one of the corpus with one change or a few."""
    draw = random.Random(seed)
    while True:
        data = bytearray(draw.choice(corpus))
        for _ in range(draw.choice([1, 1, 1, 2, 3, 8])):
            _change(data, draw, corpus)
        yield bytes(data)


def _change(data: bytearray, draw: random.Random, corpus: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    match draw.randrange(9):
        case 0 if at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            data[at : at + 1] = bytes([draw.randrange(256)])
        case 2:
            del data[at:]
        case 3:
            del data[at : at + draw.randrange(1, 40)]
        case 4:
            data[at:at] = draw.choice(_WORDS)
        case 5:
            width = draw.choice([1, 2, 4, 8])
            number = draw.choice(_NUMBERS) + draw.randrange(-2, 3) & (1 << 8 * width) - 1
            data[at : at + width] = number.to_bytes(width, draw.choice(["little", "big"]))
        case 6:  # some of another
            other = draw.choice(corpus)
            first = draw.randrange(len(other) + 1)
            data[at:at] = other[first : first + draw.randrange(200)]
        case _:  # a value of JSON
            places = [one.span() for one in _VALUE.finditer(data)]
            if places:
                first, end = draw.choice(places)
                data[first:end] = draw.choice([*_WORDS, str(draw.choice(_NUMBERS)).encode()])
