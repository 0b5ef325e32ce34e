"""Files that are nearly right: the shipped suites, a baseline, a results file, with a few things changed.

Random bytes end in the first line of a reader. What is right but for one value, one key or one token comes further.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

from zerobench.case import Case
from zerobench.codec import encode
from zerobench.record import Provenance, Record
from zerobench.shipped import find, names
from zerobench.tests.made import CASE, record
from zerobench.tests.pages import CHECKS, HOSTILE, about

NUMBERS = (0, -1, 1, 2, 1 << 20, 2**31, 2**53, 2**63 - 1, 2**64, 10**19, 10**400, 0.5, -0.0, 1e308, 5e-324, True, False)
WORDS = ("", "nan", "inf", "-inf", "0..1048575", "9..1", "\0", "a" * 5000, "../../x", "zero2", "plain", "@", HOSTILE)
OTHERS: tuple[Any, ...] = (None, [], {}, [[]], {"": {}}, [None] * 40, {"record": {}}, float("nan"), float("inf"))
TOKENS = ("*a", "&a ", "!!python/object:os.system ", "!!int ", "- ", ": ", "? ", "{", "}", "[", "]", "|", ">", "<<: ")
TOKENS += (
    "---\n",
    "...\n",
    "\t",
    "\r\n",
    "\ufeff",
    "%YAML 1.1\n",
    "'",
    '"',
    "#",
    ".nan",
    ".inf",
    "~",
    "0x",
    "1e999",
    "\\",
)


def made_results(case: Case = CASE) -> list[dict[str, Any]]:
    """The lines of a results file: a provenance, and records of four scenarios, two launches of one."""
    records = [record(scenario, case) for scenario in ("plain", "dyadic", "timed", "timed", "wire", "tied")]
    return lines_of(about((case,), checks=(*CHECKS, "memory.scaling", "time.step")), records)


def lines_of(made: Provenance, records: list[Record]) -> list[dict[str, Any]]:
    return [made.to_json(), *(r.to_json() for r in records)]


def suites() -> list[str]:
    return [find(name).read_text() for name in names()]


def mutated(data: Any, chance: random.Random, most: int = 3) -> Any:
    """A copy of a tree of JSON with up to `most` values replaced, removed, doubled, wrapped or exchanged."""
    data = [copy.deepcopy(data)]  # in a list, so that the root has a place too
    for _ in range(chance.randint(1, most)):
        places = [place for place in _places(data) if place[0] is not data or len(data) == 1]
        if not places:
            break
        holder, key = chance.choice(places)
        chance.choice(_CHANGES)(holder, key, chance, places)
    return data[0] if data else None


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every holder and key or index of a tree."""
    found, todo = [], [tree]
    while todo:
        holder = todo.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                todo.append(holder[key])
    return found


def _replace(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    holder[key] = copy.deepcopy(chance.choice(chance.choice((NUMBERS, WORDS, OTHERS))))


def _remove(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    del holder[key]


def _exchange(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    """A value from elsewhere in the tree: of another type, or of a type that fits and means something else."""
    other, there = chance.choice(places)
    if there in other if isinstance(other, dict) else there < len(other):
        holder[key] = copy.deepcopy(other[there])


def _wrap(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    holder[key] = chance.choice(([holder[key]], {"x": holder[key]}))


def _double(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key])] * chance.choice((1, 30))
    else:
        holder[f"{key}x"] = holder[key]


def _nudge(holder: Any, key: Any, chance: random.Random, places: list[tuple[Any, Any]]) -> None:
    value = holder[key]
    if isinstance(value, (int, float)):
        holder[key] = value + chance.choice((-1, 1)) if chance.random() < 0.5 else -value
    elif isinstance(value, str):
        holder[key] = value + chance.choice(WORDS)


_CHANGES: tuple[Callable[..., None], ...] = (_replace, _replace, _remove, _exchange, _wrap, _double, _nudge, _nudge)


def mutated_text(text: str, chance: random.Random, most: int = 3) -> str:
    """YAML, or any text, with up to `most` of its words and marks replaced, removed, moved or doubled."""
    parts = re.findall(r"\w+|\s+|[^\w\s]", text)
    for _ in range(chance.randint(1, most)):
        at = chance.randrange(len(parts)) if parts else 0
        what = chance.randrange(5)
        if what == 0 and parts:
            del parts[at]
        elif what == 1:
            parts.insert(at, chance.choice(TOKENS))
        elif what == 2 and parts:
            parts[at] = chance.choice((*map(str, NUMBERS), *WORDS[:-1], *TOKENS))
        elif what == 3 and parts:
            parts[at] = chance.choice(parts)
        elif parts:
            parts[at:at] = parts[at : at + chance.randint(1, 40)] * chance.choice((1, 8))
    return "".join(parts)


def dumped(tree: Any) -> str:
    """JSON as Python writes it, NaN and Infinity, which are none, included."""
    return json.dumps(tree, default=encode, separators=(",", ":"))
