"""A record from its line, fast: what a results file of a hundred thousand lines is read with.

Of the launches of a case only seconds and the allocator's count differ; the case, the claims, the model, the calls and
nearly all else are the same text again. So a line is split where its values differ, and every other part is decoded by
the codec once for each text that it has, and shared. That is safe because what a record holds is never changed.

Only a line that is byte for byte what `Writer.write` would have written is taken; of any other `Reader.record` says
None, and the codec reads it: slower, and with the place and the reason of what is wrong.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from enum import Enum
from functools import cache
from sys import intern
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from zerobench.claims import Claims
from zerobench.codec import decode
from zerobench.files import has_long_number, json_line
from zerobench.record import SCHEMA, Holding, Record, Sample

SPLIT = (Record, Sample, Holding)
"""The dataclasses that have values of their own in every launch, and parts that they share with others."""
ROOM_NBYTES = 48 << 20
"""Text of shared parts that is remembered at most. What comes in thousands is small; beyond, remembering begins anew."""
WHOLE = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Reader:
    """Reads the lines of one file. new: whether the last record had a part that no earlier one had, or was the first run
    that was ok with its claims."""

    def __init__(self) -> None:
        mirror, self._line = _mirrors()
        self.new, self._room = False, ROOM_NBYTES
        self._parts: list[_Parts] = []
        self._claimed: set[int] = set()  # claims, by identity, that a run which was ok has made
        self._fill = self._filler(Record, mirror)

    def record(self, line: bytes) -> Record | None:
        """The record that `line`, with its end, stands for; None where that has to be found out more slowly."""
        self.new = False
        try:
            found = self._line.decode(line)
            if msgspec.json.encode(found) + b"\n" != line or found.record.schema > SCHEMA:
                return None
            self._fill(found.record)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        record: Record = found.record
        if record.status == "ok" and id(record.claims) not in self._claimed:
            self.new = True
            self._claimed.add(id(record.claims))
        return record

    def _filler(self, kind: type, mirror: type) -> Callable[[Any], None]:
        """A function that makes of a decoded mirror what it is a mirror of, in place."""
        hints = get_type_hints(kind)
        words: list[str] = []
        parts: list[tuple[str, _Parts]] = []
        inner: list[tuple[str, Callable[[Any], None]]] = []
        for field in dataclasses.fields(mirror):
            if field.type is str:
                words.append(field.name)
            elif field.type is msgspec.Raw:
                parts.append((field.name, self._remembered(hints[field.name])))
            elif (split := _split(hints[field.name])) is not None:
                inner.append((field.name, self._filler(split, get_args(field.type)[0])))

        # Written out, as dataclasses write their own methods: half a million of these are filled for one large file.
        names: dict[str, Any] = {"kind": kind, "intern": intern}
        steps = [f"found.{name} = intern(found.{name})" for name in words]
        for i, (name, remembered) in enumerate(parts):
            names[f"part{i}"] = remembered
            steps.append(f"found.{name} = part{i}[bytes(found.{name})]")
        for name, filler in inner:
            names[f"fill_{name}"] = filler
            steps.append(f"for each in found.{name}: fill_{name}(each)")
        steps.append("found.__class__ = kind")  # of the same slots: no value is copied
        exec("def fill(found):\n " + "\n ".join(steps), names)
        filled: Callable[[Any], None] = names["fill"]
        return filled

    def _remembered(self, hint: Any) -> _Parts:
        parts = _Parts(self, hint)
        self._parts.append(parts)
        return parts

    def more(self, nbytes: int) -> None:
        """A part of so many bytes is about to be remembered."""
        self.new = True
        self._room -= nbytes + 100
        if self._room < 0:
            self._room = ROOM_NBYTES - nbytes
            self._claimed.clear()
            for parts in self._parts:
                parts.clear()


class _Parts(dict[bytes, Any]):
    """The values of one field by their text."""

    def __init__(self, reader: Reader, hint: Any) -> None:
        super().__init__()
        self._reader, self._hint = reader, hint
        self._claims = Claims in get_args(hint)
        self._quick = msgspec.json.Decoder(hint) if not self._claims else None

    def __missing__(self, text: bytes) -> Any:
        value = self._quickly(text)
        if value is None:
            data = json_line(text)
            if self._claims:
                value = None if data is None else Claims.from_json(data)
            else:
                value = decode(self._hint, data)
        self._reader.more(len(text))
        self[text] = value
        return value

    def _quickly(self, text: bytes) -> Any:
        """The value of a text that is what would be written of it, with no number past 64 bits; else None."""
        if self._quick is None or has_long_number(text):
            return None
        try:
            value = self._quick.decode(text)
        except msgspec.MsgspecError:
            return None
        return value if msgspec.json.encode(value) == text else None


@cache
def _mirrors() -> tuple[type, msgspec.json.Decoder[Any]]:
    mirror = _mirror(Record)
    return mirror, msgspec.json.Decoder(dataclasses.make_dataclass("Line", [("record", mirror)]))


def _mirror(kind: type) -> type:
    """A dataclass with the slots of `kind`: plain values as they are, split ones as mirrors, all others as text."""
    hints = get_type_hints(kind)
    fields = [(f.name, _kept(hints[f.name])) for f in dataclasses.fields(kind)]
    return dataclasses.make_dataclass(kind.__name__, fields, slots=True)


def _kept(hint: Any) -> Any:
    if (split := _split(hint)) is not None:
        return tuple[_mirror(split), ...]  # type: ignore[misc]
    if hint is int:
        return WHOLE
    if get_origin(hint) in (Union, types.UnionType):
        inner = [_kept(a) for a in get_args(hint) if a is not type(None)]
        return msgspec.Raw if msgspec.Raw in inner else Union[inner[0], None]  # noqa: UP007
    if hint in (str, float, bool) or (isinstance(hint, type) and issubclass(hint, Enum)):
        return hint
    return hint if hint == tuple[float, ...] else msgspec.Raw


def _split(hint: Any) -> Any:
    """The split dataclass that `hint` is a sequence of, if it is one."""
    args = get_args(hint) if get_origin(hint) is tuple else ()
    return args[0] if args and args[0] in SPLIT else None
