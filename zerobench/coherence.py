"""What the parts of a suite say to each other: names that exist, values that the matrix has, excuses that excuse.

Works on the raw data, and passes over what has not the right shape (that is told elsewhere), so that every mistake of a
file can be told at once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerobench.loader import Loc, did_you_mean

MAX_CASES = 20_000

AXES = ("implementation", "model", "precision", "A", "world_size")
"""In the order in which cases are listed: the world size varies fastest, so that the rows of a table differ by n."""

Mistake = tuple[Loc, str]
Axes = dict[str, list[Any]]


@dataclass(frozen=True)
class Known:
    """Names that exist, where they can be known before a run; None is not judged."""

    implementations: Collection[str] | None = None
    models: Collection[str] | None = None
    checks: Collection[str] | None = None


def implementation_name(reference: str) -> str:
    """The name that stands in ids: an entry point's own; of "module:MyZero" or "./path.py:MyZero" it is "my-zero"."""
    if ":" not in reference:
        return reference
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", reference.rpartition(":")[2])
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")


def mistakes(data: Any, known: Known | None = None) -> Iterator[Mistake]:
    """Each mistake with its place. Never raises, whatever `data` is."""
    if not isinstance(data, Mapping):
        return
    known = known or Known()
    axes = _axes(data)
    checks = _scalars(data.get("checks"))
    matrix = data.get("matrix")
    matrix = matrix if isinstance(matrix, Mapping) else {}
    for axis in AXES:
        yield from _duplicates(matrix.get(axis), ("matrix", axis))
    yield from _duplicates(data.get("checks"), ("checks",))
    yield from _unknown(
        matrix.get("implementation"), "implementation", known.implementations, ("matrix", "implementation")
    )
    yield from _unknown(matrix.get("model"), "model", known.models, ("matrix", "model"))
    yield from _unknown(data.get("checks"), "check", known.checks, ("checks",))
    yield from same_names(axes.get("implementation", []))
    yield from _options(data.get("options"), axes)
    if data.get("launch") == "simulate" and data.get("device", "cpu") != "cpu":
        yield ("device",), "a simulated world has tensors without memory, of device cpu"

    entries = {key: list(_entries(data.get(key))) for key in ("exclude", "xfail")}
    wrong = {
        loc: found for key in entries for i, e in entries[key] if (found := list(_values(e, (loc := (key, i)), axes)))
    }
    for found in wrong.values():
        yield from found
    for i, entry in entries["xfail"]:
        check = entry.get("check")
        if isinstance(check, str) and checks and check not in checks:
            yield (
                ("xfail", i, "check"),
                f"{check!r} is not among the suite's checks{did_you_mean(check, map(str, checks))}",
            )

    if len(axes) < len(AXES):
        return
    numel = 1
    for values in axes.values():
        numel *= len(values)
    if numel > MAX_CASES:
        yield ("matrix",), f"{numel:,} cases; at most {MAX_CASES:,}: split the suite, or name fewer values"
        return
    yield from _idle(entries, axes, set(wrong))


def _axes(data: Mapping[str, Any]) -> Axes:
    """The matrix's axes that are lists, in the order of AXES, by the values that could stand there."""
    matrix = data.get("matrix")
    given = {"A": [1], **matrix} if isinstance(matrix, Mapping) else {}
    return {axis: values for axis in AXES if (values := _scalars(given.get(axis)))}


def _scalars(value: Any) -> list[Any]:
    return [v for _, v in _numbered(value)]


def _entries(value: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    yield from ((i, e) for i, e in enumerate(value if isinstance(value, list) else []) if isinstance(e, Mapping))


def _picks(entry: Mapping[str, Any]) -> Axes:
    """The values that an entry of `exclude` or `xfail` names on each axis that it names; any value on the others."""
    return {a: _scalars(v if isinstance(v := entry[a], list) else [v]) for a in AXES if a in entry}


def _duplicates(values: Any, loc: Loc) -> Iterator[Mistake]:
    seen: list[Any] = []
    for i, value in _numbered(values):
        if value in seen:
            yield (*loc, i), f"{value!r} stands there already"
        seen.append(value)


def _unknown(values: Any, kind: str, known: Collection[str] | None, loc: Loc) -> Iterator[Mistake]:
    for i, value in _numbered(values):
        if known is not None and isinstance(value, str) and value not in known and ":" not in value:
            hint = did_you_mean(value, known) or f"; known: {', '.join(sorted(known)) or 'none'}"
            yield (*loc, i), f"unknown {kind} {value!r}{hint}"


def _numbered(values: Any) -> Iterator[tuple[int, Any]]:
    """Positions and values of what could stand in a list of names or numbers."""
    for i, value in enumerate(values if isinstance(values, list) else []):
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            yield i, value


def same_names(references: Iterable[Any]) -> Iterator[Mistake]:
    """References that ids would not tell apart."""
    by_name: dict[str, list[str]] = {}
    for reference in dict.fromkeys(r for r in references if isinstance(r, str)):
        by_name.setdefault(implementation_name(reference), []).append(reference)
    for name, same in by_name.items():
        if len(same) > 1:
            yield ("matrix", "implementation"), f"{' and '.join(same)} would both be called {name!r} in ids"


def _options(options: Any, axes: Axes) -> Iterator[Mistake]:
    if isinstance(options, Mapping) and "implementation" in axes:
        for name in options:
            if name not in _spellings(axes)["implementation"]:
                hint = did_you_mean(name, map(str, axes["implementation"]))
                yield ("options", name), f"no implementation {name!r} is in the matrix{hint}"


def _spellings(axes: Axes) -> Axes:
    """The axes with, beside each implementation's reference, the name that it has in ids."""
    both = [w for r in axes.get("implementation", []) for w in (r, implementation_name(r) if isinstance(r, str) else r)]
    return axes | {"implementation": both}


def _values(entry: Mapping[str, Any], loc: Loc, axes: Axes) -> Iterator[Mistake]:
    if not any(axis in entry for axis in AXES) and loc[0] == "exclude":
        yield loc, f"names no axis ({', '.join(AXES)}): it would exclude every case"
    for axis, picked in _picks(entry).items():
        yield from _duplicates(entry[axis], (*loc, axis))
        there = _spellings(axes)[axis] if axis in axes else picked
        for value in dict.fromkeys(picked):
            if value not in there:
                hint = did_you_mean(value, there) if isinstance(value, str) else ""
                yield (*loc, axis), f"{value!r} is not in matrix.{axis}{hint}: it matches no case"


def _idle(entries: Mapping[str, list[tuple[int, Mapping[str, Any]]]], axes: Axes, wrong: set[Loc]) -> Iterator[Mistake]:
    """Excuses for cases that are excluded, and exclusions of everything. Those already told of are passed over."""

    left = set(cells(axes, {}))
    for picks in _distinct(_picks(entry) for i, entry in entries["exclude"] if ("exclude", i) not in wrong):
        left.difference_update(cells(axes, picks))
    if not left:
        yield ("exclude",), "no case is left"
        return
    idle: dict[str, bool] = {}
    for i, entry in entries["xfail"]:
        if ("xfail", i) not in wrong:
            picks = _picks(entry)
            if (key := repr(picks)) not in idle:
                idle[key] = left.isdisjoint(cells(axes, picks))
            if idle[key]:
                yield ("xfail", i), "matches no case: those it names are excluded"


def cells(axes: Mapping[str, Collection[Any]], picks: Mapping[str, Collection[Any]]) -> Iterator[tuple[Any, ...]]:
    """The cells of the matrix that an entry means, without a walk over the others. picks: values by axis, any on an axis
    that it does not name."""
    wanted = {axis: set(values) for axis, values in picks.items()}
    return itertools.product(
        *(
            values if axis not in wanted else [v for v in values if {v, implementation_name(str(v))} & wanted[axis]]
            for axis, values in axes.items()
        )
    )


def _distinct(entries: Iterable[Axes]) -> Iterable[Axes]:
    """Each once: what a stranger repeats a thousand times costs no more than what is said once."""
    return {repr(picks): picks for picks in entries}.values()
