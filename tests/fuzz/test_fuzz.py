"""Readers of files raise what they say and nothing else, whatever is in the file; `run.py` looks for longer."""

import contextlib
import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from pathlib import Path

import pytest

from . import harnesses
from .mutations import changed

SECONDS = 60.0
"""For all harnesses together."""
SLOW = 10.0
"""Seconds that one input may take."""
SEED = int(os.environ.get("ASYNCMEM_FUZZ_SEED", "0")) or (
    random.SystemRandom().randrange(1, 1 << 30) if os.environ.get("HYPOTHESIS_PROFILE") == "searching" else 1
)
CORPUS = Path(__file__).parent / "corpus"


def corpus_of(name: str) -> list[bytes]:
    """Return good inputs of a harness, and those that once led somewhere new."""
    return [*harnesses.seeds(name), *(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))]


def fuzz(name: str, harness: Callable[[bytes], None], seconds: float, folder: Path) -> int:
    """Give a harness inputs for so long, and return how many.

    Raises:
        AssertionError: It raised something, or took too long; the input is saved, and the text says where.
    """
    began = time.process_time()
    inputs = changed(corpus_of(name), SEED)
    for number in takewhile(lambda _: time.process_time() < began + seconds, count()):
        data = next(inputs)
        before = time.process_time()
        try:
            harness(data)
            taken = time.process_time() - before
            assert taken < SLOW, f"{taken:.1f} s"
        except Exception as error:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{name}-{hashlib.sha1(data, usedforsecurity=False).hexdigest()}"
            path.write_bytes(data)
            raise AssertionError(
                f"input {number} of seed {SEED} raised {error!r}. It is saved; run it alone by\n"
                f"    python {Path(harnesses.__file__).with_name('run.py')} {name} {path.absolute()}"
            ) from error
    return number


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", harnesses.HARNESSES)
def test_reader_refuses_what_is_damaged(name: str) -> None:
    """By the error that it documents, and soon."""
    assert fuzz(name, harnesses.HARNESSES[name], SECONDS / len(harnesses.HARNESSES), Path(".fuzz")) > 10


@pytest.mark.parametrize("name", harnesses.HARNESSES)
def test_seeds_are_good_files(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read to their end, and so what is changed in them matters."""
    monkeypatch.setattr(harnesses, "suppress", lambda *_: contextlib.nullcontext())
    for data in harnesses.seeds(name):
        harnesses.HARNESSES[name](data)


def test_reader_that_raises_something_else_is_found(tmp_path: Path) -> None:
    """With the input, saved, that makes it do so."""

    def planted(data: bytes) -> None:
        if b'"version": 1' not in data:
            data[len(data)]

    with pytest.raises(AssertionError, match=r"of seed \d+ raised IndexError.*\n.*run.py plan") as caught:
        fuzz("plan", planted, 10, tmp_path)
    (saved,) = tmp_path.iterdir()
    assert str(saved) in str(caught.value)
    with pytest.raises(IndexError):
        planted(saved.read_bytes())


def test_reader_that_is_slow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is what a file may not ask for, either."""
    times: Iterator[int] = count(0, 20)
    monkeypatch.setattr(time, "process_time", lambda: next(times))
    with pytest.raises(AssertionError, match=r"20\.0 s"):
        fuzz("plan", lambda _: None, 100, tmp_path)
