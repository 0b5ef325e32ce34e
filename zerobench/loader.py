"""YAML files, read strictly: everything that is wrong with one is said at once, each at its line and column.

The language is the JSON-like core of YAML 1.2, as editors read it: `no`, `on`, `22:30`, `1_000`, `010` and dates are
not what YAML 1.1 makes of them (`1e-3` is a number, `010` is 10, the others are text). Refused, because a reader and
this program could understand them differently: duplicate keys, keys that are not text, merge keys, tags, several
documents, control characters. Refused, because they hurt: files over 1 MB, deep nesting, aliases without end.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zerobench.files import bounded

MAX_NBYTES = 1_000_000
MAX_NODES = 20_000  # after aliases are expanded
MAX_DEPTH = 30
SHOWN = 50
"""Problems that are told one by one."""
LONGEST_WORD = 200
"""Characters of a word for which a near one is looked for: what that takes grows with the square."""

Loc = tuple[str | int, ...]
"""Where a value is: the keys and list positions that lead to it, ("xfail", 0, "check")."""


@dataclass(frozen=True)
class Problem:
    """What is wrong at one place. line and col count from 1; 0 where it is the whole file. path: dotted, or empty."""

    line: int
    col: int
    path: str
    what: str

    def text(self, file: str) -> str:
        place = f"{file}:{self.line}:{self.col}" if self.line else file
        said = ": ".join(part for part in (place, _short(self.path, 200), _short(self.what, 1000)) if part)
        return said.replace("\n", "\\n")


class BadFile(Exception):
    """A file that cannot be used. `problems` has all that is wrong with it, in the order of the file; the text has the
    first `SHOWN` of them, so that what a stranger made wrong a thousand times can still be read."""

    def __init__(self, problems: Iterable[Problem], file: str) -> None:
        self.problems = tuple(sorted(problems, key=lambda p: (p.line, p.col)))
        self.file = file
        more = len(self.problems) - SHOWN
        lines = [p.text(file) for p in self.problems[:SHOWN]]
        super().__init__("\n".join([*lines, f"{file}: and {more:,} more problems"] if more > 0 else lines))


@dataclass(frozen=True)
class Document:
    """data: what the file says, in dict, list, str, int, float, bool and None. marks: (line, col) of each value, or of
    its key where it has one. text: the file's own."""

    data: Any
    marks: Mapping[Loc, tuple[int, int]]
    file: str
    text: str

    def problem(self, loc: Loc, what: str) -> Problem:
        """A problem at `loc`, or at the nearest place around it that the file has."""
        inner = next(loc[:i] for i in range(len(loc), -1, -1) if loc[:i] in self.marks)
        return Problem(*self.marks[inner], ".".join(map(str, loc)), what)


def read(path: str | Path) -> Document:
    """The document in a file. Raises BadFile, also where there is no such file."""
    file = str(path)
    try:
        raw = bounded(path, MAX_NBYTES)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise BadFile(
            [Problem(0, 0, "", f"cannot be read: {getattr(error, 'strerror', None) or error}")], file
        ) from None
    return parse(raw, file)


def parse(raw: bytes | str, file: str = "<text>") -> Document:
    """The document in `raw`. Raises BadFile."""
    text = _decoded(raw, file)
    try:
        node = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(part for part in (error.context, error.problem) if part)
        line, col = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise BadFile([Problem(line, col, "", what)], file) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        what = f"character {error.character!a} is not allowed in YAML"
        raise BadFile([Problem(len(before), len(before[-1]) + 1, "", what)], file) from None
    except (ValueError, OverflowError) as error:  # PyYAML lets these through, for an escape such as "\\UFFFFFFFF"
        raise BadFile([Problem(0, 0, "", f"not YAML: {error}")], file) from None
    if node is None:
        raise BadFile([Problem(0, 0, "", "the file is empty; `zerobench schema` says what stands in a suite")], file)
    walk = _Walk()
    data = walk.value(node, ())
    if walk.problems:
        raise BadFile(walk.problems, file)
    return Document(data, walk.marks, file, text)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)" for the nearest of `known`, or nothing where none is near."""
    if len(text := str(word).lower()) > LONGEST_WORD:
        return ""
    near = difflib.get_close_matches(
        text, [name for name in sorted(known) if len(name) <= LONGEST_WORD], n=1, cutoff=0.6
    )
    return f" (did you mean {near[0]!r}?)" if near else ""


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 60]} ... ({len(text):,} characters) ... {text[-20:]}"


def _decoded(raw: bytes | str, file: str) -> str:
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogatepass")
    if len(raw) > MAX_NBYTES:
        raise BadFile([Problem(0, 0, "", f"larger than {MAX_NBYTES:,} bytes: is this the right file?")], file)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].split(b"\n")
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        raise BadFile([Problem(len(before), len(before[-1]) + 1, "", what)], file) from None


class _Composer(yaml.SafeLoader):
    """PyYAML up to nodes; nothing is constructed by it. YAML 1.2's core scalars in place of all of YAML 1.1's.

    Both caps are here as well as in the walk: this part recurses, and a file of only nodes would take minutes.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        if self._depth > MAX_DEPTH + 1:
            raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
        if self._nodes > MAX_NODES:
            raise yaml.composer.ComposerError(None, None, _TOO_MANY, mark)
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


_TOO_MANY = f"more than {MAX_NODES:,} values, aliases expanded"
_TAG = "tag:yaml.org,2002:"
_PATTERNS = {  # first characters, pattern: YAML 1.2.2 section 10.3.2
    "null": ("~nN", r"~|null|Null|NULL"),
    "bool": ("tTfF", r"true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    "float": (
        "-+.0123456789",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
}
for _kind, (_first, _pattern) in _PATTERNS.items():
    _Composer.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Composer.add_implicit_resolver(_TAG + "null", re.compile(r"\Z"), [""])

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Refused(Exception):
    """Ends the walk: what is left cannot be walked to its end."""


class _Walk:
    """Values, marks and problems of a tree of nodes, in one pass. An alias is walked each time that it is used."""

    def __init__(self) -> None:
        self.marks: dict[Loc, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self._nodes = 0
        self._chars = 0
        self._open: set[int] = set()  # nodes on the way from the root: seen again, an alias holds itself

    def value(self, root: yaml.Node, loc: Loc) -> Any:
        try:
            return self._value(root, loc)
        except _Refused:
            return None

    def _value(self, node: yaml.Node, loc: Loc) -> Any:
        self.marks.setdefault(loc, _mark(node))
        self._nodes += 1
        self._chars += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if self._nodes > MAX_NODES or self._chars > MAX_NBYTES:
            self._refuse(node, loc, _TOO_MANY)
            raise _Refused
        if len(loc) > MAX_DEPTH:
            self._refuse(node, loc, f"nested deeper than {MAX_DEPTH} levels")
            raise _Refused
        if id(node) in self._open:
            self._refuse(node, loc, "the alias stands inside what it names")
            return None
        self._open.add(id(node))
        try:
            return self._constructed(node, loc)
        except ValueError as error:
            self._refuse(node, loc, str(error))
            return None
        finally:
            self._open.discard(id(node))

    def _constructed(self, node: yaml.Node, loc: Loc) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, loc)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self._value(item, (*loc, i)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and (kind in _PATTERNS or kind == "str"):
            return _scalar(kind, node.value)
        raise ValueError(f"the tag {node.tag!r} is refused: plain values only")

    def _mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, Any]:
        out: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, loc)
            if key is None:
                continue
            inner = (*loc, key)
            if key in lines:
                self._refuse(key_node, inner, f"duplicate key (first at line {lines[key]})")
                continue
            lines[key] = key_node.start_mark.line + 1
            self.marks[inner] = _mark(key_node)
            out[key] = self._value(value_node, inner)
        return out

    def _key(self, node: yaml.Node, loc: Loc) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._refuse(node, loc, "a key must be text, not a list or a mapping")
        elif node.tag != _TAG + "str":
            self._refuse(node, loc, f"a key must be text: quote {node.value!r}")
        elif node.value == "<<" and node.style is None:
            self._refuse(node, loc, "the merge key '<<' is not YAML 1.2: write the keys out")
        elif _CONTROL.search(node.value):
            self._refuse(node, loc, "control characters are refused")
        else:
            return str(node.value)
        return None

    def _refuse(self, node: yaml.Node, loc: Loc, what: str) -> None:
        self.problems.append(Problem(*_mark(node), ".".join(map(str, loc)), what))


def _scalar(kind: str, text: str) -> str | int | float | bool | None:
    if kind == "str":
        if _CONTROL.search(text):
            raise ValueError("control characters are refused")
        return text
    if not re.fullmatch(_PATTERNS[kind][1], text) and not (kind == "null" and not text):
        raise ValueError(f"{text!r} is not of the type {kind} that its tag says")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if len(text) > 20:
        raise ValueError("a whole number of more than 64 bits")
    value = int(text, 0 if text[:2] in ("0x", "0o") else 10)
    if not -(2**63) <= value < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    return value


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
