"""Files from strangers: opened only where they are files, and JSON read so that two readers cannot differ about it.

A pipe that nobody writes to, a device without an end or a folder in a file's place is refused before a byte is read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG = b"0" * 20  # digits; a number of 64 bits has 19


def opened(path: str | Path) -> BinaryIO:
    """The regular file at `path`, or the one that it links to, to be read. Raises OSError, also for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # without waiting for one who writes to a pipe
    try:
        kind = os.fstat(fd).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "is a pipe, a socket or a device, not a file", str(path))
        return open(fd, "rb", buffering=1 << 18)  # lines of results are longer than the usual 8 kB
    except BaseException:
        os.close(fd)
        raise


class BadWord(ValueError):
    """What Python's reader of JSON lets through and a file of ours never has. word: as it stands in the file."""

    def __init__(self, what: str, word: str) -> None:
        super().__init__(what)
        self.word = word


def no_constant(word: str) -> None:
    raise BadWord(f"{word} is not JSON", word)


def whole(word: str) -> int:
    """The number, if it has at most 64 bits. Raises BadWord."""
    if len(word) <= 20 and -(2**63) <= (value := int(word)) < 2**64:
        return value
    raise BadWord(f"{word[:19]}...: a whole number of more than 64 bits", word)


def finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise BadWord(f"{word[:40]} is past any float", word)
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadWord(f"{twice!r} stands there twice", json.dumps(twice, ensure_ascii=False) + ":")
    return found


STRICT = json.JSONDecoder(
    parse_constant=no_constant, parse_int=whole, parse_float=finite, object_pairs_hook=no_duplicates
)
_QUICK = json.JSONDecoder(parse_constant=no_constant, object_pairs_hook=no_duplicates)


def has_long_number(text: bytes) -> bool:
    """Whether there is a row of digits that could be a number of more than 64 bits."""
    return _LONG in text.translate(_DIGITS)


def json_line(line: bytes) -> Any:
    """One line of JSON in UTF-8, read strictly. A number is looked at closely only where one is long: a results file has
    some hundred in each of a hundred thousand lines. Raises ValueError with what is wrong."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte 0x{line[error.start]:02x} at {error.start + 1} is not UTF-8: no text, so no result"
        ) from None
    try:
        return (STRICT if has_long_number(line) else _QUICK).decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def bounded(path: str | Path, nbytes: int) -> bytes:
    """All of a file, or its first nbytes + 1 where it has more. Raises OSError."""
    with opened(path) as file:
        return file.read(nbytes + 1)


__all__ = [
    "STRICT",
    "BadWord",
    "bounded",
    "finite",
    "has_long_number",
    "json_line",
    "no_constant",
    "no_duplicates",
    "opened",
    "whole",
]
