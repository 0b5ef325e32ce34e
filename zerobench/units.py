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

_TEXT_NBYTES = tuple(f"{p}B" for p in _DECIMAL)
_TEXT_SECONDS = tuple(reversed(_SECONDS_UNITS))

_SPACES = " \u00a0\u2009\u202f_"  # plain, no-break, thin, narrow no-break; and Python's own separator
_GROUPED = re.compile(rf"[0-9]{{1,3}}(?:[{_SPACES}][0-9]{{3}})+(?![0-9])")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,2}))?\s*([A-Za-z]*)")


def nbytes_text(nbytes: int | Fraction) -> str:
    """Decimal units: 31 406 250 000 is "31.4 GB", 49 920 is "49.9 kB", 512 is "512 B"."""
    return _scaled(nbytes, _TEXT_NBYTES, 0)


def seconds_text(seconds: float | Fraction) -> str:
    """0.0012 is "1.2 ms". Below a nanosecond digits are kept, above a thousand seconds they are not grouped."""
    return _scaled(seconds, _TEXT_SECONDS, -3)


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


def significant_text(value: Fraction | int, digits: int = 3) -> str:
    """`value` rounded half to even to `digits` significant digits, without exponent or trailing zeros."""
    mantissa, exponent = _rounded(value, digits)
    return _plain(mantissa, exponent, digits, value < 0)


def _rounded(value: Fraction | float, digits: int) -> tuple[int, int]:
    """(m, e): |value| rounded half to even is m times 10 ** (e + 1 - digits), m of `digits` digits; 0 is (0, 0). Exact,
    in whole numbers: a report has a hundred thousand of these."""
    over, under = value.as_integer_ratio()
    over = abs(over)
    if not over:
        return 0, 0
    exponent = len(str(over)) - len(str(under))
    if over < under * 10**exponent if exponent >= 0 else over * 10**-exponent < under:
        exponent -= 1
    places = digits - 1 - exponent
    over, under = (over * 10**places, under) if places >= 0 else (over, under * 10**-places)
    mantissa, rest = divmod(over, under)
    if 2 * rest > under or (2 * rest == under and mantissa % 2):
        mantissa += 1
    return (mantissa // 10, exponent + 1) if mantissa == 10**digits else (mantissa, exponent)


def _plain(mantissa: int, exponent: int, digits: int, negative: bool) -> str:
    places = digits - 1 - exponent
    whole, rest = divmod(mantissa, 10**places) if places > 0 else (mantissa * 10**-places, 0)
    tail = f"{rest:0{places}d}".rstrip("0") if rest else ""
    return f"{'-' if negative and mantissa else ''}{whole}{'.' if tail else ''}{tail}"


def _scaled(value: Fraction | float, units: tuple[str, ...], first: int, digits: int = 3) -> str:
    """`value` in the largest of `units` in which it rounds to at least 1, else in the smallest. units: each a thousand of
    the one before; the first is 1000 ** first."""
    # 999 960 bytes round to "1 MB", not to "1000 kB": the exponent is that of what is printed
    mantissa, exponent = _rounded(value, digits)
    power = min(max(exponent // 3, first), first + len(units) - 1)
    return f"{_plain(mantissa, exponent - 3 * power, digits, value < 0)} {units[power - first]}"


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
