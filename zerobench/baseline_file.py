"""Baseline files: JSON that a person can review, a line a run, sorted, and read as if a stranger had written it.

Two kinds live in a folder: `bytes/<suite>.json`, exact numbers of any machine, and `<machine class>/<suite>.json`, step
times of that class. Both begin with what they are, their schema number and who measured; the rest are sections of one
line an entry, so that a diff names the runs that changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zerobench.codec import decode, encode
from zerobench.files import STRICT, BadWord, bounded
from zerobench.record import Provenance

SCHEMA = 1
MAX_NBYTES = 64 << 20
AGAIN = "; make it again: zerobench accept RESULT"

T = TypeVar("T")


class BaselineError(Exception):
    """A baseline that cannot be read or written: file, line where there is one, and why."""


@dataclass(frozen=True)
class By:
    """Who measured, with what: for a reader who wonders where a number came from. Nothing is compared with it."""

    zerobench: str
    torch: str
    python: str
    started: str
    host: str
    device: str
    suite_digest: str
    commit: str | None = None
    dirty: bool | None = None

    @classmethod
    def of(cls, provenance: Provenance) -> By:
        return cls(**{name: getattr(provenance, name) for name in cls.__dataclass_fields__})

    def __str__(self) -> str:
        commit = f", commit {self.commit[:12]}{' with changes' if self.dirty else ''}" if self.commit else ""
        return f"{self.started}, zerobench {self.zerobench}, torch {self.torch}{commit}"


@dataclass(frozen=True)
class Document:
    """A file that was read. `data` is a JSON object of the kind and schema asked for; its values are not judged yet."""

    path: Path
    text: str
    data: Mapping[str, Any]

    def error(self, what: object, *keys: str) -> BaselineError:
        """What is wrong, at the line on which the innermost of `keys` stands."""
        line, start = 0, 0
        for key in keys:
            found = self.text.find(_json(key) + ":", start)
            if found < 0:
                break
            start, line = found, _line(self.text, found)
        return BaselineError(f"{self.path}:{line}: {what}{AGAIN}" if line else f"{self.path}: {what}{AGAIN}")

    def value(self, kind: type[T], key: str) -> T:
        """The value under `key`. Raises BaselineError."""
        if key not in self.data:
            raise self.error(f"{key!r} is missing")
        try:
            return decode(kind, self.data[key], key)
        except (ValueError, OverflowError, RecursionError) as error:
            raise self.error(error, key) from None

    def section(self, kind: type[T], key: str) -> dict[str, T]:
        """The entries of a section, each of type `kind`. Raises BaselineError with the line of the bad one."""
        entries = self.value(dict[str, Any], key)
        out = {}
        for name, entry in entries.items():
            try:
                out[name] = decode(kind, entry, "value")
            except (ValueError, OverflowError, RecursionError) as error:
                raise self.error(f"{name}: {error}", key, name) from None
        return out


def read(path: Path, kind: str | None = None) -> Document:
    """The file, if it is a baseline of this kind ("bytes", "times"; None for either) and of a schema known here.

    Raises BaselineError; FileNotFoundError where there is no such file.
    """
    try:
        raw = bounded(path, MAX_NBYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BaselineError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_NBYTES:
        raise BaselineError(
            f"{path}: larger than {MAX_NBYTES:,} bytes, so not a baseline; name the file that `accept` wrote"
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BaselineError(f"{path}:{line}: not text in UTF-8, so not a baseline{AGAIN}") from None
    try:
        data = STRICT.decode(text)
    except json.JSONDecodeError as error:
        raise BaselineError(f"{path}:{error.lineno}: not JSON: {error.msg}{AGAIN}") from None
    except BadWord as error:
        raise BaselineError(f"{path}:{_line(text, text.rfind(error.word))}: {error}{AGAIN}") from None
    except RecursionError:
        raise BaselineError(f"{path}: nested too deeply{AGAIN}") from None
    document = Document(path, text, data if isinstance(data, dict) else {})
    if document.data.get("baseline") not in ("bytes", "times"):
        raise BaselineError(f"{path}:1: not a baseline of zerobench{AGAIN}")
    if kind is not None and document.data["baseline"] != kind:
        raise document.error(f"a baseline of {document.data['baseline']}, not of {kind}", "baseline")
    schema = document.value(int, "schema")
    if not 1 <= schema <= SCHEMA:
        raise document.error(f"schema {schema}; this zerobench reads up to {SCHEMA}: upgrade it, or else", "schema")
    return document


def write(path: Path, head: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Write a baseline, or leave the file alone where its sections say the same already; whether it was written.

    The file is replaced as a whole or not at all. Raises BaselineError.
    """
    encoded = {name: encode(entries) for name, entries in sections.items()}
    try:
        old = json.loads(bounded(path, MAX_NBYTES))
        if all(old[name] == entries for name, entries in encoded.items()) and old["schema"] == SCHEMA:
            return False
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        pass  # absent, or not what it should be: replaced
    lines = [f"{_json(name)}: {_json(encode(value))}" for name, value in head.items()]
    for name, entries in encoded.items():
        rows = ",\n".join(f"  {_json(key)}: {_json(entries[key])}" for key in sorted(entries))
        lines.append(f"{_json(name)}: {{\n{rows}\n}}" if rows else f"{_json(name)}: {{}}")
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.unlink(missing_ok=True)
            with beside.open("x", encoding="utf-8") as file:  # never through a link that lies there
                file.write("{\n" + ",\n".join(lines) + "\n}\n")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise BaselineError(f"{path}: cannot be written: {error.strerror}; --baselines names another folder") from error
    return True


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, max(at, 0)) + 1


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, sort_keys=isinstance(value, dict))
