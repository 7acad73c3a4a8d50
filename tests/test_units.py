"""Sizes, shares and time spans: what people write is read exactly, what is printed can be read back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmem.errors import InvalidRequest
from asyncmem.figures import format_count, format_duration, format_share, format_size
from asyncmem.units import (
    MAX_SIZE,
    parse_count,
    parse_duration,
    parse_share,
    parse_size,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64 MiB", 64 * MIB),
        ("64MiB", 64 * MIB),
        (" 64  mib ", 64 * MIB),
        ("1.5GiB", 1536 * MIB),
        ("4096", 4096),
        ("1_000", 1000),
        ("2GB", 2_000_000_000),
        ("2 kB", 2000),
        ("512 B", 512),
        ("0", 0),
        ("128 TiB", MAX_SIZE),
        ("0.1 KiB", 102),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, nbytes: int) -> None:
    """Binary units are powers of 1024, decimal ones of 1000, and a fraction of a byte is dropped."""
    assert parse_size(text) == nbytes


@given(st.integers(0, MAX_SIZE))
def test_sizes_given_as_integers_come_back(nbytes: int) -> None:
    """Any integer type is a number of bytes, and so is its text."""
    assert parse_size(nbytes) == parse_size(np.int64(nbytes)) == parse_size(str(nbytes)) == nbytes


@given(st.integers(0, 127), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_round_sizes_print_as_they_are_written(number: int, unit: str) -> None:
    """A whole number of a unit is printed in that unit, so configuration and messages use the same words."""
    text = f"{number} {unit}" if number else "0 B"
    assert format_size(parse_size(text)) == text


@given(st.integers(0, MAX_SIZE))
def test_printed_sizes_are_near(nbytes: int) -> None:
    """What is printed lies within half a percent of the truth."""
    assert math.isclose(parse_size(format_size(nbytes)), nbytes, rel_tol=0.005, abs_tol=1)


@pytest.mark.parametrize(
    "value",
    [-1, MAX_SIZE + 1, 2**63, pytest.param(10**6000, id="huge"), "128.1 TiB", pytest.param("9" * 9000, id="long")],
)
def test_absurd_sizes_are_refused(value: int | str) -> None:
    """Negative sizes and those above the address space are named as the mistake they are, whatever their length."""
    with pytest.raises(InvalidRequest, match="limit: expected 0 to 128 TiB, got "):
        parse_size(value, what="limit")


@pytest.mark.parametrize(
    "value", [1.0, 1.5, True, None, [], np.zeros(3), "", "64M", "MiB", "-1 MiB", "1.2.3", "1 parsec"]
)
def test_what_is_no_size_is_refused(value: object) -> None:
    """Floats, truth values and ambiguous units ("64M") are not guessed at; the message shows what to write."""
    with pytest.raises(InvalidRequest, match='"64 MiB"'):
        parse_size(value)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("value", "share"), [("80%", 0.8), (" 99.5 % ", 0.995), ("0.8", 0.8), (0.25, 0.25), (1, 1.0), ("0%", 0)]
)
def test_shares_are_read_as_numbers_and_percentages(value: float | str, share: float) -> None:
    """A share is a number from 0 to 1 or a percentage."""
    assert parse_share(value) == share


@pytest.mark.parametrize("value", ["101%", 1.01, -0.1, math.nan, math.inf, True, None, "80 percent", ""])
def test_what_is_no_share_is_refused(value: object) -> None:
    """A share outside 0 to 1 is an error, and so is what is no number at all."""
    with pytest.raises(InvalidRequest, match="fraction: expected "):
        parse_share(value, what="fraction")  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("500 ms", 0.5), ("10s", 10.0), ("2 min", 120.0), ("1.5 h", 5400.0), ("20 us", 20e-6), (3, 3.0), ("0", 0.0)],
)
def test_durations_are_read_in_seconds_or_units(value: float | str, seconds: float) -> None:
    """A number is seconds; text may name a unit."""
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", [-1, math.inf, math.nan, "soon", "5 days", True, None])
def test_what_is_no_duration_is_refused(value: object) -> None:
    """A time span is finite and not negative."""
    with pytest.raises(InvalidRequest, match="timeout: expected "):
        parse_duration(value)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize(("value", "number"), [(0, 0), (7, 7), ("7", 7), (" 12 ", 12), (np.int32(5), 5)])
def test_counts_are_whole_numbers(value: int | str, number: int) -> None:
    """A count is an integer of any type, or its text."""
    assert parse_count(value) == number


@pytest.mark.parametrize("value", [-1, 1.0, "-1", "1.5", "many", pytest.param("9" * 9000, id="long"), True, None])
def test_what_is_no_count_is_refused(value: object) -> None:
    """A count is not negative, not broken and not absurd."""
    with pytest.raises(InvalidRequest, match="count: expected a whole number from 0"):
        parse_count(value)  # type: ignore[arg-type]  # that is the point


def test_a_count_may_have_a_least() -> None:
    """It is good enough itself; what lies below it is refused, and the message says where the numbers begin."""
    assert [parse_count(one, least=2) for one in (2, "3")] == [2, 3]
    for value in (1, "1", 0, -2, "two"):
        with pytest.raises(InvalidRequest, match="workers: expected a whole number from 2"):
            parse_count(value, what="workers", least=2)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1025, "1.00 KiB"),
        (3 << 29, "1.50 GiB"),
        (-64 * MIB, "-64 MiB"),
        (1 << 60, "1024 PiB"),
    ],
)
def test_sizes_are_printed_with_their_unit(nbytes: int, text: str) -> None:
    """Sizes that are no whole number of a unit have two decimals."""
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.4e-7, "340 ns"),
        (1.2e-3, "1.2 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (11400, "3 h 10 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_durations_are_printed_with_their_unit(seconds: float, text: str) -> None:
    """Three digits are enough, and rounding never shows sixty of a unit."""
    assert format_duration(seconds) == text


def test_shares_and_counts_are_printed_as_people_say_them() -> None:
    """Shares are percentages, and a noun agrees with its number."""
    assert [format_share(one) for one in (0.0, 0.8, 0.995, 1.0)] == ["0%", "80%", "99.5%", "100%"]
    assert [format_count(one, "request") for one in (0, 1, 12000)] == ["0 requests", "1 request", "12,000 requests"]
    assert format_count(2, "box", "boxes") == "2 boxes"
