"""Bytes, counts and seconds, to text and from it.

Texts for people are rounded to three significant digits, half to even; `count_text` is exact. Parsing is exact in
whole numbers: "7.5B" is 7 500 000 000 and "0.1 B" of bytes is refused. In a count B means 1e9 (as in "a 7B model"), in
an amount of memory it means byte; GB is 1e9 bytes and GiB is 2**30.
"""

from __future__ import annotations

import re
from fractions import Fraction

_DECIMAL = ("", "k", "M", "G", "T", "P")
_NBYTES_UNITS = (
    {"": 1, "B": 1, "KB": 1000}
    | {f"{p}B": 1000**i for i, p in enumerate(_DECIMAL) if i}
    | {f"{p}iB": 1024**i for i, p in enumerate(("", "K", "M", "G", "T", "P")) if i}
)
_COUNT_UNITS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_SECONDS_UNITS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}

_SPACES = " \u00a0\u2009\u202f_"  # plain, no-break, thin, narrow no-break; and Python's own separator
_GROUPED = re.compile(rf"[0-9]{{1,3}}(?:[{_SPACES}][0-9]{{3}})+(?![0-9])")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2}))?\s*([A-Za-z]*)")


def nbytes_text(nbytes: int | Fraction) -> str:
    """Decimal units: 31 406 250 000 is "31.4 GB", 49 920 is "49.9 kB", 512 is "512 B"."""
    return _scaled(Fraction(nbytes), [(Fraction(1000**i), f"{p}B") for i, p in enumerate(_DECIMAL)])


def seconds_text(seconds: float | Fraction) -> str:
    """0.0012 is "1.2 ms". Below a nanosecond digits are kept, above a thousand seconds they are not grouped."""
    return _scaled(Fraction(seconds), [(scale, unit) for unit, scale in reversed(_SECONDS_UNITS.items())])


def count_text(count: int, space: str = " ") -> str:
    """Exact: "7.5e9" where a million or more has at most four significant digits, else groups of three ("24 960")."""
    digits = str(abs(count)).rstrip("0")
    if abs(count) >= 10**6 and len(digits) <= 4:
        sign, head, tail = "-" if count < 0 else "", digits[0], digits[1:]
        return f"{sign}{head}{'.' if tail else ''}{tail}e{len(str(abs(count))) - 1}"
    return f"{count:,}".replace(",", space)


def parse_count(text: str) -> int:
    """A whole number: "7.5e9", "7.5B", "350M", "24 960", "24_960". Raises ValueError for anything else."""
    return _whole(text, _COUNT_UNITS, "a count such as 7.5e9, 7.5B or 24 960")


def parse_nbytes(text: str) -> int:
    """Whole bytes: "80GB" (80e9), "80 GiB" (80 * 2**30), "512". Raises ValueError for anything else."""
    return _whole(text, _NBYTES_UNITS, "an amount of memory such as 80GB or 80GiB")


def parse_bandwidth(text: str) -> int:
    """Whole bytes a second: "100GB/s" is 100e9. Raises ValueError for anything else, bits ("800Gb/s") included."""
    amount, slash, second = text.strip().rpartition("/")
    if not slash or second.strip() != "s":
        raise ValueError(f"{text!r} is not a bandwidth such as 100GB/s")
    return parse_nbytes(amount)


def parse_seconds(text: str) -> Fraction:
    """Exact seconds: "1.2 ms" is 3/2500. A unit is required. Raises ValueError for anything else."""
    number, unit = _quantity(text, "a time such as 1.2 ms or 30 s")
    if unit not in _SECONDS_UNITS:
        raise ValueError(f"{text!r}: unknown unit {unit!r}; known: {', '.join(_SECONDS_UNITS)}")
    return number * _SECONDS_UNITS[unit]


def significant_text(value: Fraction, digits: int = 3) -> str:
    """`value` rounded half to even to `digits` significant digits, without exponent or trailing zeros."""
    if not value:
        return "0"
    places = digits - 1 - _exponent(abs(value))
    rounded = round(value, places)  # exact: Fraction's round is half to even, and may carry into one digit more
    whole, rest = divmod(abs(rounded), 1)
    tail = f"{int(rest * 10**places):0{places}d}".rstrip("0") if places > 0 else ""
    return f"{'-' if rounded < 0 else ''}{int(whole)}{'.' if tail else ''}{tail}"


def _exponent(value: Fraction) -> int:
    """floor(log10(value)) of a positive value, exact."""
    guess = len(str(value.numerator)) - len(str(value.denominator))
    return guess if value >= Fraction(10) ** guess else guess - 1


def _scaled(value: Fraction, units: list[tuple[Fraction, str]]) -> str:
    """`value` in the largest of `units` (ascending) in which it rounds to at least 1."""
    for scale, unit in reversed(units):
        # 999 960 bytes round to "1 MB", not to "1000 kB": compare what would be printed
        if round(abs(value) / scale, 2 - _exponent(abs(value) / scale)) >= 1 if value else scale == 1:
            return f"{significant_text(value / scale)} {unit}"
    return f"{significant_text(value / units[0][0])} {units[0][1]}"


def _quantity(text: str, wanted: str) -> tuple[Fraction, str]:
    bare = _GROUPED.sub(lambda m: re.sub(rf"[{_SPACES}]", "", m.group()), text.strip(), count=1)
    match = _QUANTITY.fullmatch(bare)
    if match is None:
        raise ValueError(f"{text!r} is not {wanted}")
    number, exponent, unit = match.groups()
    return Fraction(number.removesuffix(".")) * Fraction(10) ** int(exponent or 0), unit


def _whole(text: str, units: dict[str, int], wanted: str) -> int:
    number, unit = _quantity(text, wanted)
    if unit not in units:
        known = ", ".join(u for u in units if u)
        raise ValueError(f"{text!r}: unknown unit {unit!r}; known: {known}")
    value = number * units[unit]
    if value.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)
