"""A record from its line, fast: what a results file of a hundred thousand lines is read with.

Of the launches of a case only what stands in the middle of a line differs, from `wall_s` to `launch`. So a line is cut in
three: what the run was is decoded once for each text, the middle each time, the samples once for each text, and then copied
with this launch's own values. A case's samples are first compared with those of its last launch. Samples that are new are
cut once more, and their parts decoded once for each text, since cases have much in common too. What is decoded once is
shared, and that is safe because what a record holds is never changed.

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
from zerobench.record import LAUNCH, SCHEMA, Holding, Record, Sample

SPLIT = (Sample, Holding)
"""The dataclasses that have values of their own in every case, and parts that they share with others."""
OWN, CUT = b',"wall_s":', b',"samples":'
"""Where a line is cut. They are in no text of JSON, whose quotes have a backslash."""
ROOM_NBYTES = 48 << 20
"""Text of shared parts that is remembered at most. What comes in thousands is small; beyond, remembering begins anew. Of
whole samples as much once more; beyond, those that are there stay, since launches of many cases come in turns."""
WHOLE = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Reader:
    """Reads the lines of one file. new: whether the last record had a part that no earlier one had, or was the first run
    that was ok with its claims."""

    def __init__(self) -> None:
        self.new, self._room = False, ROOM_NBYTES
        self._parts: list[_Parts] = []
        self._claimed: set[int] = set()  # claims, by identity, that a run which was ok has made
        self._made = _made()
        hints = get_type_hints(Record)
        self._run, self._claims, self._model = (self._remembered(hints[n]) for n in ("run", "claims", "model"))
        self._heads: dict[bytes, _Head] = {}
        self._told: dict[bytes, _Told] = {}
        self._told_room = ROOM_NBYTES
        self._fill = self._filler(Sample, self._made.told)

    def record(self, line: bytes) -> Record | None:
        """The record that `line`, with its end, stands for; None where that has to be found out more slowly."""
        self.new = False
        own, cut = line.find(OWN), line.find(CUT)
        if not 0 < own < cut or not line.endswith(b"}}\n"):
            return None
        try:
            head = self._heads.get(text := line[:own]) or self._head(text)
            middle = b"{" + line[own + 1 : cut] + b"}"
            found = self._made.middle.decode(middle)
            if msgspec.json.encode(found) != middle or found.schema != SCHEMA:
                return None
            last = head.last
            if not line.endswith(last.text) or len(line) - len(last.text) != cut:
                last = head.last = self._samples(line[cut:])
            record = self._record(head, last.told, found)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if record.status == "ok" and id(record.claims) not in self._claimed:
            self.new = True
            self._claimed.add(id(record.claims))
        return record

    def _head(self, text: bytes) -> _Head:
        """What a line says of its run. Raises ValueError where the text is not what would be written."""
        found = self._made.head.decode(whole := text + b"}}")
        if msgspec.json.encode(found) != whole:
            raise ValueError
        it = found.record
        known = (self._run[bytes(it.run)], self._claims[bytes(it.claims)], self._model[bytes(it.model)])
        made = _Head(intern(it.suite), known[0], intern(it.status), intern(it.reason), *known[1:], _Told(b"none", ()))
        self.more(len(text))
        self._heads[text] = made
        return made

    def _record(self, head: _Head, told: tuple[Any, ...], found: Any) -> Record:
        """Raises ValueError where there is not one value of a launch for each sample."""
        make, own = self._made.sample, found.launch
        samples = [make(*each) for each in zip(told, own.times_s, own.run_s, own.allocator, strict=True)]
        return self._made.record(
            head.suite,
            head.run,
            head.status,
            head.reason,
            head.claims,
            head.model,
            tuple(samples),
            found.wall_s,
            intern(found.provenance),
            found.schema,
        )

    def _samples(self, text: bytes) -> _Told:
        """text: of a line, from CUT on. Raises ValueError where it is not what would be written."""
        if (known := self._told.get(text)) is not None:
            return known
        told = self._made.samples.decode(inner := text[len(CUT) : -3])
        if msgspec.json.encode(told) != inner:
            raise ValueError
        for each in told:
            self._fill(each)
        if len(text) > self._told_room:
            return _Told(b"none", told)  # no line ends so
        self._told_room -= len(text) + 100
        self._told[text] = made = _Told(text, told)
        return made

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

        # Written out, as dataclasses write their own methods: a hundred thousand are filled for one large file.
        names: dict[str, Any] = {"kind": kind, "intern": intern}
        steps = [f"found.{name} = intern(found.{name})" for name in words]
        for i, (name, remembered) in enumerate(parts):
            names[f"part{i}"] = remembered
            steps.append(f"found.{name} = part{i}[bytes(found.{name})]")
        for name, filler in inner:
            names[f"fill_{name}"] = filler
            steps.append(f"for each in found.{name}: fill_{name}(each)")
        if kind is not Sample:
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
            self._heads.clear()
            for parts in self._parts:
                parts.clear()


@dataclasses.dataclass(slots=True)
class _Told:
    """Samples but for what is a launch's own. text: of the line, from CUT on."""

    text: bytes
    told: tuple[Any, ...]


@dataclasses.dataclass(slots=True)
class _Head:
    """What a line says of its run. last: the samples of its last launch."""

    suite: str
    run: Any
    status: str
    reason: str
    claims: Any
    model: Any
    last: _Told


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


@dataclasses.dataclass(frozen=True)
class _Made:
    """What is made once of the dataclasses of a record. told: Sample without the fields of LAUNCH. record: as Record, with
    all values by position. sample: a Sample of what is told, and then the fields of LAUNCH."""

    head: msgspec.json.Decoder[Any]
    middle: msgspec.json.Decoder[Any]
    samples: msgspec.json.Decoder[Any]
    told: type
    record: Callable[..., Record]
    sample: Callable[..., Sample]


@cache
def _made() -> _Made:
    hints, fields = get_type_hints(Sample), [field.name for field in dataclasses.fields(Sample)]
    launch = dataclasses.make_dataclass("Launch", [(n, tuple[_number(hints[n]), ...]) for n in LAUNCH])  # type: ignore[misc]
    kinds = dict(_mirrored(Record))
    head = [(name, kinds[name]) for name in ("suite", "run", "status", "reason", "claims", "model")]
    middle = [(name, kinds[name]) for name in ("wall_s", "provenance", "schema")]
    head_kind = dataclasses.make_dataclass("Head", head, slots=True)
    told = dataclasses.make_dataclass("Told", [p for p in _mirrored(Sample) if p[0] not in LAUNCH], slots=True)
    names = {"Sample": Sample, "Open": _open(Sample)}
    values = ", ".join(name if name in LAUNCH else f"told.{name}" for name in fields)
    source = f"def sample(told, {', '.join(LAUNCH)}):\n it = Open({values})\n it.__class__ = Sample\n return it"
    exec(source, names)
    open_record = _open(Record)

    def record(*values: Any) -> Record:
        made = open_record(*values)
        made.__class__ = Record
        return made  # type: ignore[no-any-return]

    return _Made(
        msgspec.json.Decoder(dataclasses.make_dataclass("Line", [("record", head_kind)])),
        msgspec.json.Decoder(dataclasses.make_dataclass("Middle", [*middle, ("launch", launch)], slots=True)),
        msgspec.json.Decoder(tuple[told, ...]),  # type: ignore[valid-type]
        told,
        record,
        names["sample"],  # type: ignore[arg-type]
    )


def _open(kind: type) -> Any:
    """A dataclass with the slots of `kind` that can still be changed: to make one takes a third of the time."""
    return dataclasses.make_dataclass("Open", [field.name for field in dataclasses.fields(kind)], slots=True)


def _number(hint: Any) -> Any:
    """`hint` with whole numbers of 64 bits."""
    return tuple[Union[WHOLE, None], ...] if hint == tuple[int | None, ...] else hint  # noqa: UP007


def _mirrored(kind: type) -> list[tuple[str, Any]]:
    """The fields of a mirror of `kind`: plain values as they are, split ones as mirrors, all others as text."""
    hints = get_type_hints(kind)
    return [(f.name, _kept(hints[f.name])) for f in dataclasses.fields(kind)]


def _mirror(kind: type) -> type:
    return dataclasses.make_dataclass(kind.__name__, _mirrored(kind), slots=True)


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
