"""Texts of quantities, and quantities of texts."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobench.units import count_text, nbytes_text, parse_count, parse_nbytes, parse_seconds, seconds_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (512, "512 B"),
        (Fraction(25, 2), "12.5 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (49_920, "49.9 kB"),
        (999_960, "1 MB"),  # not "1000 kB"
        (31_406_250_000, "31.4 GB"),
        (1_875_000_000, "1.88 GB"),  # a tie goes to the even digit
        (1_865_000_000, "1.86 GB"),
        (120 * 10**9, "120 GB"),
        (16 * 10**12, "16 TB"),
        (5 * 10**18, "5000 PB"),
        (-49_920, "-49.9 kB"),
    ],
)
def test_bytes_to_text(nbytes, text):
    assert nbytes_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0012, "1.2 ms"),
        (Fraction(9999, 10**7), "1 ms"),
        (2.5e-7, "250 ns"),
        (90, "90 s"),
        (1e-11, "0.01 ns"),
    ],
)
def test_seconds_to_text(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (24_960, "24 960"), (10**6, "1e6"), (7_500_000_000, "7.5e9"), (12_345_000, "12 345 000")],
)
def test_counts_to_text(count, text):
    assert count_text(count) == text


@given(st.integers(-(10**15), 10**15))
def test_counts_are_exact_and_read_back(count):
    assert parse_count(count_text(abs(count))) == abs(count)
    assert parse_count(count_text(abs(count), space="\u2009")) == abs(count)
    assert count_text(-abs(count)).lstrip("-") == count_text(abs(count))


@given(st.integers(1, 10**18))
def test_text_of_bytes_is_within_half_of_its_third_digit(nbytes):
    number, unit = nbytes_text(nbytes).split()
    shown = Fraction(number) * parse_nbytes(f"1{unit}")
    assert abs(shown - nbytes) * 200 <= nbytes
    assert Fraction(number) < 1000 or unit == "PB"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7.5e9", 7_500_000_000),
        ("7.5B", 7_500_000_000),
        ("350M", 350_000_000),
        ("24_960", 24_960),
        (" 12 ", 12),
        ("1.e3", 1000),
    ],
)
def test_counts_from_text(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("0.5 KiB", 512), ("1024", 1024), ("7 B", 7), ("1e3 kB", 10**6)],
)
def test_bytes_from_text(text, nbytes):
    assert parse_nbytes(text) == nbytes


def test_seconds_from_text():
    assert parse_seconds("1.2 ms") == Fraction(12, 10**4)
    with pytest.raises(ValueError, match="unknown unit"):
        parse_seconds("3")


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_count, "", "is not a count"),
        (parse_count, "-3", "is not a count"),
        (parse_count, "1.5", "not a whole number"),
        (parse_count, "7.5GB", "unknown unit 'GB'"),
        (parse_count, "1e999999999", "is not a count"),  # would be computed digit by digit
        (parse_count, "24 96", "is not a count"),
        (parse_count, "24 9600", "is not a count"),
        (parse_nbytes, "80 gib", "unknown unit 'gib'"),
        (parse_nbytes, "0.1 B", "not a whole number"),
        (parse_nbytes, "nan", "is not an amount"),
    ],
)
def test_what_is_refused(parse, text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)
